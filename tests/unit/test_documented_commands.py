"""Who runs the commands of the documents: every command, and every option that a document shows with it, has an entry here.

An entry names the test that runs the command, or says why none can and what is checked instead. `test_docs` checks beside that
that every one of them is accepted as it stands. Somebody who documents a new command or option is told here.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
from test_docs import ALL, GUIDES, OURS, ROOT, TEXTS, Command, mentions

SERVED = "tests/serve/test_documented_commands.py"
SIMULATED = "tests/unit/test_simulate_command.py::test_the_last_line_is_one_object"
DISTILLED = "tests/numerics/test_distill.py::test_the_folder_is_a_draft_that_is_accepted_more_than_a_random_one"
SOURCES = "tests/numerics/test_bench_sources.py::test_every_source_on_every_kind_of_prompt"
CALIBRATED = "tests/numerics/test_calibrate_command.py::test_every_setting_is_measured_and_the_best_can_be_configured"
RENDERED = "tests/k8s/test_schemas.py::test_core_objects_fit_kubernetes_schemas"


@dataclass(frozen=True)
class Ran:
    """``test`` runs it, as ``FILE::NAME``; it gives each of ``options``."""

    test: str
    options: str = ""


@dataclass(frozen=True)
class Instead:
    """It cannot run here, for a reason; ``test`` checks what can be checked."""

    reason: str
    test: str
    options: str = ""


Entry = Ran | Instead
NO_CLUSTER = "there is no Kubernetes here"
COMMANDS: dict[str, tuple[Entry, ...]] = {
    "outrider fetch": (Ran(f"{SERVED}::test_the_demo_asks_and_shows_what_speculation_did"),),
    "outrider serve": (
        Ran(f"{SERVED}::served", "--config --set"),
        Instead(
            "it would need a second Ray cluster on this machine, of which there is one for all tests",
            "tests/serve/test_serve_deploy.py::test_the_demo_of_the_manifests_answers",
            "--address",
        ),
    ),
    "outrider generate": (Ran("tests/serve/test_cli.py::test_generate_prints_an_answer"),),
    "outrider top": (
        Ran(f"{SERVED}::test_commands_for_a_running_server", "--once --url"),
        Ran("tests/unit/test_endpoint.py::test_a_key_is_shown_and_asked_for", "--api-key-env"),
    ),
    "outrider doctor": (
        Ran(f"{SERVED}::test_commands_for_a_running_server", "--json --url"),
        Ran("tests/serve/test_observe.py::test_doctor_examines_a_configuration", "--config"),
        Ran("tests/unit/test_endpoint.py::test_a_key_is_shown_and_asked_for", "--api-key-env"),
    ),
    "outrider verify-lossless": (
        Ran("tests/serve/test_verify_lossless_cli.py::test_the_default_pair_is_lossless", "--quick --config"),
    ),
    "outrider calibrate": (Ran(CALIBRATED, "--quick --context --temperature"),),
    "outrider simulate": (
        Ran(
            SIMULATED, "--profile --traffic --gpus --plot --max-batch --max-depth --max-ttft-ms --prompt-tokens --output-tokens"
        ),
        Ran("tests/unit/test_simulate_command.py::test_it_finds_the_fewest_gpus", "--max-itl-ms"),
    ),
    "outrider distill": (
        Ran(DISTILLED, "--target --out --tokens --device"),
        Ran("tests/numerics/test_distill.py::test_a_draft_is_trained_for_as_long_as_was_said", "--kind --minutes"),
        Ran(
            "tests/numerics/test_distill.py::test_a_head_learns_from_the_samples_of_a_draft_and_is_measured_as_it_is_served",
            "--samples",
        ),
    ),
    "outrider bench engine": (
        Ran("tests/numerics/test_documented_commands.py::test_bench_engine", "--quick --json --no-http --batches --set"),
    ),
    "outrider bench sources": (Ran(SOURCES, "--json --sources --markdown --set"),),
    "outrider bench rounds": (Ran("tests/serve/test_bench_rounds.py::test_the_command_measures_and_reports", "--quick --set"),),
    "outrider bench sampling": (Ran("tests/numerics/test_documented_commands.py::test_bench_sampling", "--quick"),),
    "outrider bench acceptance": (Ran("tests/numerics/test_documented_commands.py::test_bench_acceptance", "--quick"),),
    "outrider bench load": (
        Ran(f"{SERVED}::test_commands_for_a_running_server", "--url --sweep --repeats --max-tokens"),
        Ran("tests/serve/test_bench_load.py::test_the_command_without_a_server_of_its_own", "--quick --set"),
    ),
    "make demo": (Ran(f"{SERVED}::test_the_demo_asks_and_shows_what_speculation_did"),),
    "make test": (Instead("it is what runs this", "tests/unit/test_docs.py::test_other_commands_name_what_is_there"),),
    "make check": (Instead("it is what runs this", "tests/unit/test_docs.py::test_other_commands_name_what_is_there"),),
    "make k8s-tests": (Instead("`make test` runs them, too", RENDERED),),
    "make format": (
        Instead("it changes files; CI runs its check", "tests/unit/test_docs.py::test_other_commands_name_what_is_there"),
    ),
    "make browser": (
        Instead("it needs a browser of the system", "tests/browser/test_page.py::test_it_loads_alone_and_without_errors"),
    ),
    "pre-commit install": (
        Instead("it changes the clone", "tests/unit/test_documented_commands.py::test_hooks_are_those_that_the_text_names"),
    ),
    "python -m deployments.monitoring": (Ran("tests/unit/test_docs.py::test_cheap_commands_run", "--rules"),),
    "python -m deployments.reference": (Ran("tests/unit/test_docs.py::test_cheap_commands_run"),),
    "python tests/browser/screenshots.py": (
        Instead(
            "it needs a browser of the system, and minutes",
            "tests/browser/test_page.py::test_screenshots_in_the_docs_are_small",
        ),
    ),
    "python tests/k8s/image_steps.py": (
        Instead(
            "it needs a package index, and minutes; its last step is run",
            "tests/k8s/test_image.py::test_the_steps_install_everything_that_the_code_reads",
        ),
    ),
    "pip install .": (Ran("tests/k8s/test_image.py::test_the_steps_install_everything_that_the_code_reads"),),
    "pip install .[tracing]": (
        Instead(
            "it needs a package index; what it brings is an exporter",
            f"{SERVED}::test_a_request_is_traced_from_http_to_its_rounds",
        ),
    ),
    "export": (Ran(f"{SERVED}::served"),),
    "curl": (Ran(f"{SERVED}::test_the_curl_commands_answer"),),
    "serve run": (
        Instead(
            "it would need a second Ray cluster on this machine, of which there is one for all tests",
            "tests/k8s/test_serve_files.py::test_the_import_path_is_a_builder_of_this_configuration",
        ),
    ),
    "serve deploy": (
        Instead(
            "it needs Ray's dashboard; the call behind it is made with the file of the demo",
            "tests/serve/test_serve_deploy.py::test_the_demo_of_the_manifests_answers",
        ),
    ),
    "serve status": (Instead("Ray's own", "tests/serve/test_serve_deploy.py::test_the_demo_of_the_manifests_answers"),),
    "ray status": (Instead("Ray's own", "tests/serve/test_serve_deploy.py::test_the_demo_of_the_manifests_answers"),),
    "ray get-auth-token": (Ran(f"{SERVED}::test_a_token_is_made_as_the_guide_says", "--generate"),),
    "ray start": (
        Instead(
            "Ray's own, as many ports as it has are taken by the cluster of the tests",
            "tests/serve/test_serve_deploy.py::test_the_demo_of_the_manifests_answers",
            "--head",
        ),
    ),
    "docker build": (
        Instead("there is no Docker here", "tests/k8s/test_image.py::test_hadolint_finds_nothing"),
        Instead("there is no Docker here", "tests/k8s/test_readme.py::test_build_arguments_of_the_guide_exist", "--build-arg"),
    ),
    "promtool test": (Ran("tests/k8s/test_monitoring.py::test_alerts_fire_when_they_should"),),
    "k8s/secrets/new-key.sh": (Ran("tests/k8s/test_scripts.py::test_a_new_key_is_let_in_and_not_kept"),),
    "kubectl apply": (
        Instead(f"{NO_CLUSTER}; what it would send is rendered and held against schemas", RENDERED),
        Instead(NO_CLUSTER, "tests/k8s/test_scripts.py::test_secrets_have_the_names_that_pods_mount"),
    ),
    "kubectl create": (
        Instead(NO_CLUSTER, "tests/k8s/test_readme.py::test_objects_that_commands_name_exist", "--from-literal"),
    ),
    "kubectl delete": (Instead(NO_CLUSTER, "tests/k8s/test_readme.py::test_objects_that_commands_name_exist"),),
    "kubectl get": (Instead(NO_CLUSTER, "tests/k8s/test_readme.py::test_objects_that_commands_name_exist"),),
    "kubectl port-forward": (Instead(NO_CLUSTER, "tests/k8s/test_readme.py::test_objects_that_commands_name_exist"),),
    "kubectl wait": (
        Instead(NO_CLUSTER, "tests/k8s/test_readme.py::test_objects_that_commands_name_exist", "--for --timeout"),
    ),
}


def in_text() -> Iterator[Command]:
    """Commands of others between backticks in running text."""
    for where in (str(path.relative_to(ROOT)) for path in GUIDES):
        prose = re.sub(r"^ *```.*?^ *```$", "", TEXTS[where], flags=re.MULTILINE | re.DOTALL)
        for found in re.findall(
            r"`((?:make|python|pip|serve|ray|kubectl|docker|promtool|curl|\.venv/bin/\S+) \w?[^`]*)`", prose
        ):
            words = tuple(shlex.split(found))
            if words != ("python", "-m"):
                yield Command(where, (words[0].removeprefix(".venv/bin/"), *words[1:]))


DOCUMENTED = sorted({*ALL, *mentions(), *in_text()}, key=str)


def name_of(command: Command) -> str:
    """Under which a command stands in the table."""
    first, *rest = command.words
    if first == "outrider":
        return " ".join(command.words[: 3 if rest[0] == "bench" and len(rest) > 1 else 2])
    if first == "kubectl":
        verbs = [word for flag, word in pairwise(["", *rest]) if flag != "-n" and word != "-n"]
        return f"kubectl {verbs[0]}"
    if first == "pip":
        return " ".join(command.words)
    if first == "python":
        return " ".join(command.words[: 3 if rest[0] == "-m" else 2])
    return first if first in ("curl", "export") or "/" in first else f"{first} {rest[0]}"


def options_of(command: Command) -> set[str]:
    return {word.partition("=")[0] for word in command.words if word.startswith("--")}


@pytest.mark.parametrize("command", DOCUMENTED, ids=str)
def test_somebody_runs_it(command: Command) -> None:
    """Bug guarded: a command or an option that is documented, and that nobody has tried since."""
    if command.words == ("outrider", "bench"):
        return
    assert name_of(command) in COMMANDS, "name the test that runs this command, or why none can and what is checked instead"
    given = {option for entry in COMMANDS[name_of(command)] for option in entry.options.split()}
    assert options_of(command) <= given, "name the test that runs the command with this option"


def test_no_entry_is_about_nothing() -> None:
    """Bug guarded: a table of commands that the documents do not have any more."""
    assert set(COMMANDS) - {name_of(command) for command in DOCUMENTED} == set()
    shown: dict[str, set[str]] = {}
    for command in DOCUMENTED:
        shown.setdefault(name_of(command), set()).update(options_of(command))
    for name, entries in COMMANDS.items():
        given = {option for entry in entries for option in entry.options.split()}
        assert given <= shown[name] | {"--api-key-env", "--json"}, name


@cache
def definitions(path: str) -> dict[str, str]:
    """Source of every function of a file, and under "" the file's."""
    source = (ROOT / path).read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorated = {f.name: min([f.lineno, *(d.lineno for d in f.decorator_list)]) for f in functions}
    lines = source.splitlines()
    return {"": source, **{f.name: "\n".join(lines[decorated[f.name] - 1 : f.end_lineno]) for f in functions}}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_test_is_there_and_gives_the_options(name: str) -> None:
    """Bug guarded: an entry that names a test which was renamed, or which calls something else."""
    for entry in COMMANDS[name]:
        path, _, test = entry.test.partition("::")
        assert test in definitions(path), entry.test
        if isinstance(entry, Ran) and name.startswith(("outrider ", "ray ")):
            source = definitions(path)[""]
            assert re.search(rf'"{name.split()[-1]}"', source), f"{entry.test} does not say {name.split()[-1]}"
            assert [option for option in entry.options.split() if f'"{option}"' not in source] == []


def test_hooks_are_those_that_the_text_names() -> None:
    """Bug guarded: a hook of `pre-commit` that runs nothing of lint and types."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "ruff" in hooks
    assert "mypy" in hooks


def test_the_demo_is_what_is_run() -> None:
    """Bug guarded: `make demo` that does other things than the test that stands for it."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE).group(1)
    assert [line.strip() for line in recipe.splitlines()] == ["$(BIN)/outrider fetch smollm2", "$(BIN)/outrider demo"]


def test_commands_were_found() -> None:
    """Bug guarded: a pattern that finds nothing, so that every document passes."""
    assert len(DOCUMENTED) > len({*OURS}) > 30
    assert {name_of(command) for command in in_text()} >= {"make check", "ray status", "kubectl delete"}

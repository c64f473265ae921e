"""What the documents say against what is there: commands, configurations, links, metrics, alerts, routes."""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_page import schema
from routes import routes

from deployments.bench.load_plan import LoadOptions, LoadPlan
from deployments.cli import _parser, main, read_config
from deployments.monitoring.alerts import alerts
from deployments.simulate import read_plan
from engine import drafting, drivers, round
from engine.config import OutriderConfig, parse_config
from engine.fetch import ALIASES
from engine.propose.checks import REASONS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "k8s" / "README.md"])
GUIDES = [path for path in FILES if path.name not in ("log.md", "CHANGELOG.md")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
MADE_BY_THE_READER = "k8s/overlays/mine"
SECTIONS = OutriderConfig().model_dump()
KUBECTL_VERBS = {"apply", "create", "delete", "get", "port-forward", "wait"}
OTHERS = {"curl", "docker", "export", "pip", "ray", "serve"}
"""First words of commands that belong to others; what they name of ours is looked at."""


@dataclass(frozen=True)
class Command:
    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(file, text) of every fenced block of a language, also within lists."""
    for name, text in TEXTS.items():
        for indent, body in re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            yield name, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def commands() -> Iterator[Command]:
    """Every line of a shell block, without comments; `.venv/bin/` is where `make` puts what is otherwise on the PATH."""
    for where, body in blocks("sh"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield Command(where, (words[0].removeprefix(".venv/bin/"), *words[1:]))


def mentions() -> Iterator[Command]:
    """Every `outrider ...` between backticks in running text: a name or a part of a command."""
    for where in (str(path.relative_to(ROOT)) for path in GUIDES):
        prose = re.sub(r"^ *```.*?^ *```$", "", TEXTS[where], flags=re.MULTILINE | re.DOTALL)
        for found in re.findall(r"`(outrider [a-z][^`]*)`", prose):
            yield Command(where, tuple(found.split()))


ALL = list(commands())
OURS = [command for command in ALL if command.words[0] == "outrider"]


def sub_parser(words: tuple[str, ...]) -> tuple[argparse.ArgumentParser, tuple[str, ...]]:
    """The parser of the (sub)command that the words name, and the words after it."""
    parser = _parser()
    rest = words[1:]
    while rest and parser._subparsers is not None:
        (choices,) = [action.choices for action in parser._subparsers._group_actions if action.choices is not None]
        assert rest[0] in choices, f"no such command: {rest[0]}"
        parser, rest = dict(choices)[rest[0]], rest[1:]
    return parser, rest


def test_commands_were_found() -> None:
    """Bug guarded: a pattern that finds no command, so that every test of them passes."""
    assert len(OURS) > 30
    assert {command.words[0] for command in ALL} >= {"outrider", "make", "kubectl", "pip", "serve"}
    assert len(list(mentions())) > 20


@pytest.mark.parametrize("command", OURS, ids=str)
def test_commands_of_outrider_are_accepted(command: Command) -> None:
    """Bug guarded: an option, a setting, a profile or a model of a document that the command refuses."""
    parsed = _parser().parse_args(command.words[1:])
    if hasattr(parsed, "settings"):
        read_config(None, parsed.settings)
    if parsed.command == "simulate":
        read_plan(parsed)
    elif parsed.command == "fetch":
        assert parsed.alias in ALIASES
    elif getattr(parsed, "benchmark", None) == "load":
        LoadPlan.of(LoadOptions(**{option.name: getattr(parsed, option.name) for option in fields(LoadOptions)}))


@pytest.mark.parametrize("command", mentions(), ids=str)
def test_parts_of_commands_in_the_text_exist(command: Command) -> None:
    """Bug guarded: a command or an option that was renamed and goes on living in a sentence."""
    parser, rest = sub_parser(command.words)
    known = {option for action in parser._actions for option in action.option_strings}
    assert [word for word in rest if word.startswith("--") and word not in known] == []
    for setting in (after for word, after in pairwise(rest) if word == "--set" and "…" not in after):
        section, _, key = setting.partition("=")[0].partition(".")
        assert key in SECTIONS[section], setting


@pytest.mark.parametrize("command", [command for command in ALL if command not in OURS], ids=str)
def test_other_commands_name_what_is_there(command: Command) -> None:
    """Bug guarded: a target of make, a folder, a module, an extra or an import path that was renamed."""
    first, *rest = command.words
    if first == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split()
        assert [word for word in rest if "=" not in word and word not in targets] == []
    elif first == "kubectl":
        folders = [after for word, after in pairwise(rest) if word == "-k"]
        assert [
            name for name in folders if name != MADE_BY_THE_READER and not (ROOT / name / "kustomization.yaml").exists()
        ] == []
        assert KUBECTL_VERBS & set(rest)
    elif first == "python":
        assert importlib.util.find_spec(rest[1]) if rest[0] == "-m" else (ROOT / rest[0]).exists()
    elif first.startswith("k8s/"):
        assert (ROOT / first).stat().st_mode & 0o100
    else:
        assert first in OTHERS, "say in this test how such a command is checked"
    for extra in (word[2:-1] for word in rest if word.startswith(".[")):
        assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for module, attribute in re.findall(r"\b((?:deployments|engine)[\w.]*):(\w+)", " ".join(rest)):
        assert_importable(module, attribute)


def assert_importable(module: str, attribute: str) -> None:
    """Without the import, which may pull in Ray."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {attribute}\b", source, re.MULTILINE), f"{module}:{attribute}"


@pytest.mark.parametrize(("where", "body"), list(blocks("yaml")))
def test_configurations_are_accepted(where: str, body: str) -> None:
    """Bug guarded: a configuration of a document that is refused when it is tried."""
    tree: dict[str, Any] = yaml.safe_load(body)
    if "applications" in tree:
        for application in tree["applications"]:
            parse_config(application["args"])
            assert_importable(*application["import_path"].split(":"))
    elif tree.get("kind") != "Kustomization":  # tests/k8s renders that one
        parse_config(tree)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Bug guarded: a link to a file or a heading that was renamed."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, target


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_metrics_alerts_routes_and_keys_exist(path: Path) -> None:
    """Bug guarded: advice to look at a metric, an alert or a route, or to turn a setting, that there is not."""
    text = path.read_text(encoding="utf-8")
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in schema()} | set(schema())
    assert set(re.findall(r"\boutrider_[a-z_]+", text)) - {"outrider_"} <= exported
    named = set(re.findall(r"`(Outrider[A-Z]\w+)`|^### (Outrider[A-Z]\w+)", text, re.MULTILINE))
    assert {a or b for a, b in named} <= {alert.name for alert in alerts()} | {"OutriderConfig"}
    api = (ROOT / "deployments" / "api.py").read_text(encoding="utf-8")
    assert [route for route in re.findall(r"GET (/[\w/]+)", text) if f'@app.get("{route}")' not in api] == []
    for section, key in re.findall(rf"`({'|'.join(SECTIONS)})\.(\w+)(?![\w./(*])", text):
        assert key == "py" or key in SECTIONS[section], f"{section}.{key}"


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(path: Path) -> None:
    """Bug guarded: a file or folder of this project that was renamed and is still pointed to."""
    found = re.findall(r"`((?:engine|autoscale|deployments|tests|docs|k8s)/[\w./-]*)`", path.read_text(encoding="utf-8"))
    made = (MADE_BY_THE_READER, f"{MADE_BY_THE_READER}/kustomization.yaml")
    assert [name for name in found if not (ROOT / name).exists() and name not in made] == []


@pytest.mark.parametrize(("where", "body"), list(blocks("python")))
def test_python_of_the_documents_is_python(where: str, body: str) -> None:
    """Bug guarded: an example with a slip in it."""
    compile(body, where, "exec")


RUNBOOK = TEXTS["docs/runbook.md"]


def test_every_alert_has_an_entry_in_the_runbook() -> None:
    """Bug guarded: an alert that wakes somebody who then finds nothing to do about it."""
    entries = re.findall(r"^### (\w+)\n\n\*Symptom\.\* .*?\n\*Figure\.\* .*?\n\*Action\.\* ", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert entries == [alert.name for alert in alerts()]


def test_reasons_in_the_runbook_are_those_that_are_counted() -> None:
    """Bug guarded: a reason without advice, or advice for a reason that nobody counts."""
    table = RUNBOOK.partition("## Fallbacks by reason")[2].partition("\n## ")[0]
    told = {name for cells in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)}
    sources = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (drafting, drivers, round))
    counted = set(re.findall(r'fallbacks\["(\w+)"\]|NoDrafts\("(\w+)"\)|"(invalid_draft|no_answer)"', sources))
    assert told == REASONS | {"other"} | {name for names in counted for name in names if name}


def test_words_of_the_runbook_are_those_of_the_routes() -> None:
    """Bug guarded: a field of a route, a label or a reason that is called otherwise where one looks for it."""
    said = routes()
    known = (
        set(_keys(said.health)) | set(_keys(said.controller)) | set().union(*(family.labels for family in schema().values()))
    )
    table = RUNBOOK.partition("## Fallbacks by reason")[2]
    outside = set(re.findall(r"`([a-z]+_[a-z_]+)`", RUNBOOK.replace(table, ""))) - set(schema())
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in schema()}
    assert outside - exported - REASONS <= known


def _keys(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from _keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _keys(value)


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a help text with a `%` that ends in a traceback."""
    for words in {command.words[: 3 if command.words[1] == "bench" else 2] for command in OURS}:
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], "--help"])
        assert ended.value.code == 0
        assert "--help" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["deployments.cli", "--help"], "verify-lossless"),
        (["deployments.monitoring", "--rules"], "OutriderNoLaneReady"),
        (["deployments.reference", "--out", "/dev/stdout"], "# Configuration"),
    ],
)
def test_cheap_commands_run(words: list[str], told: str) -> None:
    """Bug guarded: a command that works from the tests only."""
    result = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert told in result.stdout


@pytest.mark.parametrize("words", [("outrider", "benchmark"), ("outrider", "bench", "motor")])
def test_the_check_finds_wrong_commands(words: tuple[str, ...]) -> None:
    """Bug guarded: a check that every command passes."""
    with pytest.raises(AssertionError, match="no such command"):
        sub_parser(words)

"""`outrider bench sources` on a random model: what is measured in turns, and the figures that are made of it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_byte_llama

from deployments.bench import engine, sources
from deployments.bench.arms import Arm, Run, Task
from deployments.bench.engine import with_source
from deployments.bench.prompts import PROMPTS
from deployments.bench.sources import Drafted, Turns, draft_times, figures, target_times
from deployments.bench.sources_report import BEGIN, SourcesOptions
from deployments.cli import EXIT_USAGE, main
from engine.config import parse_config
from engine.verify import ragged


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ragged, "STEP_BUDGET_S", 0.01)
    monkeypatch.setattr(engine, "LONGEST_PROMPT", 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokens are bytes."""
    return write_byte_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def run(folder: Path, *arguments: str) -> int:
    settings = [f"target.model={folder}", "target.dtype=float32", "target.kv_cache_tokens=65536", "draft.kv_cache_tokens=65536"]
    command = ["bench", "sources", "--quick", "--tokens", "8", *(part for own in settings for part in ("--set", own))]
    return main([*command, *arguments])


def test_every_source_on_every_kind_of_prompt(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a kind, temperature or source that is silently left out; a refused source that ends the run; figures that
    contradict each other; NaN in the JSON; a document that is not written."""
    document = tmp_path / "sources.md"
    code = run(folder, "--sources", "self-int8,self-fp8,ngram", "--json", "--markdown", str(document))
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert (code, told["is_interrupted"]) == (0, False)
    assert list(told["refused"]) == ([] if torch.cuda.is_available() else ["self-fp8"])
    measured = {(own["source"], own["temperature"], own["kind"]) for own in told["rows"]}
    expected = {(name, t, kind) for name in ("self-int8", "ngram") for t in (0, 1) for kind in (*PROMPTS, "all")}
    assert expected <= measured
    assert len(told["rows"]) == len(measured)
    for own in told["rows"]:
        assert 1 <= own["accepted_length"] <= 5
        assert own["accepted_length"] <= 1 + own["mean_depth"]
        assert own["speedup"][0] <= own["speedup"][1] <= own["speedup"][2]
    copies = [own for own in told["rows"] if own["source"] == "self-int8"]
    assert all(own["alpha"] > 0.5 and own["c"] > 0 for own in copies)
    assert all(own["num_prompts"] == (len(PROMPTS) if own["kind"] == "all" else 1) for own in copies)
    text = document.read_text(encoding="utf-8")
    assert text.startswith(BEGIN)
    assert text.count("| self-int8 |") == 2 * (len(PROMPTS) + 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sources", "trie"], "unknown source 'trie'"),
        (["--markdown", "nowhere/sources.md"], "does not exist"),
        (["--tokens", "600"], "needs a context of 632 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder: Path, arguments: list[str], told: str, capsys: Any) -> None:
    """Bug guarded: minutes of measuring before a mistake is told."""
    assert run(folder, *(arguments if "--sources" in arguments else ["--sources", "ngram", *arguments])) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    seen: list[Any] = []
    monkeypatch.setattr(sources, "run_bench_sources", lambda config, options, **rest: seen.append((config, options, rest)) or 0)
    given = [
        "--set",
        "draft.source=ngram",
        "--sources",
        "suffix",
        "--temperatures",
        "0.7",
        "--tokens",
        "9",
        "--quick",
        "--json",
    ]
    assert main(["bench", "sources", *given, "--markdown", "a.md"]) == 0
    ((config, options, rest),) = seen
    assert (config.draft.source, rest) == ("ngram", {"as_json": True})
    assert options == SourcesOptions(
        settings=["draft.source=ngram"], sources="suffix", temperatures="0.7", tokens=9, quick=True, markdown=Path("a.md")
    )
    assert main(["bench", "sources"]) == 0
    assert seen[1][1] == SourcesOptions(settings=[])


def test_another_source_is_not_measured_in_the_draft_models_dtype() -> None:
    """Bug guarded: the target without some layers, measured in int8 because the named model is."""
    named = parse_config({"draft": {"source": "model", "model": "small", "dtype": "int8"}})
    assert with_source(named, "layer-skip").draft.dtype == "auto"
    assert with_source(named, "model").draft.dtype == "int8"


# --- figures ----------------------------------------------------------------------------------------------------------------


def played(name: str, *runs: tuple[str, Run]) -> Arm:
    arm = Arm(name, 1, lambda task: pytest.fail("it is played already"))
    arm.runs = [(Task(kind, ((1,),), 12), one) for kind, one in runs]
    return arm


def drafted(seconds: float, accepted: int, rounds: int) -> Run:
    """12 tokens in rounds of 4 drafted tokens. A step of 5 tokens takes 1.5 steps of one token, a draft step half of one."""
    return Run(
        12,
        seconds,
        verify_s=((5, 0.03),) * 5,
        draft_step_s=(0.01,) * 5,
        drafted=4 * rounds,
        accepted=accepted,
        rounds=rounds,
        tested=Counter({0: rounds, 1: accepted}),
        kept=Counter({0: accepted}),
    )


def test_figures_are_those_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: kinds or arms mixed up; speed-ups upside down; a cost of drafts that is not in the expected speed-up."""
    monkeypatch.setattr(sources, "PROMPTS", {"code": (), "open": ()})
    plain = played(
        "plain", ("code", Run(12, 2.0, verify_s=((1, 0.02),) * 5)), ("open", Run(12, 3.0, verify_s=((1, 0.02),) * 5))
    )
    fixed = played("int8 K=4", ("code", drafted(1.0, 3, 4)), ("open", drafted(6.0, 1, 6)))
    by_load = played("int8 by load", ("code", Run(12, 0.5)), ("open", Run(12, 3.0)))
    rows = {own["kind"]: own for own in figures(Turns(1.0, plain, [Drafted("self-int8", fixed, by_load)]))}
    assert list(rows) == ["code", "open", "all"]
    code = rows["code"]
    assert (code["source"], code["temperature"], code["num_prompts"], code["num_tested"]) == ("self-int8", 1.0, 1, 7)
    assert code["alpha"] == pytest.approx(3 / 7)
    assert (code["accepted_length"], code["mean_depth"], code["c"]) == (3.0, 4.0, pytest.approx(0.5))
    assert code["expected_speedup"] == pytest.approx(3 * 1 / (1.5 + 4 * 0.5))
    assert (code["speedup"], code["speedup_by_load"]) == ((2.0, 2.0, 2.0), (4.0, 4.0, 4.0))
    assert rows["all"]["alpha"] == pytest.approx(4 / 14)
    assert rows["all"]["speedup"] == (pytest.approx(0.875), pytest.approx(1.25), pytest.approx(1.625))


def test_sources_that_took_no_time_are_free_and_rare_sizes_do_not_count() -> None:
    """Bug guarded: a lookup charged as much as the target; one hiccup that bends the curve of the target's steps."""
    found = played("ngram", ("code", Run(4, 1.0, verify_s=((1, 0.02),) * 5 + ((3, 9.0),), draft_step_s=(0.0, 0.0))))
    assert draft_times(found) is None
    assert draft_times(played("none")) is None
    assert target_times([found]) == ((1, 0.02),)


def test_interrupted_runs_report_whole_prompts_only() -> None:
    """Bug guarded: an arm that answered one prompt more than the others; a mean over some kinds that passes for one
    over all; an interrupt that loses ten minutes of measuring."""
    turns = Turns(0.0, played("plain"), [Drafted("ngram", played("ngram K=4"), played("ngram by load"))])
    answers = iter([*[Run(8, 1.0)] * 3, *[Run(8, 1.0)] * 4])  # the warm-up, one whole prompt, one answer

    def answer(task: Task) -> Run:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    for arm in turns.arms:
        arm.answer = answer
    tasks = [Task("code", ((1,),), 8), Task("open", ((2,),), 8)]
    later = Turns(1.0, played("plain"), [])
    assert sources._play([turns, later], tasks)
    assert [len(arm.runs) for arm in turns.arms] == [1, 1, 1]
    assert {own["kind"] for own in figures(turns)} == {"code"}
    assert list(figures(later)) == []

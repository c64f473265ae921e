"""`outrider simulate`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from deployments import simulate as command
from deployments.cli import EXIT_USAGE, main

FAST = ["--profile", "free?step_ms=20&c=0.1&alpha=0.8&knee=32", "--prompt-tokens", "64", "--output-tokens", "32"]


@pytest.fixture(autouse=True)
def _few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BATCHES", (1, 64))


def test_the_last_line_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bug guarded: tables on stdout, NaN in the JSON, a field that those who compare systems look for is missing, or an option
    with which everything is simulated and then nothing is told.
    """
    limits = ["--gpus", "3", "--max-ttft-ms", "1000", "--max-batch", "256", "--max-depth", "8"]
    plot = tmp_path / "plan.svg"
    command = ["simulate", *FAST, *limits, "--requests", "60", "--traffic", "poisson:rate=5", "--plot", str(plot), "--json"]
    assert main(command) == 0
    assert plot.read_bytes().startswith(b"<?xml")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert result["settle_s"] >= 0
    assert result["reversals_per_min"] >= 0
    assert result["speedup_by_batch"]["1"] > 2 > 1.1 > result["speedup_by_batch"]["64"]
    assert set(result["arms_by_batch"]) == {"K=1", "K=2", "K=4", "K=8", "sequential", "adaptive"}
    assert all(split["gpus"] <= 3 for split in result["splits"])
    assert result["arms"][0]["arm"] == "none"
    assert "no speculation" in printed.err


def test_it_finds_the_fewest_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bug guarded: the answer without --gpus names a cluster that misses the objectives; a trace that is not replayed."""
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "".join(f"{0.05 * n},64,32\n" for n in range(40)))
    assert main(["simulate", *FAST, "--traffic", f"file:{trace}", "--max-itl-ms", "15", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests"] == 40
    assert result["chosen"]["keeps_objectives"]
    assert result["chosen"]["drafts"] > 0  # a plain step takes 20 ms
    assert result["chosen"]["gpus"] == min(split["gpus"] for split in result["splits"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--profile", "70b-h10"], "did you mean 'emulated:70b-h100'"),
        (["--profile", "zzz"], "70b-h100, 70b-h200, 72b-h200, 8b-h100, free"),
        (["--profile", "8b-h100?alpha=2"], "--profile: alpha must be a number from 0 to 1"),
        (["--gpus", "3"], "needs 4 GPUs"),
        (["--gpus", "many"], "--gpus must be an integer from 1"),
        (["--requests", "0"], "--requests must be an integer from 1"),
        (["--seed", "-1"], "--seed must be an integer from 0"),
        (["--prompt-tokens", "nan"], "--prompt-tokens must be an integer"),
        (["--prompt-tokens", "900000"], "does not fit into the KV cache"),
        (["--output-tokens", "1"], "--output-tokens must be an integer from 2"),
        (["--spread", "-1"], "--spread must be a number from 0 to 5"),
        (["--max-ttft-ms", "0"], "--max-ttft-ms must be a number of milliseconds above 0"),
        (["--max-itl-ms", "x"], "--max-itl-ms must be"),
        (["--max-batch", "0"], "--max-batch must be an integer from 1"),
        (["--max-depth", "0"], "--max-depth must be an integer from 1"),
        (["--dwell-s", "-1"], "--dwell-s must be"),
        (["--traffic", "poison:rate=1"], "did you mean 'poisson'"),
        (["--plot", "curve.pdf"], "must end in .png or .svg"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a traceback, or minutes of simulation before the mistake is told."""
    monkeypatch.setattr(command, "run_simulate", lambda *_, **__: pytest.fail("it began to simulate"))
    assert main(["simulate", *arguments]) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_arguments_have_usable_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a default that the command itself refuses."""
    plans: list[command.Plan] = []

    def keep(plan: command.Plan, *, as_json: bool) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(command, "run_simulate", keep)
    assert main(["simulate"]) == 0
    assert isinstance(plans[0].cluster, command.Cluster)
    assert plans[0].gpus_per_target == 4
    assert plans[0].stride_s == 0.0

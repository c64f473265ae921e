"""Commands of the documents that compute in one process, whole, on a random model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_byte_llama

from deployments.bench import acceptance, engine, floor, sampling
from deployments.bench.prompts import PROMPTS
from deployments.cli import main
from engine.verify import ragged


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, two kinds of prompts: the models here are so small that all else would take the time."""
    monkeypatch.setattr(ragged, "STEP_BUDGET_S", 0.01)
    for benchmark in (acceptance, engine, sampling):
        monkeypatch.setattr(benchmark, "PROMPTS", dict(list(PROMPTS.items())[:2]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokens are bytes."""
    return write_byte_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


def bench(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that `outrider bench ... --quick --json` ends with."""
    settings = [f"target.model={folder}", "target.dtype=float32"]
    settings += [f"{section}.{key}" for section in ("target", "draft") for key in ("kv_cache_tokens=65536", "num_threads=1")]
    assert main(["bench", *arguments, "--quick", "--json", *(part for own in settings for part in ("--set", own))]) == 0
    told: dict[str, Any] = json.loads(
        capsys.readouterr().out.splitlines()[-1], parse_constant=lambda name: pytest.fail(f"{name} in the JSON")
    )
    return told


def test_bench_acceptance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: the parts work and the command does not: a rule without a row, an int8 copy that foresees nothing."""
    told = bench(folder, capsys, "acceptance")
    assert (told["draft"], told["depth"]) == ("self-int8", acceptance.DEPTH)
    assert {(row["rule"], row["temperature"]) for row in told["rows"]} == {
        ("greedy", 0.0),
        *((rule, temperature) for rule in ("coupled", "rejection", "block") for temperature in (0.7, 1.0)),
    }
    assert all(0 < row["accepted_share"] <= 1 for row in told["rows"])
    assert told["rows"][0]["accepted_share"] > 0.5  # greedy


def test_bench_sampling(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the parts work and the command does not: rows of the target that do not come, a setting without a row."""
    monkeypatch.setattr(sampling, "LARGE_VOCAB", 600)
    monkeypatch.setattr(sampling, "BATCHES", (1, 4))
    rows = bench(folder, capsys, "sampling")["rows"]
    assert {row["setting"] for row in rows} == set(sampling.SETTINGS)
    assert {(row["vocab_size"], row["num_requests"]) for row in rows} == {(258, 1), (258, 4), (600, 1), (600, 4)}


def test_bench_engine(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the parts work and the command does not: an arm that fails after the others were measured, other texts."""
    monkeypatch.setattr(engine, "LONGEST_PROMPT", 32)
    monkeypatch.setitem(floor.READ_BYTES, "cpu", 2**20)
    monkeypatch.setattr(floor, "SIZES", (1, 2))
    monkeypatch.setattr(engine, "QUICK", engine.Size(1, 8, 4, 4, 1, 1, 1, (2,), 0))
    told = bench(folder, capsys, "engine", "--no-http", "--batches", "none", "--set", "draft.source=ngram")
    assert told["greedy_texts_equal"]

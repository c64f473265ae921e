"""The emulated pair through the real stack: what `outrider bench rounds` measures with."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import App
from helpers import wait_until, write_emulation, write_random_draft

from deployments.bench import rounds
from deployments.bench.lane import BenchLane, Load, pin
from deployments.bench.rounds import MADE_UP_PROMPT, wait_for_draft
from deployments.cli import main

LOAD = Load(MADE_UP_PROMPT, 60, batch=4)
SEQUENTIAL = {"depth": 4, "fan_out": 0}
OVERLAPPED = {"depth": 4, "fan_out": 3}


class Bench:
    """The deployed pair, and the file that says what it emulates."""

    def __init__(self, app: App, file: Path):
        self.app = app
        self.file = file
        self.lane = wait_for_draft(BenchLane(app.config))

    def emulate(self, query: str) -> None:
        write_emulation(self.file, query)

    def hits_of(self, settings: dict[str, int]) -> int:
        """Prepared drafts that the load used."""
        self.lane.use(settings)
        before = self._counted_hits()
        self.lane.play(LOAD)
        return self._counted_hits() - before

    def _counted_hits(self) -> int:
        """As in a report that was made after this call; the lane's clock is this machine's."""
        called_s = time.monotonic()
        status = wait_until(self.lane.status, lambda s: s is not None and s.load.now_s > called_s, 60, "the lane reported")
        assert status is not None
        return sum(status.hits.values())


@pytest.fixture(scope="module")
def bench(emulated: tuple[App, Path]) -> Bench:
    return Bench(*emulated)


def test_texts_are_equal_whatever_the_rounds_are(bench: Bench) -> None:
    """Bug guarded: a prepared draft that the target takes for what was asked, or one of another request or position."""
    bench.emulate("alpha=.8")
    texts = {}
    for name, settings in {"plain": {"depth": 0}, "sequential": SEQUENTIAL, "overlapped": OVERLAPPED}.items():
        bench.lane.use(settings)
        texts[name], _ = bench.lane.play(LOAD)
    assert len(set(texts["plain"])) == 4
    assert texts["sequential"] == texts["plain"]
    assert texts["overlapped"] == texts["plain"]


def test_drafts_are_prepared_where_rounds_overlap_and_only_there(bench: Bench) -> None:
    """Bug guarded: settings that do not reach the rounds would let the benchmark compare an arm with itself."""
    bench.emulate("alpha=1")
    assert bench.hits_of(SEQUENTIAL) == 0
    assert bench.hits_of(OVERLAPPED) > 0


def test_the_emulation_follows_its_file(bench: Bench) -> None:
    """Bug guarded: a benchmark that changes the conditions and goes on measuring the old ones."""
    bench.lane.use(SEQUENTIAL)
    for alpha, all_kept in (("1", True), ("0", False)):
        bench.emulate(f"alpha={alpha}")
        usage = bench.app.complete([500, 501], max_tokens=30, ignore_eos=True)["usage"]["completion_tokens_details"]
        assert (usage["rejected_prediction_tokens"] == 0) is all_kept
        assert (usage["accepted_prediction_tokens"] == 0) is not all_kept


def test_the_application_says_that_it_is_emulated(bench: Bench) -> None:
    """Bug guarded: figures of devices that are not there, taken for measurements of some that are."""
    health = bench.app.client.get("/health").json()
    (target,) = health["targets"].values()
    assert target["path"] == "emulated"
    assert "nothing is computed" in target["path_reason"]
    (lane,) = bench.app.controller()["lane_details"]
    assert "emulated" in lane["target_device"]


def test_the_command_measures_and_reports(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: `outrider bench rounds` fails after it has measured for minutes, or leaves a part out.

    On the application that runs here already, in place of two on a cluster of the command's own.
    """
    bench.emulate("alpha=.8&c=.1")
    small = replace(rounds.QUICK, batches=(1,), num_tokens=300, large_tokens=60, real_tokens=8, num_hops=8)
    monkeypatch.setattr(rounds, "QUICK", small)
    monkeypatch.setattr(rounds, "LARGE_BATCH", 4)
    monkeypatch.setattr(rounds, "WARM_UP_TOKENS", 8)
    monkeypatch.setattr(rounds, "PROMPTS", {"code": rounds.PROMPTS["code"]})
    monkeypatch.setattr("deployments.bench.hit_rate.PROMPTS", rounds.PROMPTS)
    monkeypatch.setattr("deployments.launch.cluster", lambda config, address: contextlib.nullcontext())
    monkeypatch.setattr("deployments.launch.deploy", lambda config: None)
    model = write_random_draft(tmp_path, "smollm2")
    settings = [f"target.model={model}", "target.name=emulated", f"api.port={bench.app.config.api.port}"]
    command = ["bench", "rounds", "--quick", "--json", *(part for own in settings for part in ("--set", own))]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["texts_equal"]
    (cell,) = told["cells"]
    assert cell["batch"] == 1


def test_every_process_can_be_pinned_to_a_core() -> None:
    """Bug guarded: two models on one core, or on cores that were not given, while the report says that each has its own."""
    cores = os.sched_getaffinity(0)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert pin([child.pid])
            assert os.sched_getaffinity(child.pid) == {min(cores)}
            assert not pin([child.pid] * (len(cores) + 1))
        finally:
            child.kill()

"""A running application with one lane, as a benchmark sees it: changing settings, requests over HTTP, the lane's counters."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from deployments.launch import APP_NAME
from deployments.messages import LaneStatus
from engine.config import OutriderConfig
from engine.errors import OutriderError

LOOK_EVERY_S = 0.25
REQUEST_TIMEOUT_S = 600.0
HANDLE_TIMEOUT_S = 120.0
Text = tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Requests that run at the same time: choices of one prompt, with a seed each."""

    prompt: Text
    num_tokens: int
    batch: int = 1
    temperature: float = 1.0


@dataclass(frozen=True)
class _Seen:
    """A report of the lane, and what its router had computed by then."""

    status: LaneStatus
    router_cpu_s: float


@dataclass
class Window:
    """What the lane counted while all requests of a load ran."""

    seconds: float = 0.0
    router_cpu_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def add(self, before: _Seen, after: _Seen) -> None:
        """What lies between two reports."""
        self.seconds += after.status.load.now_s - before.status.load.now_s
        self.router_cpu_s += after.router_cpu_s - before.router_cpu_s
        for name in ("counters", "hits", "misses"):
            own, old, new = getattr(self, name), getattr(before.status, name), getattr(after.status, name)
            own.update({key: value - old.get(key, 0) for key, value in new.items()})

    @property
    def tokens_per_s(self) -> float:
        """Of the lane."""
        return float(self.counters["tokens"] / self.seconds)

    @property
    def hit_rate(self) -> float | None:
        """Prepared drafts over the requests and rounds that could have had one; late answers count as misses."""
        hits = self.hits.total()
        return hits / (hits + self.misses.total()) if hits else None

    @property
    def hidden_share(self) -> float | None:
        """Of the draft's time in rounds that asked for nothing, the part that no round waited for."""
        draft_s = self.counters["prepared_seconds"]
        return 1 - min(1.0, self.counters["prepared_exposed_seconds"] / draft_s) if draft_s else None

    @property
    def router_ms_per_round(self) -> float | None:
        """CPU time of all threads of the router's process."""
        rounds = self.counters["rounds"]
        return 1e3 * self.router_cpu_s / rounds if rounds else None


class BenchLane:
    """The application under measurement. Everything it does goes over the ways that its users and the controller use."""

    def __init__(self, config: OutriderConfig):
        from ray import serve

        self._model = config.served_model_name
        self._controller = serve.get_deployment_handle("Controller", APP_NAME)
        self._router = serve.get_deployment_handle("Router", APP_NAME)
        self._draft = serve.get_deployment_handle("Draft", APP_NAME)
        self._client = httpx.Client(base_url=f"http://{config.api.host}:{config.api.port}", timeout=REQUEST_TIMEOUT_S)
        self.pids: dict[str, int] = {
            **self._router.process_ids.remote().result(timeout_s=HANDLE_TIMEOUT_S),
            "draft": self._draft.process_id.remote().result(timeout_s=HANDLE_TIMEOUT_S),
        }

    def use(self, speculation: dict[str, Any], *, afresh: bool = False) -> None:
        """Play on with these settings; ``afresh`` measures the models again and forgets what was learned with them."""
        self._router.use_speculation.remote(speculation, afresh=afresh).result(timeout_s=HANDLE_TIMEOUT_S)

    def status(self) -> LaneStatus | None:
        """The lane's last report."""
        lanes: list[LaneStatus] = self._controller.lanes.remote().result(timeout_s=HANDLE_TIMEOUT_S)
        return lanes[0] if lanes else None

    def play(self, load: Load, seed: int = 0) -> tuple[list[str], Window]:
        """Run the load, one HTTP request, to its end. Returns the texts, and what was counted while all of its choices ran."""
        body = {
            "model": self._model,
            "prompt": list(load.prompt),
            "n": load.batch,
            "temperature": load.temperature,
            "seed": seed,
            "max_tokens": load.num_tokens,
            "ignore_eos": True,
        }
        with self._watched(load.batch) as window:
            response = self._client.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise OutriderError(f"a load of the benchmark was answered {response.status_code}: {response.text[:300]}")
        choices = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
        early = next((choice["finish_reason"] for choice in choices if choice["finish_reason"] != "length"), None)
        if early is not None:
            raise OutriderError(f"a text of the benchmark ended early: {early}")
        return [str(choice["text"]) for choice in choices], window

    @contextmanager
    def _watched(self, batch: int) -> Iterator[Window]:
        window, ended, seen = Window(), threading.Event(), list[_Seen]()
        watcher = threading.Thread(target=self._watch, args=(ended, seen), daemon=True)
        watcher.start()
        try:
            yield window
        finally:
            ended.set()
            watcher.join()
        for before, after in pairwise(seen):
            if before.status.load.num_running == after.status.load.num_running == batch:
                window.add(before, after)

    def _watch(self, ended: threading.Event, seen: list[_Seen]) -> None:
        while not ended.wait(LOOK_EVERY_S):
            status = self.status()
            if status is not None and (not seen or status.load.now_s > seen[-1].status.load.now_s):
                seen.append(_Seen(status, cpu_seconds(self.pids["router"])))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all threads (Linux)."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(pids: Sequence[int]) -> bool:
    """Give every process a core of its own, all threads that it has now; false where there are too few, or none can be had."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < len(pids):
        return False
    for pid, core in zip(pids, cores, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})
    return True

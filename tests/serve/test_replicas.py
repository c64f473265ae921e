"""Lanes and drafts come and go with the load, on logical GPUs, under requests that never stop. Devices are emulated."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from conftest import App
from helpers import wait_until

EMULATED = "emulated:free?step_ms=20&c=0.1&knee=8&alpha=0.9"
"""A lane is full with 16 requests, where its step takes twice as long; from 8 on drafts do not pay."""
FEW, MANY = 1, 40
SEEDS = tuple(range(4))
PROMPT = list(range(1000, 1016))
LENGTH = 40
DEADLINE_S = 60


class Traffic:
    """Requests that follow each other on as many threads as are wanted; every answer is kept."""

    def __init__(self, app: App):
        self._app = app
        self._wanted = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.answers: list[tuple[int, str]] = []
        """Seed and text, or what went wrong instead of a text."""

    def use(self, num_threads: int) -> None:
        """From now on so many; those too many end after the answer that they wait for."""
        self._wanted = num_threads
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for number in range(num_threads):
            name = f"requests {number}"
            if all(thread.name != name for thread in self._threads):
                thread = threading.Thread(target=self._run, args=(number,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def finish(self) -> None:
        """Wait for the last answers."""
        self._wanted = 0
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _run(self, number: int) -> None:
        turn = number
        with httpx.Client(base_url=self._app.url, timeout=120) as client:
            while number < self._wanted:
                seed = SEEDS[turn % len(SEEDS)]
                turn += 1
                answer = self._answer(client, seed)
                with self._lock:
                    self.answers.append((seed, answer))

    def _answer(self, client: httpx.Client, seed: int) -> str:
        try:
            response = client.post("/v1/completions", json=body(self._app, seed))
        except httpx.HTTPError as error:
            return f"lost: {error!r}"
        return str(response.json()["choices"][0]["text"]) if response.status_code == 200 else f"lost: {response.text}"


def body(app: App, seed: int, **more: Any) -> dict[str, Any]:
    return app.body(PROMPT, temperature=1, seed=seed, max_tokens=LENGTH, ignore_eos=True, **more)


def texts(app: App) -> dict[int, str]:
    """What every seed must give: the text without drafts, with nobody else there."""
    return {seed: app.text(PROMPT, temperature=1, seed=seed, max_tokens=LENGTH, ignore_eos=True, **PLAIN) for seed in SEEDS}


PLAIN: dict[str, Any] = {"speculation": {"max_depth": 0}}


@pytest.fixture
def traffic() -> Iterator[Callable[[App], Traffic]]:
    """Requests to an application, which end with the test."""
    started: list[Traffic] = []

    def start(app: App) -> Traffic:
        started.append(Traffic(app))
        return started[-1]

    yield start
    for one in started:
        one.finish()


def counts(state: dict[str, Any]) -> tuple[int, int]:
    """Lanes and drafts that are there, those that leave included."""
    return len(state["lane_details"]), len(state["draft_details"])


def drafts_are_used(app: App) -> bool:
    details = app.complete(PROMPT, temperature=1, seed=0, max_tokens=LENGTH, ignore_eos=True)["usage"]["completion_tokens_details"]
    return bool(details["accepted_prediction_tokens"] > 0)


def assert_nothing_lost(answers: list[tuple[int, str]], expected: dict[int, str]) -> None:
    wrong = [(seed, text) for seed, text in answers if text != expected[seed]]
    assert not wrong, f"{len(wrong)} of {len(answers)} answers, the first: {wrong[0]}"


def deploy(deploy_app: Callable[..., App], num_gpus: int, **sections: dict[str, Any]) -> App:
    model = {"model": EMULATED}
    return deploy_app(
        target={**model, "name": "emulated", "num_gpus": num_gpus, "num_cpus": 0.1},
        draft={"source": "model", **model},
        drafts={"min": 0, "max": 1, "num_gpus": num_gpus, "num_cpus": 0.1, **sections.pop("drafts")},
        controller={"report_interval_s": 0.1, **sections.pop("controller", {})},
        **sections,
    )


def test_the_drafts_gpu_becomes_a_lane_under_load_and_a_draft_again(
    deploy_app: Callable[..., App], traffic: Callable[[App], Traffic]
) -> None:
    """Bug guarded: a lane that waits for ever for the draft's GPU, requests that are lost with a lane that leaves, and a draft
    that does not come back because nobody asks Serve for it."""
    app = deploy(
        deploy_app,
        num_gpus=1,
        lanes={"min": 1, "max": 2, "scale_up_s": 1, "scale_down_s": 1},
        drafts={"idle_s": 1000},
        controller={"num_gpus": 2},
    )
    expected = texts(app)
    requests = traffic(app)
    requests.use(FEW)
    wait_until(app.controller, lambda state: counts(state) == (1, 1), DEADLINE_S, "one lane and one draft")
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "drafts are accepted")
    requests.use(MANY)
    wait_until(app.controller, lambda state: counts(state) == (2, 0), DEADLINE_S, "two lanes and no draft")
    wait_until(
        lambda: [lane["running"] for lane in app.controller()["lane_details"]],
        lambda running: len(running) == 2 and min(running) > 0,
        DEADLINE_S,
        "both lanes have requests",
    )
    requests.use(FEW)
    wait_until(app.controller, lambda state: counts(state) == (1, 1), DEADLINE_S, "one lane and one draft again")
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "drafts are accepted again")
    requests.finish()
    assert len(requests.answers) > MANY
    assert_nothing_lost(requests.answers, expected)


def test_drafts_go_to_zero_and_come_back(deploy_app: Callable[..., App], traffic: Callable[[App], Traffic]) -> None:
    """Bug guarded: a draft that nothing needs and that stays, one that an idle service wakes, and one that never returns."""
    app = deploy(deploy_app, num_gpus=0, lanes={"min": 1, "max": 1}, drafts={"idle_s": 3})
    wait_until(app.controller, lambda state: state["wanted_drafts"] == 0, DEADLINE_S, "the number of drafts is decided")
    state = app.controller()
    assert counts(state) == (1, 0)
    assert state["replicas"]["draft_cold_starts"] == 0, "an idle service started a draft"
    expected = texts(app)
    requests = traffic(app)
    requests.use(FEW)
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "a draft came for the requests")
    requests.use(MANY)
    wait_until(app.controller, lambda state: counts(state) == (1, 0), DEADLINE_S, "no draft where drafts do not pay")
    assert "does not pay" in app.controller()["replicas"]["decision"]["drafts_reason"]
    requests.use(FEW)
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "a draft came back")
    requests.finish()
    assert_nothing_lost(requests.answers, expected)
    wait_until(app.controller, lambda state: counts(state) == (1, 0), DEADLINE_S, "no draft for an idle service")
    metrics = app.client.get("/metrics").text.splitlines()
    assert "outrider_wanted_lanes 1.0" in metrics
    assert "outrider_wanted_drafts 0.0" in metrics

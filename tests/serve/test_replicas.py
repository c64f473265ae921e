"""Lanes and drafts come and go with the load, on logical GPUs, under requests that never stop. Devices are emulated."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import App
from helpers import wait_until

EMULATED = "emulated:free?step_ms=20&c=0.1&knee=8&alpha=0.9"
"""A lane is full with 16 requests, where its step takes twice as long; from 8 on drafts do not pay."""
FEW, SOME, MANY = 1, 11, 24
"""Requests at the same time: drafts pay; they do not, but one lane is enough; they fill more than one lane."""
SEEDS = tuple(range(4))
PROMPT = list(range(1000, 1016))
LENGTH = 40
LONG, NUM_LONG = 400, 4
PLAIN: dict[str, Any] = {"speculation": {"max_depth": 0}}
DEADLINE_S = 150


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


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App]) -> App:
    """Two GPUs, one for the lane that always runs, one for whichever helps more."""
    return deploy_app(
        target={"model": EMULATED, "name": "emulated", "num_gpus": 1, "num_cpus": 0.1},
        draft={"source": "model", "model": EMULATED},
        lanes={"min": 1, "max": 2, "scale_up_s": 1, "scale_down_s": 1},
        drafts={"min": 0, "max": 1, "num_gpus": 1, "num_cpus": 0.1, "idle_s": 2},
        controller={"num_gpus": 2, "report_interval_s": 0.1},
    )


@pytest.fixture(scope="module")
def expected(app: App) -> dict[int, str]:
    """What every seed must give: the text without drafts, with nobody else there."""
    return {
        seed: app.client.post("/v1/completions", json=body(app, seed, **PLAIN)).json()["choices"][0]["text"] for seed in SEEDS
    }


@pytest.fixture
def traffic(app: App, expected: dict[int, str]) -> Iterator[Traffic]:
    """Requests from few to as many as the test likes, until it ends; then no answer may be missing or another than expected."""
    requests = Traffic(app)
    requests.use(FEW)
    wait_for(app, lanes=1, drafts=1)
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "drafts are accepted")
    yield requests
    requests.finish()
    wrong = [(seed, text) for seed, text in requests.answers if text != expected[seed]]
    assert not wrong, f"{len(wrong)} of {len(requests.answers)} answers, the first: {wrong[0]}"
    assert len(requests.answers) > MANY


def wait_for(app: App, lanes: int, drafts: int) -> dict[str, Any]:
    """Until so many are there, those that leave included."""
    return wait_until(
        app.controller,
        lambda state: (len(state["lane_details"]), len(state["draft_details"])) == (lanes, drafts),
        DEADLINE_S,
        f"{lanes} lanes and {drafts} drafts",
    )


def drafts_are_used(app: App) -> bool:
    usage = app.client.post("/v1/completions", json=body(app, SEEDS[0])).json()["usage"]
    return bool(usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0)


def long_answer(app: App) -> str:
    """Outlasts the decision that a lane is one too many."""
    response = app.client.post("/v1/completions", json={**body(app, SEEDS[0], **PLAIN), "max_tokens": LONG})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == LONG
    return str(response.json()["choices"][0]["text"])


def test_drafts_go_where_they_do_not_pay_and_come_back(app: App, traffic: Traffic) -> None:
    """Bug guarded: a draft that stays although no lane wants it, and one that does not return: nobody asks Serve for it."""
    traffic.use(FEW)
    wait_for(app, lanes=1, drafts=1)
    traffic.use(SOME)
    cold_starts = wait_for(app, lanes=1, drafts=0)["replicas"]["draft_cold_starts"]
    wait_until(
        lambda: app.controller()["replicas"]["decision"]["drafts_reason"],
        lambda reason: "does not pay" in reason,
        DEADLINE_S,
        "the reason is told",
    )
    metrics = app.client.get("/metrics").text.splitlines()
    assert {"outrider_wanted_lanes 1.0", "outrider_wanted_drafts 0.0"} <= set(metrics)
    traffic.use(FEW)
    state = wait_for(app, lanes=1, drafts=1)
    assert state["replicas"]["draft_cold_starts"] > cold_starts
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "drafts are accepted again")


def test_the_drafts_gpu_becomes_a_lane_under_load_and_a_draft_again(app: App, traffic: Traffic) -> None:
    """Bug guarded: a lane that waits for ever for the draft's GPU, and requests that are lost with a lane that leaves."""
    traffic.use(MANY)
    wait_for(app, lanes=2, drafts=0)
    wait_until(
        lambda: [lane["running"] for lane in app.controller()["lane_details"]],
        lambda running: len(running) == 2 and min(running) > 0,
        DEADLINE_S,
        "both lanes have requests",
    )
    with ThreadPoolExecutor(NUM_LONG) as pool:
        answers = [pool.submit(long_answer, app) for _ in range(NUM_LONG)]
        traffic.use(FEW)
        wait_until(
            app.controller,
            lambda state: any(lane["leaving"] and lane["running"] > 0 for lane in state["lane_details"]),
            DEADLINE_S,
            "a lane leaves in the middle of answers",
        )
        assert {answer.result() for answer in answers} == {answers[0].result()}
    wait_for(app, lanes=1, drafts=1)
    wait_until(lambda: drafts_are_used(app), bool, DEADLINE_S, "drafts are accepted again")

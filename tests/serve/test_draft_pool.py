"""Two lanes and two drafts: everybody's drafts come from both, and the death of one is nobody's loss but speed.

Devices are emulated: deaths among real models are in test_faults.py.
"""

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import App, wait_for_draft
from helpers import wait_until

PROMPTS = tuple(f"{subject} is known for" for subject in ("Paris", "The sea", "A good book", "Winter", "Music", "Chess"))
PARAMS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "seed": 0}
"""The texts of emulated targets depend on the seed at every temperature."""
EMULATED = "emulated:free?step_ms=20&c=0.1&alpha=0.8"


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App]) -> App:
    app = deploy_app(
        lanes={"min": 2, "max": 2},
        drafts={"min": 2, "max": 2, "num_cpus": 0.1},
        target={"model": EMULATED, "name": "emulated", "num_cpus": 0.1},
        draft={"source": "model", "model": EMULATED},
        speculation={"depth": 3, "max_depth": 4},
    )
    wait_for_draft(app)
    wait_until(app.controller, lambda state: len(state["lane_details"]) == 2, 120, "two lanes")
    wait_until(app.controller, lambda state: len(state["drafts"]) == 2, 120, "two drafts")
    return app


class Streams:
    """Answers that are read as they come, by several threads."""

    def __init__(self, app: App):
        self._app = app
        self.num_chunks = 0
        self.num_running = len(PROMPTS)

    def text(self, prompt: str) -> str:
        """One answer, chunk by chunk."""
        body = self._app.body(prompt, stream=True, **PARAMS)
        text = ""
        with self._app.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    self.num_chunks += 1
        self.num_running -= 1
        return text


@pytest.fixture(scope="module")
def plain(app: App) -> dict[str, str]:
    """The texts without any draft."""

    def text(prompt: str) -> str:
        return app.text(prompt, **PARAMS, speculation={"max_depth": 0})

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return dict(zip(PROMPTS, pool.map(text, PROMPTS), strict=True))


def requests_by_draft(app: App) -> list[dict[str, int]]:
    """Of each lane."""
    return [lane["requests_per_draft"] for lane in app.controller()["lane_details"]]


def each_lane_uses_both(counts: list[dict[str, int]]) -> bool:
    return len(counts) == 2 and all(len(lane) == 2 and min(lane.values()) > 0 for lane in counts)


def accepted(app: App, prompt: str) -> int:
    """Draft tokens that were accepted in a short answer."""
    usage = app.complete(prompt, max_tokens=24, ignore_eos=True)["usage"]
    number: int = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    return number


def test_both_drafts_serve_both_lanes_and_one_may_die(app: App, plain: dict[str, str]) -> None:
    """Guards against lanes that know one draft only, drafts of one lane in another's text, streams that wait for a dead draft,
    and requests that decode without drafts from then on."""
    streams = Streams(app)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = [pool.submit(streams.text, prompt) for prompt in PROMPTS]
        wait_until(lambda: requests_by_draft(app), each_lane_uses_both, 60, "each lane uses both drafts")
        victim, survivor = app.controller()["draft_details"]
        running, before = streams.num_running, streams.num_chunks
        os.kill(victim["process_id"], signal.SIGKILL)
        assert running > 0, "all was over before the draft died"
        assert {prompt: text.result() for prompt, text in zip(PROMPTS, texts, strict=True)} == plain
    assert streams.num_chunks > before, "no stream went on after the draft had died"
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        wait_until(
            lambda: list(pool.map(lambda prompt: accepted(app, prompt), PROMPTS)),
            lambda counts: min(counts) > 0,
            60,
            "drafts are accepted again in every request",
        )
    wait_until(lambda: dead_is_replaced(app, victim["draft_id"], survivor["draft_id"]), bool, 120, "a new draft took its place")


def dead_is_replaced(app: App, dead: str, survivor: str) -> bool:
    """Whether every lane knows the survivor and a new replica, and not the dead one."""
    counts = requests_by_draft(app)
    return all(len(lane) == 2 and survivor in lane and dead not in lane for lane in counts)


def test_the_pool_shows_in_metrics_and_on_the_controllers_page(app: App) -> None:
    """Guards against counters that nobody can see."""
    state: dict[str, Any] = app.controller()
    assert all(draft["num_messages"] >= draft["num_runs"] for draft in state["draft_details"])
    assert sum(draft["num_runs"] for draft in state["draft_details"]) > 0
    for lane in state["lane_details"]:
        assert lane["hop_ms"] > 0
        assert lane["bytes_per_round"] > 0
    metrics = app.client.get("/metrics").text
    for name in ("outrider_requests_on_draft", "outrider_hop_seconds_total", "outrider_draft_runs_total"):
        assert any(line.startswith(f"{name}{{") for line in metrics.splitlines()), name

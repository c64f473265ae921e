"""Processes are killed under running streams. What the user sees must not change."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from conftest import App
from helpers import drafted, wait_until

PROMPT = "Once upon a time, in a small village by the sea, there lived"
LENGTH = 100


@pytest.fixture(scope="module")
def app(pair: App) -> App:
    return pair


@pytest.fixture(scope="module")
def plain(app: App) -> dict[str, str]:
    """The undisturbed texts, greedy and sampled."""
    return {kind: app.text(PROMPT, **{**params(kind), "speculation": {"max_depth": 0}}) for kind in ("greedy", "sampled")}


def params(kind: str) -> dict[str, Any]:
    sampled = {"temperature": 0.8, "seed": 7} if kind == "sampled" else {}
    return {"max_tokens": LENGTH, "ignore_eos": True, "speculation": {"max_depth": 3}, **sampled}


def stream_and_kill(app: App, kind: str, process_id: Callable[[], int]) -> str:
    """Stream an answer and kill a process after the fifth chunk; returns the whole text."""
    text, chunks = "", 0
    with app.client.stream("POST", "/v1/completions", json=app.body(PROMPT, stream=True, **params(kind))) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            chunks += 1
            if chunks == 5:
                os.kill(process_id(), signal.SIGKILL)
    assert chunks > 6, "the stream was over before the process died"
    return text


def draft_pid() -> int:
    from ray import serve

    pid: int = serve.get_deployment_handle("Draft", "outrider").process_id.remote().result(timeout_s=30)
    return pid


def router_pids() -> dict[str, int]:
    from ray import serve

    pids: dict[str, int] = serve.get_deployment_handle("Router", "outrider").process_ids.remote().result(timeout_s=30)
    return pids


def test_a_killed_draft_does_not_break_a_stream(app: App, plain: dict[str, str]) -> None:
    """Guards against a round that waits for a dead draft, and against drafts that do not come back."""
    pid = draft_pid()
    assert stream_and_kill(app, "greedy", lambda: pid) == plain["greedy"]
    wait_until(
        lambda: drafted(app.complete(PROMPT, max_tokens=24, ignore_eos=True)), lambda n: n > 0, 120, "drafts after the restart"
    )


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_killed_target_does_not_change_the_text(app: App, plain: dict[str, str], kind: str) -> None:
    """Guards against streams that end, repeat or skip when the target restarts with an empty cache."""
    pids = router_pids()
    assert stream_and_kill(app, kind, lambda: pids["target"]) == plain[kind]
    assert router_pids()["target"] != pids["target"]


def test_a_killed_router_does_not_change_the_text(app: App, plain: dict[str, str]) -> None:
    """Guards the Api's memory of what each stream has committed: another lane goes on from there."""
    pids = router_pids()
    assert stream_and_kill(app, "sampled", lambda: pids["router"]) == plain["sampled"]


def test_a_client_that_leaves_frees_its_place(app: App) -> None:
    """Guards against requests that go on for nobody: they hold KV blocks and slow the others down."""
    with app.client.stream(
        "POST", "/v1/completions", json=app.body(PROMPT, stream=True, max_tokens=4000, ignore_eos=True)
    ) as r:
        next(r.iter_lines())
    wait_until(lambda: app.controller()["lane_details"], lambda d: bool(d) and d[0]["running"] == 0, 20, "the place was freed")

"""Prediction heads in the served application: they live in the target's actor, and no draft replica is started."""

from collections.abc import Callable

import pytest
from conftest import App
from helpers import write_untrained_head

PROMPTS = ("The capital of France is", "one two three one two three one two")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App], tmp_path_factory: pytest.TempPathFactory) -> App:
    folder = write_untrained_head(tmp_path_factory.mktemp("head"), "smollm2")
    return deploy_app(draft={"source": "heads", "model": str(folder)}, speculation={"depth": 4, "max_depth": 4})


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_heads_draft_and_no_text_changes(app: App, params: dict[str, object]) -> None:
    """Bug guarded: a lane that waits for a draft pool which nobody started, and drafts that nobody verifies."""
    for prompt in PROMPTS:
        plain = app.complete(prompt, speculation={"max_depth": 0}, **params)
        drafted = app.complete(prompt, **params)
        assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
        details = drafted["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    state = app.controller()
    assert state["drafts"] == []
    assert [lane["draft_state"] for lane in state["lane_details"]] == ["ok"]

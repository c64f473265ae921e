"""Prediction heads in the served application: they live in the target's actor, and no draft replica is started."""

from collections.abc import Callable

import pytest
from conftest import App, Texts
from helpers import write_untrained_head


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App], tmp_path_factory: pytest.TempPathFactory) -> App:
    folder = write_untrained_head(tmp_path_factory.mktemp("head"), "smollm2")
    return deploy_app(draft={"source": "heads", "model": str(folder)}, speculation={"depth": 4, "max_depth": 4})


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "coupled"])
def test_heads_draft_and_no_text_changes(app: App, texts: Texts, is_sampled: bool) -> None:
    """Bug guarded: a lane that waits for a draft pool which nobody started, and drafts that nobody verifies."""
    params = texts.SAMPLED if is_sampled else {}
    for prompt in texts.PROMPTS[::2]:
        plain = app.text(prompt, speculation={"max_depth": 0}, **params)
        texts.check(prompt, plain, is_sampled=is_sampled, by="no draft")
        drafted = app.complete(prompt, **params)
        texts.check(prompt, drafted["choices"][0]["text"], is_sampled=is_sampled, by="heads")
        details = drafted["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    state = app.controller()
    assert state["drafts"] == []
    assert [lane["draft_state"] for lane in state["lane_details"]] == ["ok"]

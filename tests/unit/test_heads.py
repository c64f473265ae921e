"""Prediction heads as far as they need no model: configuration, and the way to them in the target's process."""

from typing import Any

import pytest

from deployments.remote import StreamTarget, TargetHeads
from deployments.wire import WireError
from engine.build import draft_is_a_model, drafts_beside_target
from engine.config import parse_config
from engine.drivers import DraftUnavailable
from engine.errors import ConfigError
from engine.types import ProposeReply, ProposeRequest

REQUEST = ProposeRequest(round_id=7, items=())


@pytest.mark.parametrize("model", [None, "owner/head"])
def test_heads_are_no_draft_model_of_their_own(model: str | None) -> None:
    """Bug guarded: a draft pool beside heads, or MTP layers (no model named) refused."""
    config = parse_config({"draft": {"source": "heads", "model": model}})
    assert drafts_beside_target(config)
    assert not draft_is_a_model(config)
    assert not drafts_beside_target(parse_config({"draft": {"source": "heads"}, "speculation": {"max_depth": 0}}))


@pytest.mark.parametrize("option", [{"dtype": "int8"}, {"device": "cpu"}, {"num_threads": 2}])
def test_what_heads_share_with_the_target_cannot_be_set(option: dict[str, Any]) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    with pytest.raises(ConfigError, match=rf"draft\.{next(iter(option))}"):
        parse_config({"draft": {"source": "heads", **option}})


class Client:
    def __init__(self, answer: ProposeReply | Exception):
        self.answer = answer
        self.calls: list[tuple[str, object, float]] = []

    async def call(self, kind: str, message: object, answer: type, timeout_s: float) -> ProposeReply:
        self.calls.append((kind, message, timeout_s))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_the_target_answers_for_its_heads_within_the_deadline() -> None:
    """Bug guarded: a round that waits for heads as long as for a verify."""
    target = StreamTarget(None, "secret")
    target._client = client = Client(ProposeReply(round_id=7, proposals=()))  # type: ignore[assignment]
    assert (await TargetHeads(target, 0.25).propose(REQUEST)).round_id == 7
    assert client.calls == [("propose", REQUEST, 0.25)]


@pytest.mark.parametrize("client", [None, Client(WireError("gone"))], ids=["not connected", "lost"])
async def test_heads_that_do_not_answer_cost_the_draft_only(client: Client | None) -> None:
    """Bug guarded: a stream that breaks while heads are asked ends the round, instead of its drafts."""
    target = StreamTarget(None, "secret")
    target._client = client  # type: ignore[assignment]
    heads = TargetHeads(target, 0.25)
    assert heads.available
    assert not heads.prepares
    with pytest.raises(DraftUnavailable):
        await heads.propose(REQUEST)

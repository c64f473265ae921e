"""Measuring through the rounds' own calls: what is sent, and that nothing is left behind."""

from msgspec.structs import replace

from engine.calibrate import DRAFT_ROWS, TARGET_TOKENS, measure_draft, measure_target
from engine.testing import ScriptedDraft, ScriptedTarget
from engine.types import ProposeReply, ProposeRequest, Verdict, VerifyReply, VerifyRequest


async def test_target_steps_have_the_sizes_they_are_reported_for() -> None:
    """Bug guarded: a step of n tokens that verifies n + 1, or one that prefills again, makes every depth look wrong."""
    target = ScriptedTarget(lambda ids: 1)

    async def verify(request: VerifyRequest) -> VerifyReply:
        reply = target.verify(request)
        assert not any(verdict.need_context or verdict.error for verdict in reply.verdicts)
        return reply

    times = await measure_target(verify)
    assert [size for size, _ in times] == list(TARGET_TOKENS)
    sent = {len(item.tokens) + len(item.draft) for request in target.requests for item in request.items if item.sample}
    assert sent == set(TARGET_TOKENS)
    assert not target.sequences, "a synthetic sequence keeps its KV blocks for ever"


async def test_a_target_without_room_is_measured_as_far_as_it_goes() -> None:
    """Bug guarded: a step that was refused, for a context or a KV cache that is too small, is measured as infinitely fast."""
    target = ScriptedTarget(lambda ids: 1)

    async def verify(request: VerifyRequest) -> VerifyReply:
        reply = target.verify(request)
        if any(len(item.draft) > 8 for item in request.items):
            return replace(reply, verdicts=tuple(Verdict(sequence_id=v.sequence_id, error="kv_full") for v in reply.verdicts))
        return reply

    assert [size for size, _ in await measure_target(verify)] == [1, 2, 4, 8]
    assert not target.sequences


async def test_draft_steps_have_the_rows_they_are_reported_for() -> None:
    """Bug guarded: a draft that answers need_context is measured as infinitely fast."""
    draft = ScriptedDraft(lambda ids: 1)

    async def propose(request: ProposeRequest) -> ProposeReply:
        reply = draft.propose(request)
        assert all(len(p.tokens) == i.depth for p, i in zip(reply.proposals, request.items, strict=True))
        return reply

    times = await measure_draft(propose)
    assert [rows for rows, _ in times] == list(DRAFT_ROWS)
    assert all(seconds > 0 for _, seconds in times)
    assert not draft.sequences


async def test_a_draft_without_room_is_measured_as_far_as_it_goes() -> None:
    """Bug guarded: a small KV cache refuses most rows at once, so that many rows look cheaper than few."""
    draft = ScriptedDraft(lambda ids: 1)

    async def propose(request: ProposeRequest) -> ProposeReply:
        reply = draft.propose(request)
        kept = (replace(p, tokens=p.tokens if n < 5 else ()) for n, p in enumerate(reply.proposals))
        return replace(reply, proposals=tuple(kept))

    assert [rows for rows, _ in await measure_draft(propose)] == [1, 2, 4]
    assert not draft.sequences

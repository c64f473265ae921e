"""Emulated devices: the script and how it is foreseen, the time that steps take, the names that choose them."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from engine.build import build_draft_model, build_target, preflight
from engine.config import OutriderConfig, parse_config
from engine.drivers import SyncDriver
from engine.errors import ConfigError
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import FakeClock, PacedDraft, PacedTarget, follow_emulation, is_emulated, paced_info, parse_emulation
from engine.testing.paced import Script
from engine.testing.profiles import PAIRS, Flat
from engine.types import (
    GenerateRequest,
    ModelInfo,
    Prepared,
    PrepareItem,
    PrepareRequest,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    VerifyItem,
    VerifyRequest,
)

VOCAB = 1000
NUM_POSITIONS = 20_000
SIGMAS = 4.9
"""Odds of a false alarm: one in a million per two-sided comparison."""
PROMPT = tuple(range(200, 210))


class FakeTime:
    """A clock and the waiting that moves it; nothing really waits."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def wait_until(self, deadline_s: float) -> None:
        self.clock.advance(max(0.0, deadline_s - self.clock()))


def make_info(name: str) -> ModelInfo:
    emulation = parse_emulation(name, "target.model")
    return paced_info(name, emulation.target, vocab_size=VOCAB, eos_token_ids=(0,), fingerprint="none", max_context=4096)


def make_pair(name: str = "emulated:free") -> tuple[PacedTarget, PacedDraft, FakeClock]:
    follow, time = follow_emulation(name, "target.model"), FakeTime()
    target = PacedTarget(follow, make_info(name), time.clock, time.wait_until)
    return target, PacedDraft(follow, make_info(name), time.clock, time.wait_until), time.clock


def context(seed: int = 7, **params: object) -> SequenceContext:
    return SequenceContext(params=SamplingParams(seed=seed, **params), prompt_length=len(PROMPT))  # type: ignore[arg-type]


def make_script(query: str = "") -> Script:
    return Script(parse_emulation(f"emulated:free?{query}" if query else "emulated:free", "x"), VOCAB)


def assert_share(hits: int, tries: int, expected: float) -> None:
    error = SIGMAS * math.sqrt(expected * (1 - expected) / tries)
    assert abs(hits / tries - expected) <= error, f"{hits} of {tries}, expected a share of {expected:g} ± {error:g}"


# --- the script -------------------------------------------------------------------------------------------------------------


def test_a_token_depends_on_both_seeds_and_on_the_position_only() -> None:
    """Bug guarded: two requests, or two positions, that share their text would hide tokens that were mixed up."""
    same, other = make_script(), make_script("seed=1")
    tokens = [same.token(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(200)]
    assert tokens == [make_script("alpha=.1").token(s, p) for s in (0, 1, 2**64 - 1) for p in range(200)]
    assert [same.token(0, p) for p in range(200)] != [other.token(0, p) for p in range(200)]
    assert len(set(tokens)) > 400
    assert VOCAB // 8 <= min(tokens) <= max(tokens) < VOCAB


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.8, 1.0])
def test_the_draft_is_right_with_probability_alpha(alpha: float) -> None:
    """Bug guarded: a wrong acceptance rate makes every bound that the benchmark compares with another one."""
    script = make_script(f"alpha={alpha}")
    right = [script.drafted(p % 5, p) == script.token(p % 5, p) for p in range(NUM_POSITIONS)]
    assert_share(sum(right), NUM_POSITIONS, alpha)
    # Neighbours are independent.
    assert_share(sum(a and b for a, b in zip(right[::2], right[1::2], strict=True)), NUM_POSITIONS // 2, alpha**2)


@pytest.mark.parametrize(
    ("query", "count", "expected"),
    [
        ("recovery=.7&bonus=.9", 3, 0.7),
        ("recovery=.7&bonus=.9", 2, 0.5),
        ("recovery=.7", 1, 1 - 0.3 ** (1 / 3)),
        ("recovery=.7", 6, 1 - 0.3**2),
        ("recovery=0", 8, 0.0),
    ],
)
def test_a_wrong_draft_has_the_recovery_token_among_its_next_guesses(query: str, count: int, expected: float) -> None:
    """Bug guarded: recovery counted over all positions instead of those where the draft is wrong, or off by one guess."""
    script = make_script(query)
    wrong = [p for p in range(NUM_POSITIONS) if script.rank(3, p) > 1]
    found = sum(script.token(3, p) in script.guesses(3, p, count + 1)[1:] for p in wrong)
    assert_share(found, len(wrong), expected)


@pytest.mark.parametrize(("query", "expected"), [("alpha=.8&bonus=.9", 0.9), ("alpha=.6&bonus=.6", 0.6), ("alpha=1", 1.0)])
def test_the_bonus_token_is_among_the_first_three_guesses(query: str, expected: float) -> None:
    """Bug guarded: a bonus guess that leaves the draft's own token out, which is the likeliest one."""
    script = make_script(query)
    found = sum(script.token(3, p) in script.guesses(3, p, 3) for p in range(NUM_POSITIONS))
    assert_share(found, NUM_POSITIONS, expected)


def test_guesses_differ_begin_with_the_draft_and_do_not_depend_on_their_number() -> None:
    """Bug guarded: a guess named twice wastes a fork, and a fan-out that changes the guesses changes the hit rate it buys."""
    script = make_script()
    for position in range(500):
        longest = script.guesses(1, position, 10)
        assert len(set(longest)) == 10
        assert longest[0] == script.drafted(1, position)
        assert [script.guesses(1, position, n) for n in range(10)] == [longest[:n] for n in range(10)]


# --- target and draft -------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What a lane did in one process."""

    texts: dict[str, tuple[int, ...]]
    hits: Counter[str]
    misses: Counter[str]


def play(name: str, policy: FixedDepth, num_requests: int = 3, length: int = 60) -> Played:
    target, draft, clock = make_pair(name)
    scheduler = Scheduler(target.info, policy, max_batch=8, prefill_tokens=64, max_waiting=8)
    driver = SyncDriver(target, draft, scheduler, clock=clock)
    for seed in range(num_requests):
        params = SamplingParams(seed=seed, max_tokens=length)
        driver.add(GenerateRequest(request_id=str(seed), prompt_ids=PROMPT, params=params))
    played = Played({}, Counter(), Counter())
    while scheduler.running or scheduler.waiting:
        result = driver.step()
        played.hits.update(result.report.hits)
        played.misses.update(result.report.misses)
        for delta in result.deltas:
            assert delta.error is None
            played.texts[delta.request_id] = played.texts.get(delta.request_id, ()) + delta.token_ids
    return played


def test_the_text_is_the_script_at_any_depth_and_fan_out() -> None:
    """Bug guarded: a draft token that is kept although it is not the target's, or positions that are counted from elsewhere."""
    script = make_script()
    expected = {str(seed): tuple(script.token(seed, 10 + p) for p in range(60)) for seed in range(3)}
    for policy in (FixedDepth(0), FixedDepth(1), FixedDepth(5), FixedDepth(5, fan_out=3), FixedDepth(2, fan_out=1, asks=False)):
        for alpha in (0.0, 0.8, 1.0):
            assert play(f"emulated:free?alpha={alpha}", policy).texts == expected


def test_whole_rounds_hit_as_often_as_chosen() -> None:
    """Bug guarded: prepared drafts that a round cannot find, or finds in rounds whose outcome was another one."""
    played = play("emulated:free?alpha=.8&recovery=.7&bonus=.9", FixedDepth(3, fan_out=3), num_requests=8, length=1000)
    for kind, expected in (("recovery", 0.7), ("bonus", 0.9)):
        assert_share(played.hits[kind], played.hits[kind] + played.misses[kind], expected)
    assert played.hits.total() > 1000


def test_a_target_that_holds_less_asks_for_the_context() -> None:
    """Bug guarded: an emulation that knows sequences it was never told hides errors of the real stack's bookkeeping."""
    target, draft, clock = make_pair()
    (verdict,) = target.verify(VerifyRequest(round_id=1, items=(item("s", 10, (1,)),))).verdicts
    assert verdict.need_context
    assert clock() == 0
    (proposal,) = draft.propose(ProposeRequest(round_id=1, items=(asked("s", 10, (1,), 3),))).proposals
    assert (proposal.reason, proposal.tokens) == ("need_context", ())
    (prepared,) = draft.prepare(PrepareRequest(round_id=1, items=(to_prepare("s", 10, (1,), (), 3, (2,)),))).prepared
    assert (prepared.reason, prepared.outcomes) == ("need_context", ())
    target.verify(VerifyRequest(round_id=2, items=(item("s", 0, PROMPT, context()),)))
    (verdict,) = target.verify(VerifyRequest(round_id=3, items=(item("s", 10, (1,)),))).verdicts
    assert not verdict.need_context
    target.verify(VerifyRequest(round_id=4, items=(), release=("s",)))
    (verdict,) = target.verify(VerifyRequest(round_id=5, items=(item("s", 10, (1,)),))).verdicts
    assert verdict.need_context


def test_logprobs_come_with_the_script_but_not_with_a_prompt() -> None:
    """Bug guarded: an option that is accepted and ignored."""
    target, _, _ = make_pair()
    (verdict,) = target.verify(VerifyRequest(round_id=1, items=(item("s", 0, PROMPT, context(logprobs=1)),))).verdicts
    assert verdict.logprobs is not None
    assert [(score.token_id, score.logprob) for score in verdict.logprobs] == [(verdict.tokens[0], 0.0)]
    scored = msgspec.structs.replace(item("t", 0, PROMPT, context()), scored=PROMPT[1:])
    (verdict,) = target.verify(VerifyRequest(round_id=2, items=(scored,))).verdicts
    assert verdict.error is not None


def test_what_is_prepared_is_what_would_be_proposed_after_that_outcome() -> None:
    """Bug guarded: a prepared draft shifted by one position is never accepted, and only the hit counter would look fine."""
    _, draft, _ = make_pair()
    draft.propose(ProposeRequest(round_id=1, items=(asked("s", 0, PROMPT, 0, context()),)))
    (proposal,) = draft.propose(ProposeRequest(round_id=2, items=(asked("s", 9, PROMPT[9:], 3),))).proposals
    (prepared,) = draft.prepare(
        PrepareRequest(round_id=3, items=(to_prepare("s", 9, PROMPT[9:], proposal.tokens, 4, (1, 2, 0, 3)),))
    ).prepared
    assert Counter(outcome.accepted for outcome in prepared.outcomes) == {0: 1, 1: 2, 3: 3}
    assert len({(outcome.accepted, outcome.token) for outcome in prepared.outcomes}) == 6
    for outcome in prepared.outcomes:
        assert outcome.token not in proposal.tokens[outcome.accepted : outcome.accepted + 1]
        committed = (*PROMPT, *proposal.tokens[: outcome.accepted], outcome.token)
        (after,) = draft.propose(ProposeRequest(round_id=4, items=(asked("s", 0, committed, 4, context()),))).proposals
        assert after.tokens == outcome.tokens


def test_outcomes_are_hit_as_often_as_chosen() -> None:
    """Bug guarded: rounds over prepared drafts whose hit rates are not those that the benchmark compares with its bound."""
    name = "emulated:free?alpha=.8&recovery=.7&bonus=.9"
    target, draft, _ = make_pair(name)
    hits, tries = Counter[str](), Counter[str]()
    for sequence in range(400):
        ids = [*PROMPT]
        known = context(seed=sequence)
        drafted = draft_after(draft, ids, known)
        for _ in range(10):
            prepared = prepare_after(draft, ids, drafted, known)
            (verdict,) = target.verify(VerifyRequest(round_id=1, items=(item("s", 0, tuple(ids), known, drafted),))).verdicts
            kind = "bonus" if verdict.accepted == len(drafted) else "recovery"
            tries[kind] += 1
            hit = [o for o in prepared.outcomes if (o.accepted, o.token) == (verdict.accepted, verdict.tokens[-1])]
            hits[kind] += len(hit)
            ids += verdict.tokens
            drafted = draft_after(draft, ids, known)
            assert not hit or hit[0].tokens == drafted
    assert_share(hits["recovery"], tries["recovery"], 0.7)
    assert_share(hits["bonus"], tries["bonus"], 0.9)
    assert_share(tries["bonus"], tries.total(), 0.8**3)


# --- time -------------------------------------------------------------------------------------------------------------------


def test_a_verify_takes_the_time_of_its_tokens() -> None:
    """Bug guarded: a step that waits per sequence instead of once, or does not tell how long it took."""
    target, _, clock = make_pair("emulated:free?step_ms=30&knee=16")
    reply = target.verify(VerifyRequest(round_id=1, items=tuple(item(str(i), 0, (1, 2), context()) for i in range(4))))
    assert clock() == pytest.approx(0.030)
    assert reply.step_time_s == pytest.approx(0.030)
    target.verify(VerifyRequest(round_id=2, items=tuple(item(str(i), 2, (1,), None, (5,) * 7) for i in range(4))))
    assert clock() == pytest.approx(0.030 + 0.060)


def test_a_draft_takes_a_forward_per_position_and_the_hops() -> None:
    """Bug guarded: hops counted as the draft's own time make its cost model, and so the depth, wrong."""
    _, draft, clock = make_pair("emulated:free?step_ms=30&c=.1&hop_ms=2")
    reply = draft.propose(
        ProposeRequest(round_id=1, items=(asked("a", 0, PROMPT, 3, context()), asked("b", 0, PROMPT, 5, context())))
    )
    assert clock() == pytest.approx(5 * 0.003 + 0.004)
    assert reply.step_time_s == pytest.approx(5 * 0.003)
    assert reply.num_steps == 5


def test_forks_cost_the_rows_that_they_are() -> None:
    """Bug guarded: fan-out that costs nothing would always pay."""
    _, draft, clock = make_pair("emulated:free?step_ms=30&c=.1&knee=10")
    draft.propose(ProposeRequest(round_id=1, items=(asked("a", 0, PROMPT, 0, context()),)))
    before_s = clock()
    reply = draft.prepare(PrepareRequest(round_id=2, items=(to_prepare("a", 9, PROMPT[9:], (5, 6), 4, (10, 5, 5)),)))
    assert clock() - before_s == pytest.approx(0.003 + 4 * 0.003 * 2)
    assert reply.num_steps == 5
    before_s = clock()
    reply = draft.prepare(PrepareRequest(round_id=3, items=(to_prepare("a", 9, PROMPT[9:], (5, 6), 4, ()),)))
    assert clock() - before_s == pytest.approx(0.003)


def test_requests_of_several_lanes_share_their_forwards() -> None:
    """Bug guarded: a merged call that takes the time of its parts one after the other makes merging look useless."""
    _, draft, clock = make_pair("emulated:free?step_ms=30&c=.1&hop_ms=1")
    asks = ProposeRequest(round_id=1, items=(asked("a", 0, PROMPT, 5, context()),))
    prepares = PrepareRequest(round_id=9, items=(to_prepare("b", 0, PROMPT, (), 3, (2,), context()),))
    (proposed,), (prepared,) = draft.run([asks], [prepares])
    assert clock() == pytest.approx(5 * 0.003 + 0.002)
    assert (proposed.round_id, proposed.num_steps, proposed.step_time_s) == (1, 5, pytest.approx(0.015))
    assert (prepared.round_id, prepared.num_steps, prepared.step_time_s) == (9, 5, pytest.approx(0.015))
    assert len(proposed.proposals[0].tokens) == 5
    assert [len(outcome.tokens) for outcome in prepared.prepared[0].outcomes] == [3, 3]


def test_rooflines_are_flat_until_the_arithmetic_is_the_limit() -> None:
    """Bug guarded: FLOPs and bytes mixed up, or GPUs that are not added: the knees must be those of algorithms.md section 5."""
    for name, knee in (("70b-h100", 226), ("70b-h200", 158), ("8b-h100", 226)):
        target, _ = PAIRS[name]
        one = target.step_s(1, 0)
        assert target.step_s(knee - 2, 0) == one
        assert target.step_s(2 * knee, 0) == pytest.approx(2 * one, rel=0.01)
        assert target.step_s(1, 100_000) > one
    assert PAIRS["70b-h100"][0].step_s(1, 0) == pytest.approx(141.2e9 / (4 * 3.35e12 * 0.85))


def test_an_emulation_says_what_it_is() -> None:
    """Bug guarded: figures of devices that are not there, taken for measurements of some that are."""
    info = make_info("emulated:70b-h100?alpha=0.75")
    assert info.name == "emulated:70b-h100?alpha=0.75"
    for text in (info.device, info.dtype, info.path, info.path_reason, info.row_invariance, info.numerics):
        assert "emulated" in text
    assert info.step_times[0] == (1, PAIRS["70b-h100"][0].step_s(1, 65))
    assert info.kv_capacity_tokens > 100_000


def test_an_emulation_in_a_file_is_followed(tmp_path: Path) -> None:
    """Bug guarded: a benchmark that changes the conditions and goes on measuring the old ones."""
    file = tmp_path / "emulation"

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        os.utime(new, ns=(0, next(changes)))
        os.replace(new, file)

    changes = itertools.count(1)
    write("emulated:free?step_ms=30&alpha=1")
    target, draft, clock = make_pair(f"emulated:@{file}")

    def right_of_ten() -> int:
        request = ProposeRequest(round_id=1, items=(asked("s", 0, PROMPT, 10, context()),))
        (proposal,) = draft.propose(request).proposals
        verify = VerifyRequest(round_id=1, items=(item("s", 0, PROMPT, context(), proposal.tokens),))
        before_s = clock()
        (verdict,) = target.verify(verify).verdicts
        took.append(clock() - before_s)
        return verdict.accepted

    took: list[float] = []
    assert right_of_ten() == 10
    write("emulated:free?step_ms=10&alpha=0")
    assert right_of_ten() == 0
    write("emulated:fre")
    assert right_of_ten() == 0
    assert took == pytest.approx([0.03, 0.01, 0.01])
    with pytest.raises(ConfigError, match="did you mean"):
        follow_emulation(f"emulated:@{file}", "target.model")
    write(f"emulated:@{file}")
    with pytest.raises(ConfigError, match="must hold a name such as emulated:free"):
        parse_emulation(f"emulated:@{file}", "target.model")
    with pytest.raises(ConfigError, match="cannot read"):
        parse_emulation("emulated:@/nowhere", "target.model")


# --- names ------------------------------------------------------------------------------------------------------------------


def test_names_are_read() -> None:
    """Bug guarded: a parameter that is accepted and ignored."""
    free = parse_emulation("emulated:free?step_ms=20&c=.2&alpha=.5&recovery=.6&bonus=.7&hop_ms=1.5&seed=9&knee=100", "x")
    assert (free.target, free.draft) == (Flat(0.02, 100.0), Flat(0.2 * 0.02, 100.0))
    assert (free.alpha, free.recovery, free.bonus, free.hop_s, free.seed) == (0.5, 0.6, 0.7, 0.0015, 9)
    assert parse_emulation("emulated:8b-h100", "x").target is PAIRS["8b-h100"][0]
    assert is_emulated("emulated:x")
    assert not is_emulated("org/emulated:x")
    assert not is_emulated(None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("emulated:70b-h10", "did you mean 'emulated:70b-h100'?"),
        ("emulated:", "there are: 70b-h100"),
        ("emulated:free?alpa=.5", "unknown parameter 'alpa'"),
        ("emulated:free?alpha", "alpha must be a number from 0 to 1, got ''"),
        ("emulated:free?alpha=high", "got 'high'"),
        ("emulated:free?alpha=nan", "got 'nan'"),
        ("emulated:free?alpha=1.5", "alpha must be a number from 0 to 1"),
        ("emulated:free?alpha=.5&alpha=.6", "'alpha' is given twice"),
        ("emulated:free?alpha=.5&", "unknown parameter ''"),
        ("emulated:8b-h100?step_ms=30", "'step_ms' belongs to emulated:free"),
        ("emulated:free?seed=1.5", "seed must be an integer of 32 bits"),
        ("emulated:free?step_ms=0", "step_ms must be a number above 0"),
        ("emulated:free?alpha=.8&bonus=.5", "bonus must lie between alpha and"),
        ("emulated:free?alpha=.8&recovery=.1&bonus=.95", "here 0.8 and 0.82"),
    ],
)
def test_wrong_names_are_refused_with_the_fix(name: str, said: str) -> None:
    """Bug guarded: a misspelt parameter that silently measures something else."""
    with pytest.raises(ConfigError) as refused:
        parse_emulation(name, "target.model")
    assert str(refused.value).startswith("target.model: ")
    assert said in str(refused.value)


FREE = "emulated:free"
PAIR = {"target": {"model": FREE}, "draft": {"source": "model", "model": FREE}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"target": {"model": "emulated:fre"}}, "did you mean 'emulated:free'?"),
        ({"target": {"model": FREE}}, "set draft.source to model and draft.model to 'emulated:free'"),
        ({**PAIR, "target": {}}, "target.model is 'smollm2', so draft.model must be the same"),
        ({**PAIR, "draft": {"source": "model", "model": "smollm2"}}, "draft.model must be the same, got 'smollm2'"),
        ({**PAIR, "draft": {"source": "model", "model": f"{FREE}?alpha=.5"}}, "draft.model must be the same"),
        ({**PAIR, "target": {"model": FREE, "quantization": "int8"}}, "target.quantization has no meaning"),
        ({**PAIR, "draft": {**PAIR["draft"], "num_threads": 1}}, "draft.num_threads has no meaning"),
    ],
)
def test_configurations_that_cannot_be_emulated_are_refused_at_once(sections: dict[str, dict[str, str]], said: str) -> None:
    """Bug guarded: an emulated draft beside a real target would propose nonsense, and look like a bad draft."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        preflight(parse_config(sections))


@pytest.mark.parametrize("build", [build_target, build_draft_model])
def test_what_needs_logits_refuses_an_emulation(build: Callable[[OutriderConfig], object]) -> None:
    """Bug guarded: `bench engine` and `verify-lossless` on an emulation would break far from the reason."""
    with pytest.raises(ConfigError, match="has step times but no logits"):
        build(parse_config(PAIR))


# --- helpers ----------------------------------------------------------------------------------------------------------------


def item(
    name: str, base: int, tokens: tuple[int, ...], told: SequenceContext | None = None, draft: tuple[int, ...] = ()
) -> VerifyItem:
    return VerifyItem(sequence_id=name, base_length=base, tokens=tokens, draft=draft, context=told)


def asked(name: str, base: int, tokens: tuple[int, ...], depth: int, told: SequenceContext | None = None) -> ProposeItem:
    return ProposeItem(sequence_id=name, base_length=base, tokens=tokens, depth=depth, context=told)


def to_prepare(
    name: str,
    base: int,
    tokens: tuple[int, ...],
    draft: tuple[int, ...],
    depth: int,
    fan_out: tuple[int, ...],
    told: SequenceContext | None = None,
) -> PrepareItem:
    return PrepareItem(
        sequence_id=name, base_length=base, tokens=tokens, draft=draft, depth=depth, fan_out=fan_out, context=told
    )


def draft_after(draft: PacedDraft, ids: list[int], known: SequenceContext) -> tuple[int, ...]:
    (proposal,) = draft.propose(ProposeRequest(round_id=1, items=(asked("s", 0, tuple(ids), 3, known),))).proposals
    return proposal.tokens


def prepare_after(draft: PacedDraft, ids: list[int], drafted: tuple[int, ...], known: SequenceContext) -> Prepared:
    wanted = to_prepare("s", 0, tuple(ids), drafted, 3, (3, 3, 3, 3), known)
    (prepared,) = draft.prepare(PrepareRequest(round_id=1, items=(wanted,))).prepared
    return prepared

"""Who takes part in a round, and the KV blocks that must never run out. Played against a target that checks the bookkeeping."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drivers import SyncDriver
from engine.errors import Overloaded
from engine.request import Event, InvalidTransitionError, Request, State
from engine.round import RoundResult
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft, ScriptedTarget, model_info
from engine.types import DepthRequest, FinishReason, GenerateRequest, SamplingParams, StepReport, VerifyReply, VerifyRequest

EOS = 0


def next_token(ids: Sequence[int]) -> int:
    """A text that depends on everything before it, so that one wrong token in a cache changes all that follow."""
    state = len(ids)
    for token in ids:
        state = (state * 31 + token + 7) % 9973
    return state % 50 + 1


def wrong_token(ids: Sequence[int]) -> int:
    return next_token(ids) % 50 + 1


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class StrictTarget(ScriptedTarget):
    """Also counts the blocks of rejected drafts, checks every cached token, and remembers which releases it was told of."""

    def __init__(self, **info: object):
        super().__init__(next_token, model_info(eos_token_ids=(EOS,), **info))
        self.released: Counter[str] = Counter()
        self.fail_next = False

    def verify(self, request: VerifyRequest) -> VerifyReply:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the forward failed")
        self.released.update(request.release)
        lengths = {name: len(held.ids) for name, held in self.sequences.items() if name not in request.release}
        for item in request.items:
            assert (item.context is not None) == (item.base_length == 0)
            lengths[item.sequence_id] = item.base_length + len(item.tokens) + len(item.draft)
        blocks = sum(-(-length // self.info.kv_block_size) for length in lengths.values())
        assert blocks <= self.info.kv_capacity_tokens // self.info.kv_block_size, f"{blocks} blocks asked for"
        assert max(lengths.values(), default=0) <= self.info.max_context
        return super().verify(request)


class Recorder(FixedDepth):
    """A fixed depth that remembers what it was told."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.rooms: list[int] = []
        self.ended: list[str] = []
        self.observed: list[tuple[str, int, int]] = []
        self.reports: list[StepReport] = []

    def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
        self.rooms += [request.room for request in requests]
        return super().depths(requests, batch_size, now_s)

    def observe(self, request_id: str, drafted: int, accepted: int, *, reached: bool = True) -> None:
        self.observed.append((request_id, drafted, accepted))

    def finished(self, request_id: str) -> None:
        self.ended.append(request_id)

    def report(self, report: StepReport, now_s: float) -> None:
        self.reports.append(report)


class Lane:
    """A driver with a strict target and a draft, and what every request was given so far."""

    def __init__(
        self,
        *,
        depth: int = 0,
        max_batch: int = 8,
        prefill_tokens: int = 64,
        max_waiting: int = 100,
        good: bool = True,
        **info: object,
    ):
        self.policy = Recorder(depth)
        self.target = StrictTarget(**info)
        self.draft = ScriptedDraft(next_token if good else wrong_token)
        self.scheduler = Scheduler(
            self.target.info, self.policy, max_batch=max_batch, prefill_tokens=prefill_tokens, max_waiting=max_waiting
        )
        self.driver = SyncDriver(self.target, self.draft, self.scheduler)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, name: str, prompt: Sequence[int], **params: object) -> None:
        self.driver.add(
            GenerateRequest(
                request_id=name,
                prompt_ids=tuple(prompt),
                params=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params}),  # type: ignore[arg-type]
            )
        )
        self.outputs[name] = []

    def step(self) -> RoundResult:
        result = self.driver.step()
        for delta in result.deltas:
            self.outputs[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.request_id not in self.reasons, "ended twice"
                self.reasons[delta.request_id] = delta.finish_reason
        return result

    def run(self, most_rounds: int = 2000) -> None:
        while self.scheduler.has_work:
            self.step()
            most_rounds -= 1
            assert most_rounds, "the lane does not come to an end"

    def find(self, name: str) -> Request:
        request = self.scheduler.find(name)
        assert request is not None
        return request


# --- prefill ----------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_stall_running_requests() -> None:
    """Bug guarded: a prompt is prefilled in one forward, and every running stream pauses for it."""
    lane = Lane(prefill_tokens=16)
    lane.add("runs", [1, 2], max_tokens=30)
    lane.step()
    lane.add("long", range(1, 51))
    chunks = []
    while lane.scheduler.find("long") is None or lane.find("long").state is not State.DECODING:
        before = len(lane.outputs["runs"])
        report = lane.step().report
        assert len(lane.outputs["runs"]) == before + 1
        chunks.append(report.num_prefill_tokens)
        assert report.batch_size == 1, "a prefill chunk is not a decoding request"
    assert chunks == [16, 16, 16, 2]
    assert [item.sample for r in lane.target.requests for item in r.items if item.sequence_id == "long"] == [False] * 3 + [True]
    assert len(lane.outputs["long"]) == 1, "the first token comes with the last chunk"
    lane.run()
    assert lane.outputs == {"runs": expected([1, 2], 30), "long": expected(range(1, 51), 8)}


def test_the_prefill_budget_is_shared_in_order_of_arrival() -> None:
    """Bug guarded: every prompt gets the whole budget, so that a burst of prompts makes one enormous forward."""
    lane = Lane(prefill_tokens=20)
    for name in "abc":
        lane.add(name, range(1, 16), max_tokens=1)
    first, second = lane.step().report, lane.step().report
    assert [[(i.sequence_id, len(i.tokens)) for i in r.items] for r in lane.target.requests] == [
        [("a", 15), ("b", 5)],
        [("b", 10), ("c", 10)],
    ]
    assert (first.num_prefill_tokens, second.num_prefill_tokens) == (20, 20)
    lane.run()
    assert lane.outputs == dict.fromkeys("abc", expected(range(1, 16), 1))


@given(st.integers(16, 64), st.lists(st.integers(1, 80), min_size=1, max_size=5))
def test_a_round_prefills_no_more_than_its_budget(budget: int, lengths: list[int]) -> None:
    """Bug guarded: the rest of a chunk is counted against the wrong round, or a prompt of exactly the budget needs an empty
    round."""
    lane = Lane(prefill_tokens=budget)
    for i, length in enumerate(lengths):
        lane.add(str(i), range(1, length + 1), max_tokens=1)
    lane.run()
    prefilled = [report.num_prefill_tokens for report in lane.policy.reports]
    assert sum(prefilled) == sum(lengths)
    assert max(prefilled) <= budget
    assert len([tokens for tokens in prefilled if tokens]) == -(-sum(lengths) // budget)


# --- KV blocks --------------------------------------------------------------------------------------------------------------

prompts = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=1, max_size=6)


@given(
    prompts,
    st.lists(st.integers(1, 12), min_size=6, max_size=6),
    st.integers(1, 5),
    st.integers(0, 40),
    st.integers(0, 8),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=300)
def test_a_tiny_pool_changes_nothing_but_the_speed(
    texts: list[list[int]], budgets: list[int], block: int, spare: int, depth: int, max_batch: int, good: bool
) -> None:
    """Bug guarded: under pressure the target is asked for more blocks than it has, a preempted request loses or repeats tokens,
    or nobody is ever admitted again. The pool holds the largest request alone and up to ``spare`` tokens more."""
    largest = max(len(text) + budget for text, budget in zip(texts, budgets, strict=False))
    lane = Lane(
        depth=depth,
        max_batch=max_batch,
        good=good,
        prefill_tokens=7,
        kv_block_size=block,
        kv_capacity_tokens=-(-largest // block) * block + spare,
    )
    for i, (text, budget) in enumerate(zip(texts, budgets, strict=False)):
        lane.add(str(i), text, max_tokens=budget)
    lane.run()
    for i, (text, budget) in enumerate(zip(texts, budgets, strict=False)):
        assert lane.outputs[str(i)] == expected(text, budget)
    assert not lane.target.sequences, "every sequence was released"
    assert set(lane.reasons.values()) == {FinishReason.LENGTH}


def test_drafts_are_given_up_before_a_request_is_preempted() -> None:
    """Bug guarded: deep drafts push a running request out of the cache, which costs a whole prefill to save one step."""
    lane = Lane(depth=8, kv_block_size=4, kv_capacity_tokens=28)
    for name in "ab":
        lane.add(name, range(1, 8), max_tokens=12)
    lane.step()
    plan = lane.scheduler.plan(0.0, drafts=True)
    assert plan.num_preempted == 0
    assert [item.depth for item in plan.items] == [7, 3], "both fill their third block, and there is one more"
    lane.run()
    assert lane.outputs == dict.fromkeys("ab", expected(range(1, 8), 12))


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    """Bug guarded: the oldest request is preempted again and again and never ends, or the preempted one queues behind
    newcomers."""
    lane = Lane(kv_block_size=4, kv_capacity_tokens=24)
    lane.add("old", range(1, 9), max_tokens=10)
    lane.add("young", range(11, 19), max_tokens=10)
    lane.step()
    lane.add("late", [1], max_tokens=2)
    while not lane.policy.reports[-1].num_preempted:
        lane.step()
    assert [request.id for request in lane.scheduler.running] == ["old"]
    assert [request.id for request in lane.scheduler.waiting] == ["young", "late"]
    young = lane.find("young")
    assert (young.state, young.target_length) == (State.WAITING, 0)
    assert lane.target.released["young"] == 1
    held = lane.outputs["young"].copy()
    lane.run()
    assert lane.outputs["young"][: len(held)] == held
    assert lane.outputs == {
        "old": expected(range(1, 9), 10),
        "young": expected(range(11, 19), 10),
        "late": expected([1], 2),
    }


def test_the_queue_and_the_cache_are_told_as_they_are() -> None:
    """Bug guarded: a preempted request that counts as one more, long, wait in the queue; cache told in blocks."""
    lane = Lane(kv_block_size=4, kv_capacity_tokens=24)
    lane.add("old", range(1, 9), max_tokens=10)
    lane.add("young", range(11, 19), max_tokens=10)
    lane.step()
    assert lane.scheduler.kv_used_tokens == 24  # 9 tokens each and room for one: three blocks of four
    lane.run()
    assert sum(report.num_preempted for report in lane.policy.reports) > 0
    assert sum(len(report.queue_times_s) for report in lane.policy.reports) == 2
    assert lane.scheduler.kv_used_tokens == 0


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """Bug guarded: small requests slip past one that waits for more memory, which then never runs."""
    lane = Lane(kv_block_size=4, kv_capacity_tokens=24, max_batch=4)
    lane.add("runs", range(1, 9), max_tokens=4)
    lane.step()
    lane.add("large", range(1, 17), max_tokens=4)
    lane.add("small", [1], max_tokens=1)
    lane.step()
    assert [request.id for request in lane.scheduler.running] == ["runs"]
    lane.run()
    assert lane.outputs["large"] == expected(range(1, 17), 4)


def test_at_most_max_batch_run_together() -> None:
    """Bug guarded: the target gets more sequences in one forward than it was sized for."""
    lane = Lane(max_batch=3)
    for i in range(8):
        lane.add(str(i), [i + 1], max_tokens=2)
    lane.run()
    assert max(len(request.items) for request in lane.target.requests) == 3
    assert list(lane.reasons) == [str(i) for i in range(8)]


# --- depth ------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 40), st.integers(0, 25), st.one_of(st.none(), st.integers(0, 9)))
@settings(max_examples=200)
def test_the_depth_leaves_room_for_the_bonus_token(
    prompt: int, max_tokens: int, extra_context: int, depth: int, max_depth: int | None
) -> None:
    """Bug guarded: drafts beyond max_tokens or the context are verified for nothing, or overrun the target's positions."""
    lane = Lane(depth=depth, max_context=prompt + max_tokens + extra_context)
    lane.add("r", range(1, prompt + 1), max_tokens=max_tokens, max_depth=max_depth)
    done = 0
    while lane.scheduler.running or lane.scheduler.waiting:
        result = lane.step()
        most = max(max_tokens - done - 1, 0)
        assert sum(result.report.depths) <= min(most, depth, most if max_depth is None else max_depth)
        done = len(lane.outputs["r"])
    assert lane.outputs["r"] == expected(range(1, prompt + 1), max_tokens)
    wasted = [drafted - accepted for _, drafted, accepted in lane.policy.observed]
    assert not any(wasted), "with a perfect draft and enough room every draft token is used"


def test_the_context_limits_the_depth_too() -> None:
    """Bug guarded: a model with a short context gets positions it was not made for."""
    lane = Lane(depth=8, max_context=12)
    lane.add("r", range(1, 9), max_tokens=30)
    lane.step()
    assert lane.scheduler.room(lane.find("r")) == 12 - 9 - 1


def test_without_drafts_every_depth_is_zero() -> None:
    """Bug guarded: a round plans drafts although nobody can be asked, and the target verifies tokens that do not exist."""
    lane = Lane(depth=5)
    lane.add("r", [1])
    lane.step()
    assert [item.depth for item in lane.scheduler.plan(0.0, drafts=True).items] == [5]
    assert [item.depth for item in lane.scheduler.plan(0.0, drafts=False).items] == [0]


def test_the_policy_is_asked_with_the_number_of_decoding_requests() -> None:
    """Bug guarded: requests that still prefill count as load, so the depth falls while a prompt comes in."""

    class Sizes(FixedDepth):
        seen: list[int]

        def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
            self.seen.append(batch_size)
            return [0] * len(requests)

    lane = Lane(prefill_tokens=16)
    lane.scheduler.policy = policy = Sizes(0)
    policy.seen = []
    lane.add("a", [1])
    lane.step()
    lane.add("long", range(1, 60))
    lane.step()
    assert set(policy.seen) == {1}


# --- the queue --------------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses() -> None:
    """Bug guarded: the queue grows without bound, or a refused request leaves its id behind."""
    lane = Lane(max_waiting=2)
    lane.add("a", [1])
    lane.add("b", [2])
    with pytest.raises(Overloaded) as refused:
        lane.add("c", [3])
    assert refused.value.retry_after_s > 0
    lane.step()
    lane.add("c", [3])
    lane.run()
    assert lane.outputs["c"] == expected([3], 8)


def test_an_id_in_use_is_refused_and_free_afterwards() -> None:
    """Bug guarded: two live requests share one cache entry and mix their texts."""
    lane = Lane(depth=3)
    lane.add("a", [1])
    with pytest.raises(ValueError, match="in use"):
        lane.add("a", [2])
    lane.step()
    with pytest.raises(ValueError, match="in use"):
        lane.add("a", [2])
    lane.run()
    lane.reasons.clear()
    lane.add("a", [2, 3])
    lane.run()
    assert lane.outputs["a"] == expected([2, 3], 8)


# --- ends -------------------------------------------------------------------------------------------------------------------


def _bring_to(state: str, lane: Lane) -> None:
    """Let request "x" reach ``state`` beside "other"."""
    lane.add("other", range(1, 9), max_tokens=12)
    if state == "waiting":
        lane.scheduler.max_batch = 1
        lane.step()
        lane.add("x", range(11, 31), max_tokens=10)
    elif state == "prefilling":
        lane.add("x", range(11, 31), max_tokens=10)
        lane.step()
    elif state == "decoding":
        lane.add("x", range(11, 19), max_tokens=10)
        lane.step()
        lane.step()
    else:
        lane.add("x", range(11, 19), max_tokens=10)
        while lane.scheduler.find("x") not in lane.scheduler.waiting or not lane.outputs["x"]:
            lane.step()


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
@pytest.mark.parametrize("event", [Event.CANCEL, Event.FAIL])
def test_a_request_can_end_at_any_time(state: str, event: Event) -> None:
    """Bug guarded: a cancelled request keeps its blocks, its place in a queue or its id, or takes its neighbour with it."""
    lane = Lane(depth=2, prefill_tokens=16, kv_block_size=4, kv_capacity_tokens=24 if state == "preempted" else 80)
    _bring_to(state, lane)
    was_told = lane.target.released["x"]
    request = lane.find("x")
    lane.scheduler.remove(request, event)
    assert request.state is (State.CANCELLED if event is Event.CANCEL else State.FAILED)
    assert lane.scheduler.find("x") is None
    with pytest.raises(InvalidTransitionError):
        lane.scheduler.remove(request, event)
    lane.step()
    assert "x" not in lane.target.sequences
    assert lane.target.released["x"] == was_told + (state in ("prefilling", "decoding"))
    assert lane.policy.ended.count("x") == 1
    lane.run()
    assert lane.outputs["other"] == expected(range(1, 9), 12)


def test_cancelling_an_unknown_request_does_nothing() -> None:
    """Bug guarded: a client that leaves just after its last token raises in the lane."""
    lane = Lane()
    lane.driver.cancel("nobody")
    lane.add("a", [1])
    lane.run()
    lane.driver.cancel("a")
    assert lane.policy.ended == ["a"]


def test_the_last_cancel_still_reaches_the_target() -> None:
    """Bug guarded: a lane that has nothing left to run keeps the blocks of the last cancelled request until somebody comes."""
    lane = Lane()
    lane.add("a", [1])
    lane.step()
    lane.driver.cancel("a")
    assert lane.scheduler.has_work
    lane.step()
    assert not lane.target.sequences
    assert not lane.scheduler.has_work


def test_releases_are_told_once_even_when_a_round_fails() -> None:
    """Bug guarded: a release is lost with the round that carried it (blocks leak), or repeated in every later round."""
    lane = Lane(depth=2)
    for name in "ab":
        lane.add(name, [1], max_tokens=20)
    lane.step()
    lane.driver.cancel("a")
    lane.target.fail_next = True
    with pytest.raises(RuntimeError, match="the forward failed"):
        lane.step()
    assert "a" in lane.target.sequences
    for _ in range(3):
        lane.step()
    assert lane.target.released == Counter({"a": 1})
    assert "a" not in lane.target.sequences


def test_a_failed_round_costs_no_token() -> None:
    """Bug guarded: a driver that plays a round again after a failure loses or repeats tokens."""
    lane = Lane(depth=4)
    lane.add("a", range(1, 30), max_tokens=20)
    while lane.scheduler.running or lane.scheduler.waiting:
        lane.target.fail_next = True
        with pytest.raises(RuntimeError):
            lane.step()
        lane.step()
    assert lane.outputs["a"] == expected(range(1, 30), 20)


def test_the_draft_hears_of_ended_requests_when_it_is_asked() -> None:
    """Bug guarded: the draft keeps the KV of every request that ever ran."""
    lane = Lane(depth=3)
    for name in "abc":
        lane.add(name, [ord(name)], max_tokens=20)
    lane.step()
    lane.step()
    lane.driver.cancel("a")
    lane.step()
    assert set(lane.draft.sequences) == {"b", "c"}
    lane.step()
    assert [request.release for request in lane.draft.requests if request.release] == [("a",)]


def test_a_target_that_lost_everything_is_filled_again() -> None:
    """Bug guarded: after the target was restarted, requests go on from caches that are not there."""
    lane = Lane(depth=3, prefill_tokens=16)
    lane.add("a", range(1, 40), max_tokens=20)
    lane.add("b", [5], max_tokens=20)
    for _ in range(5):
        lane.step()
    lane.driver.cancel("b")
    lane.target.lose_everything()
    lane.scheduler.forget_target()
    assert {request.state for request in lane.scheduler.running} == {State.PREFILLING}
    lane.run()
    assert lane.outputs["a"] == expected(range(1, 40), 20)
    assert lane.target.released["b"] == 0, "the new target never heard of it"


def test_another_draft_starts_from_nothing() -> None:
    """Bug guarded: a draft that took over is asked for the continuation of texts that only its predecessor knows."""
    lane = Lane(depth=3)
    lane.add("a", [1], max_tokens=20)
    lane.step()
    lane.step()
    lane.driver.source = lane.draft = ScriptedDraft(next_token)
    lane.scheduler.forget_draft()
    assert lane.step().report.fallbacks == {}
    assert lane.draft.requests[0].items[0].base_length == 0
    lane.run()
    assert lane.outputs["a"] == expected([1], 20)


def test_some_requests_lose_their_draft() -> None:
    """Bug guarded: one replica of several is gone, and the others' requests are sent again as a whole; or what the lost one
    had still to say is believed, so that its successor is asked to go on with texts that it does not know."""
    lane = Lane(depth=3)
    lane.scheduler.policy = FixedDepth(3, fan_out=1)
    for name, token in (("a", 1), ("b", 2), ("gone", 3)):
        lane.add(name, [token], max_tokens=30)
    for _ in range(3):
        lane.step()
    lane.driver.cancel("gone")
    before = {request.id: request.draft_length for request in lane.scheduler.running}
    lane.scheduler.forget_draft({"a", "gone", "never heard of"})
    after = {request.id: (request.draft_length, request.draft_opened) for request in lane.scheduler.running}
    assert after == {"a": (0, False), "b": (before["b"], True)}
    assert before["b"] > 1
    assert lane.scheduler.draft_released == [], "the replica that held it is gone"
    lane.draft.sequences.pop("a")
    report = lane.step().report
    assert (report.hits, report.fallbacks) == ({"bonus": 1}, {"unexpected_answer": 2})
    assert [(item.sequence_id, item.base_length) for item in lane.draft.requests[-1].items] == [("a", 0)]
    assert min(item.base_length for item in lane.draft.prepare_requests[-1].items) > 1
    lane.run()
    assert (lane.outputs["a"], lane.outputs["b"]) == (expected([1], 30), expected([2], 30))


def test_a_name_used_again_is_not_released_while_it_lives() -> None:
    """Bug guarded: the draft is told late of a request's end, by a message in which the next request of that name is alive."""
    lane = Lane(depth=3)
    lane.add("same", [1], max_tokens=30)
    lane.step()
    lane.step()
    lane.driver.cancel("same")
    assert lane.scheduler.draft_released == ["same"]
    lane.add("same", [2], max_tokens=30)
    assert lane.scheduler.draft_released == []
    lane.driver.cancel("same")
    assert lane.scheduler.draft_released == ["same"], "even if the draft never heard of the second"


@pytest.mark.parametrize(("prefill_tokens", "asked"), [(64, [1]), (16, [1, 1, 1])])
def test_prompts_that_the_draft_may_read_have_a_depth(prefill_tokens: int, asked: list[int]) -> None:
    """Bug guarded: the policy is asked for a batch of nobody, which divides by zero or looks like an empty lane."""

    class Sizes(FixedDepth):
        def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
            seen.append(batch_size)
            return super().depths(requests, batch_size, now_s)

    seen: list[int] = []
    lane = Lane(prefill_tokens=prefill_tokens)
    lane.scheduler.policy = Sizes(3, fan_out=2)
    lane.add("a", range(1, 45))
    for _ in asked:
        lane.step()
    assert seen == asked
    sent = [(item.depth, item.fan_out) for request in lane.draft.prepare_requests for item in request.items]
    assert sent[-1] == (3, (2,)), "the first token may be foreseen already"


def test_beside_a_prompt_the_policy_may_verify_less_of_what_it_prepares() -> None:
    """Bug guarded: requests that still read are trimmed too, or the round after this one is prepared for no draft."""
    told: list[tuple[dict[str, int], int]] = []

    class Trimming(Recorder):
        def trim(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
            told.append((dict(depths), num_prompt_tokens))
            return dict.fromkeys(depths, 1)

    lane = Lane(prefill_tokens=16)
    lane.scheduler.policy = Trimming(4)
    lane.add("first", [1, 2, 3])
    lane.step()
    assert told == [], "nobody decoded beside it"
    lane.add("second", range(1, 11))
    first, second = lane.scheduler.plan(0.0, drafts=True, prepares=True).items
    assert told == [({"first": 4}, 10)]
    assert (first.depth, first.next_depth, second.next_depth) == (1, 4, 4)

"""A scripted run of a lane, round by round, and every number that its metrics page shows, computed by hand."""

import asyncio
import contextlib

import msgspec
import pytest
from metrics_page import status
from prometheus_client.parser import text_string_to_metric_families

from autoscale.cost_model import RoundCost
from deployments.counters import LaneCounters
from deployments.metrics import render
from engine.drivers import AsyncDriver, DraftUnavailable
from engine.errors import InvalidRequest, Overloaded
from engine.request import check_request
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import FakeClock, ScriptedDraft, ScriptedTarget, model_info
from engine.types import (
    Delta,
    GenerateRequest,
    PrepareReply,
    PrepareRequest,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    VerifyReply,
    VerifyRequest,
)

UNIT_S = 1 / 32
"""All times are multiples: binary fractions, so that sums are exact."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Target:
    """Each verify takes four units, three of them in the target itself."""

    def __init__(self, clock: FakeClock):
        self.clock = clock
        self.model = ScriptedTarget(lambda ids: len(ids) % 50 + 1)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        self.clock.advance(4 * UNIT_S)
        return msgspec.structs.replace(self.model.verify(request), step_time_s=3 * UNIT_S)


class Draft:
    """Each propose is waited for during one unit, and says it took two. Wrong about the token after five; not there for "d"."""

    available, prepares, extends = True, False, False

    def __init__(self, clock: FakeClock):
        self.clock = clock
        self.model = ScriptedDraft(lambda ids: 99 if len(ids) == 5 else len(ids) % 50 + 1)

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        self.clock.advance(UNIT_S)
        if request.items[0].sequence_id == "d":
            raise DraftUnavailable("no_draft")
        return msgspec.structs.replace(self.model.propose(request), step_time_s=2 * UNIT_S)

    def prepare(self, request: PrepareRequest) -> None:
        raise AssertionError("never asked")

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        raise AssertionError("never asked")


class PreparingDraft(Draft):
    """Beside that it prepares while the target verifies, and says that this took three units; fetching it takes one."""

    prepares = True

    def __init__(self, clock: FakeClock):
        super().__init__(clock)
        self.replies: list[PrepareReply] = []

    def prepare(self, request: PrepareRequest) -> None:
        self.replies.append(msgspec.structs.replace(self.model.prepare(request), step_time_s=3 * UNIT_S))

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        self.clock.advance(UNIT_S)
        replies, self.replies = self.replies, []
        return tuple(replies)


class Lane:
    """What a router does, without Ray: one place in the batch, four in the queue, depth 2."""

    def __init__(self, draft: type[Draft] = Draft, fan_out: int = 0) -> None:
        self.clock = FakeClock()
        self.counters = LaneCounters()
        self.counters.plain_cost = RoundCost.measured(((1, 2 * UNIT_S), (4, 2 * UNIT_S)), None)
        self.info = model_info()
        self.scheduler = Scheduler(self.info, FixedDepth(2, fan_out), max_batch=1, prefill_tokens=16, max_waiting=4)
        self.at_rest = asyncio.Event()
        self.driver = AsyncDriver(
            Target(self.clock),
            draft(self.clock),
            self.scheduler,
            on_report=lambda report: self._round_done(report),
            clock=self.clock,
        )

    def _round_done(self, report: object) -> None:
        self.counters.round_done(report, self.clock())  # type: ignore[arg-type]
        if not self.scheduler.has_work:
            self.at_rest.set()

    async def serve(self, request_id: str, prompt_length: int, max_tokens: int) -> None:
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=tuple(range(1, prompt_length + 1)),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        with self.counters.watching(request, self.clock) as watch:
            check_request(request, self.info)
            self.counters.arrived()

            def deliver(delta: Delta) -> None:
                watch.saw(delta)

            await self.driver.play(request, deliver)

    async def finish(self, *served: asyncio.Task[None]) -> None:
        """Play rounds until all requests have ended and the target has forgotten them."""
        rounds = asyncio.create_task(self.driver.run())
        ended = asyncio.gather(*served, self.at_rest.wait())
        await asyncio.wait((rounds, ended), return_when=asyncio.FIRST_COMPLETED)
        assert not rounds.done(), rounds.exception()
        await ended
        rounds.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rounds

    def page(self) -> Samples:
        """What its metrics show."""
        told = msgspec.structs.replace(
            status("lane"),
            draft_name="scripted",
            target=self.info,
            sources=self.counters.sources_by_name("scripted"),
            **self.counters.told(),
        )
        return samples(render([told], {"lanes": ["lane"], "drafts": []}))


async def play() -> Lane:
    """Five requests arrive at 0: a, b and d are served in turn, e is cancelled in the queue, c finds it full. x is refused.

    | round | from, to | of | what                                                              |
    |     1 |     0, 4 | a  | reads 3 tokens, makes the first                                   |
    |     2 |     4, 9 | a  | asks: 2 drafted, 1 right, 2 committed                             |
    |     3 |    9, 14 | a  | asks: 2 drafted, both right, 3 committed: 6 of 6                  |
    |     4 |   14, 18 | b  | reads 2 tokens, makes the first                                   |
    |     5 |   18, 22 | b  | no room for a draft, 1 committed: 2 of 2                          |
    |     6 |   22, 26 | d  | reads 2 tokens, makes the first                                   |
    |     7 |   26, 31 | d  | asks for 1, nobody is there, 1 committed                          |
    |     8 |   31, 35 | d  | no room for a draft, 1 committed: 3 of 3                          |
    |     9 |   35, 39 |    | tells the target to forget d                                      |
    """
    lane = Lane()
    served = {
        request_id: asyncio.create_task(lane.serve(request_id, prompt_length, max_tokens))
        for request_id, prompt_length, max_tokens in (("a", 3, 6), ("b", 2, 2), ("d", 2, 3), ("e", 2, 2))
    }
    await asyncio.sleep(0)
    assert len(lane.scheduler.waiting) == len(served)
    with pytest.raises(Overloaded):
        await lane.serve("c", 2, 2)
    with pytest.raises(InvalidRequest):
        await lane.serve("x", 2, 0)
    served.pop("e").cancel()
    await asyncio.sleep(0)
    await lane.finish(*served.values())
    return lane


def samples(page: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def histogram(name: str, counts: dict[str, int], total: float) -> Samples:
    """``counts``: bound of a bucket -> values that are not larger, for the bounds at which it rises."""
    return {
        **{(f"{name}_bucket", (("lane", "lane"), ("le", bound))): count for bound, count in counts.items()},
        (f"{name}_count", (("lane", "lane"),)): counts["+Inf"],
        (f"{name}_sum", (("lane", "lane"),)): total,
    }


def of_lane(values: dict[str, float], **labels: str) -> Samples:
    key = tuple(sorted({"lane": "lane", **labels}.items()))
    return {(f"outrider_{name}", key): value for name, value in values.items()}


COUNTED: Samples = {
    **of_lane(
        {
            "requests_total": 5,  # all but x
            "tokens_total": 11,  # 6 + 2 + 3
            "rounds_total": 9,
            "prefill_tokens_total": 7,  # 3 + 2 + 2
            "prefix_cached_tokens_total": 0,
            "target_tokens_total": 16,  # 7 of prompts, 5 last committed ones, 4 drafted
            "verify_seconds_total": 27 * UNIT_S,  # 9 x 3
            "prepared_seconds_total": 0,
            "prepared_exposed_seconds_total": 0,
            "draft_asked_total": 3,  # rounds 2, 3, 7
            "round_seconds_total": 39 * UNIT_S,
            "speculating_requests_total": 2,  # rounds 2 and 3
            "speculating_tokens_total": 5,  # 2 + 3
            "speculating_round_seconds_total": 10 * UNIT_S,  # 5 + 5
            "speculating_plain_seconds_total": 6 * UNIT_S,  # each 2 for the plain step and 5 - 3 - 1 beside the models
            "preemptions_total": 0,
            "running_requests": 0,
            "waiting_requests": 0,
            "kv_cache_used_tokens": 0,
            "kv_cache_tokens": 4096,
        }
    ),
    **of_lane(
        {
            "drafted_tokens_total": 4,
            "accepted_tokens_total": 3,
            "draft_seconds_total": 4 * UNIT_S,  # 2 + 2
            "draft_exposed_seconds_total": 3 * UNIT_S,  # 1 in each of rounds 2, 3, 7
            "draft_hidden_seconds_total": 2 * UNIT_S,  # (2 - 1) + (2 - 1) + max(0, 0 - 1)
        },
        source="scripted",
    ),
    **of_lane({"fallbacks_total": 1}, reason="no_draft"),
    **of_lane({"finished_requests_total": 3}, reason="length"),
    **of_lane({"finished_requests_total": 0}, reason="stop"),
    **of_lane({"finished_requests_total": 0}, reason="error"),
    **of_lane({"finished_requests_total": 1}, reason="overloaded"),
    **of_lane({"finished_requests_total": 1}, reason="cancelled"),
    **of_lane({"finished_requests_total": 1}, reason="invalid"),
    **of_lane({"drafted_by_position_total": 2, "accepted_by_position_total": 2}, position="0"),
    **of_lane({"drafted_by_position_total": 2, "accepted_by_position_total": 1}, position="1"),
    **of_lane({"draft_available": 1}, source="scripted"),
    # rounds 2 and 3; time of theirs
    **of_lane({"source_drafts_total": 2, "source_drafted_tokens_total": 4}, source="scripted"),
    **of_lane({"source_accepted_tokens_total": 3, "source_seconds_total": 4 * UNIT_S}, source="scripted"),
    **of_lane({"lane_info": 1}, model="scripted", device="cpu", dtype="float32", path="", numerics="fast", source="scripted"),
}
HISTOGRAMS: Samples = {
    # a: 4 units = 0.125 s, b: 18 = 0.5625, d: 26 = 0.8125
    **histogram("outrider_time_to_first_token_seconds", {"0.1": 0, "0.25": 1, "0.5": 1, "1.0": 3, "+Inf": 3}, 48 * UNIT_S),
    # a: 2 of 5/2 units = 0.078, 3 of 5/3 = 0.052; b: 4 = 0.125; d: 5 = 0.156 and 4
    **histogram(
        "outrider_inter_token_latency_seconds",
        {"0.05": 0, "0.075": 3, "0.1": 5, "0.2": 8, "+Inf": 8},
        23 * UNIT_S,
    ),
    # a: 0, b: 14 units = 0.4375 s, d: 22 = 0.6875
    **histogram("outrider_queue_seconds", {"0.001": 1, "0.25": 1, "0.5": 2, "1.0": 3, "+Inf": 3}, 36 * UNIT_S),
    # rounds 2 and 3
    **histogram("outrider_accepted_length", {"1.0": 0, "2.0": 1, "3.0": 2, "+Inf": 2}, 5),
    # rounds 5, 7, 8: none
    **histogram("outrider_draft_depth", {"0.0": 3, "1.0": 3, "2.0": 5, "+Inf": 5}, 4),
}


async def test_every_number_of_a_scripted_run() -> None:
    """Bug guarded: a number that counts something near to what its help text says: rounds for requests, a wait twice, the
    first token as a gap, drafts that were asked for as drafts that came.
    """
    page = (await play()).page()
    own = {key: value for key, value in page.items() if ("lane", "lane") in key[1]}
    inside = {key: value for key, value in own.items() if key[0].endswith("_bucket")}
    assert {key: value for key, value in own.items() if key not in inside and key not in HISTOGRAMS} == COUNTED
    assert {key: own[key] for key in HISTOGRAMS} == {key: pytest.approx(value, rel=1e-12) for key, value in HISTOGRAMS.items()}
    for key, value in inside.items():  # between the bounds above, nothing rises
        assert value in {number for (name, _), number in HISTOGRAMS.items() if name == key[0]}


async def test_figures_that_are_derived() -> None:
    """Bug guarded: a formula in a help text that does not give what it names."""
    totals = (await play()).counters.totals
    accepted_length = totals["speculating_tokens"] / totals["speculating_requests"]
    break_even = totals["speculating_round_seconds"] / totals["speculating_plain_seconds"]
    # Five tokens took 10 units; plain rounds of 3 units each would have taken 15.
    assert accepted_length / break_even == pytest.approx(15 / 10)


async def test_every_number_of_overlapped_rounds() -> None:
    """Bug guarded: time behind a verify counted as waited for, or the other way round; a miss that counts as a hit because the
    draft was asked then; prepared drafts that no source made.

    One request; beside a verify one outcome per position is prepared. After five tokens the draft says 99, where 6 is right.

    | round | from, to | what                                                                                       |
    |     1 |     0, 4 | reads 3 tokens, makes the first, 4; beside it 5, 99 are prepared for that                  |
    |     2 |     4, 9 | fetches them (1): a hit after a plain step. 1 right, 2 committed; 5 and then 6 is no outcome |
    |     3 |    9, 15 | fetches (1): a miss after a recovery; asks (1) for 7, 8: both right, 3 committed           |
    |     4 |   15, 20 | fetches (1): a hit after a bonus, 10, 11: both right, 3 committed: 9 of 9                  |
    |     5 |   20, 25 | fetches (1) what was prepared in vain; tells the target to forget the request              |
    """
    lane = Lane(PreparingDraft, fan_out=1)
    await lane.finish(asyncio.create_task(lane.serve("a", 3, 9)))
    page = lane.page()
    expected = {
        **of_lane({"rounds_total": 5, "tokens_total": 9, "draft_asked_total": 1, "round_seconds_total": 25 * UNIT_S}),
        **of_lane({"prepared_hits_total": 1}, kind="plain"),
        **of_lane({"prepared_hits_total": 1}, kind="bonus"),
        **of_lane({"prepared_misses_total": 1}, kind="recovery"),
        **of_lane(
            {
                "drafted_tokens_total": 6,
                "accepted_tokens_total": 5,
                "draft_seconds_total": 14 * UNIT_S,  # 3, 3 + 2, 3, 3
                "draft_exposed_seconds_total": 5 * UNIT_S,  # 1, 1 + 1, 1, 1
                "draft_hidden_seconds_total": 9 * UNIT_S,  # 2, 3, 2, 2
                "source_drafts_total": 3,
                "source_drafted_tokens_total": 6,
                "source_accepted_tokens_total": 5,
                "source_seconds_total": 14 * UNIT_S,
            },
            source="scripted",
        ),
        **of_lane({"prepared_seconds_total": 9 * UNIT_S, "prepared_exposed_seconds_total": 3 * UNIT_S}),  # all but round 3
    }
    assert {key: page[key] for key in expected} == expected
    counted = {name for name, _ in page if name.startswith(("outrider_prepared_hits", "outrider_prepared_misses"))}
    assert sum(value for (name, _), value in page.items() if name in counted and name.endswith("_total")) == 3
    assert not [name for name, _ in page if name == "outrider_fallbacks_total"]

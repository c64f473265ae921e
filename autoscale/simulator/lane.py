"""One lane: its requests, its rounds, and the time that they take on devices of given step times."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from autoscale.hit_rate import MAX_FAN_OUT
from engine.drafting import CATCH_UP_SYNC
from engine.scheduler import DepthPolicy, FixedDepth
from engine.types import DepthRequest, StepReport


class Device(Protocol):
    """A model on GPUs of its own, as `engine.testing.profiles.Timed`."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV cache."""

    def step_s(self, num_tokens: int, context_tokens: int) -> float:
        """Seconds of one forward of ``num_tokens`` that reads the KV of ``context_tokens``."""


class Pair(Protocol):
    """A target, its draft, and how well the draft foresees it, as `engine.testing.profiles.Emulation`."""

    @property
    def target(self) -> Device:
        """Verifies."""

    @property
    def draft(self) -> Device:
        """Drafts."""

    @property
    def alpha(self) -> float:
        """Probability that a draft token is accepted when it is tested."""

    @property
    def hop_s(self) -> float:
        """To the draft, one way."""

    def recovered(self, num_guesses: int) -> float:
        """Probability that a wrong draft's next ``num_guesses`` guesses hold the target's token."""


@dataclass(slots=True, eq=False)
class Job:
    """One request in the cluster."""

    id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    lane: int = -1
    unread: int = 0
    """Tokens of the prompt that the target has not processed."""
    done: int = 0
    """Tokens committed."""
    first_s: float = math.nan
    end_s: float = math.nan
    known: int = 0
    """Tokens of it that the draft has processed."""
    depth: int = 0
    """Draft tokens verified in this round."""
    next_depth: int = 0
    """Draft tokens that are prepared for the next round."""
    guesses: tuple[int, ...] = ()
    """Outcomes prepared in this round, by the number of accepted tokens."""
    ready: int = 0
    """Length of the draft that was prepared for the outcome that came."""
    kind: str = ""
    """Of the outcome that something was prepared for, as in `StepReport.hits`; empty where nothing was."""

    @property
    def context(self) -> int:
        """Tokens in the target's KV cache."""
        return self.prompt_tokens - self.unread + self.done


@dataclass(slots=True)
class _Round:
    """What was decided for a round, and how long one such round takes."""

    decoding: list[Job]
    reading: list[tuple[Job, int]]
    """Prompts in prefill and the tokens of them that are processed."""
    asked_depth: int = 0
    num_asked: int = 0
    num_behind: int = 0
    """Requests that the draft has to catch up with first."""
    is_exposed: bool = False
    """The draft prepares for longer than the target verifies."""
    num_verified: int = 0
    num_context: int = 0
    """Tokens in the KV cache before the round."""
    waited_s: float = 0.0
    """For drafts, hops included."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


class _Kept(FixedDepth):
    """What the policy said last, for rounds in which it is not asked. Jobs have no text, so nothing is drafted from any."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.last_depths: dict[str, int] = {}
        self.usual_depth = 0
        """Of requests that have come since."""
        self.guesses: dict[int, tuple[int, ...]] = {}
        """By the length of the draft."""
        self.asked = 0
        self.patience = math.inf

    def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
        last, usual = self.last_depths, self.usual_depth
        return [max(min(last.get(request.request_id, usual), request.room), 0) for request in requests]

    def fan_out(self, request_id: str, draft_length: int, batch_size: int, now_s: float) -> tuple[int, ...]:
        if draft_length in self.guesses or not self.guesses:
            return self.guesses.get(draft_length, ())
        nearest = self.guesses[min(self.guesses, key=lambda length: abs(length - draft_length))]
        return (*nearest, *nearest[-1:] * draft_length)[: draft_length + 1]

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        return self.asked

    def patience_s(self, batch_size: int, num_expected: int, now_s: float) -> float:
        return self.patience


class Lane:
    """A router with its target and its share of the drafts. `begin` decides a round, `end` plays it, several times if told so.

    ``overlaps`` tells whether the draft can prepare beside the verify; whether it does is for the policy to say.
    """

    def __init__(
        self,
        index: int,
        pair: Pair,
        policy: DepthPolicy,
        random: Random,
        *,
        max_batch: int,
        prefill_tokens: int,
        overlaps: bool = False,
    ):
        self.index = index
        self.policy = policy
        self.overlaps = overlaps
        self.lanes_per_draft: float = 1.0
        """A draft merges what this many lanes ask; they are taken to ask alike. 0: no draft is there."""
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.num_tokens = 0
        """Committed since the lane started."""
        self.num_drafted = self.num_played = 0
        """Draft tokens verified, and rounds of single requests, since the lane started."""
        self.num_arrivals = 0
        """Since they were last reported."""
        self._pair = pair
        self._random = random
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._log_alpha = math.log(pair.alpha) if 0 < pair.alpha < 1 else 0.0
        # As in the script of an emulated pair: after a whole draft the likeliest guess is the draft's own next token.
        self._recovery = [pair.recovered(n) if n else 0.0 for n in range(MAX_FAN_OUT + 1)]
        self._bonus = [0.0] + [pair.alpha + (1 - pair.alpha) * self._recovery[n - 1] for n in range(1, MAX_FAN_OUT + 1)]
        self._reserved = 0
        self._prepared_s = -math.inf
        """When the draft is through with what it prepares."""
        self._preparing_s = 0.0
        """Its own time for that, which is reported with the round that uses it."""
        self._kept = _Kept()
        self._asking: DepthPolicy = policy
        """Who decides the round that was begun: the policy, or what it said last."""
        self._round: _Round | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self.running) + len(self.waiting)

    @property
    def is_steady(self) -> bool:
        """Whether rounds just like the one that was begun can follow.

        Nobody waits, no prompt is read, the draft catches up with nobody and is through before the target is.
        """
        current = self._round
        return current is not None and not (self.waiting or current.reading or current.num_behind or current.is_exposed)

    @property
    def mean_depth(self) -> float:
        """Over the decoding requests of the round that was begun."""
        decoding = self._round.decoding if self._round is not None else []
        return sum(job.depth for job in decoding) / len(decoding) if decoding else 0.0

    def add(self, job: Job) -> None:
        """Queue a request."""
        job.lane = self.index
        self.waiting.append(job)
        self.num_arrivals += 1

    # --- a round begins -----------------------------------------------------------------------------------------------------

    def begin(self, now_s: float, *, asks: bool = True) -> float:
        """Decide a round; returns how long it takes, in seconds. Something must be running or waiting.

        Without ``asks`` the policy is not asked: what it said last holds on.
        """
        self._asking = self.policy if asks else self._kept
        self._admit()
        reading = self._reading()
        current = self._round = _Round([job for job in self.running if not job.unread], reading)
        if self.lanes_per_draft:
            self._choose_drafts(current, now_s)
        else:
            for job in current.decoding:
                job.depth, job.next_depth, job.ready, job.kind = 0, 0, 0, ""
        current.num_verified = sum(1 + job.depth for job in current.decoding) + sum(chunk for _, chunk in reading)
        context = sum(job.context for job in self.running) + current.num_verified
        current.verify_s = self._pair.target.step_s(current.num_verified, context)
        current.num_context = context - current.num_verified
        if self.overlaps and self.lanes_per_draft:
            self._prepare(current, now_s)
        return current.waited_s + current.verify_s

    def _admit(self) -> None:
        """A request reserves room for its whole length, so nobody is ever preempted; one is let in however long it is."""
        while self.waiting and len(self.running) < self._max_batch:
            needed = self.waiting[0].prompt_tokens + self.waiting[0].output_tokens
            if self.running and self._reserved + needed > self._pair.target.kv_capacity_tokens:
                return
            self._reserved += needed
            self.running.append(self.waiting.popleft())

    def _reading(self) -> list[tuple[Job, int]]:
        budget, reading = self._prefill_tokens, []
        for job in self.running:
            if job.unread and budget:
                chunk = min(job.unread, budget)
                budget -= chunk
                reading.append((job, chunk))
        return reading

    def _choose_drafts(self, current: _Round, now_s: float) -> None:
        """As `engine.drafting.gather_drafts`: what was prepared is taken, for the rest the draft is asked, or not."""
        decoding = current.decoding
        batch, speculating = len(decoding), []
        asked = [DepthRequest(job.id, job.output_tokens - job.done - 1, job.done) for job in decoding]
        wanted = self._asking.depths(asked, batch, now_s) if asked else []
        depths: Mapping[str, int] = {job.id: depth for job, depth in zip(decoding, wanted, strict=True)}
        if asked and current.reading:
            depths = self._asking.trim(depths, sum(chunk for _, chunk in current.reading), batch, now_s)
        for job, depth, (_, room, _) in zip(decoding, wanted, asked, strict=True):
            job.depth = depths[job.id]
            job.next_depth = max(min(depth, room - 1), 0)
            if job.depth:
                speculating.append(job)
            else:
                job.ready, job.kind = 0, ""
        if self._asking is self.policy:
            self._kept.last_depths = {job.id: depth for job, depth in zip(decoding, wanted, strict=True)}
            self._kept.usual_depth = round(sum(wanted) / batch) if batch else self._kept.usual_depth
        near = []
        for job in self._take_prepared(current, speculating, now_s):
            # A request behind takes a plain step while the draft reads on beside it.
            if self._is_urgent(current):
                job.depth = 0
            elif self.overlaps and job.context - job.known > CATCH_UP_SYNC:
                job.depth = 0
                current.num_behind += 1
            else:
                near.append(job)
        if near:
            self._ask(current, near, now_s)

    def _take_prepared(self, current: _Round, speculating: list[Job], now_s: float) -> list[Job]:
        """Returns the requests for which nothing is there."""
        if self._prepared_s <= now_s:
            current.draft_s, self._preparing_s = self._preparing_s, 0.0
        expected = [job for job in speculating if job.kind]
        late_s = self._prepared_s - now_s
        is_late = False
        if expected and late_s > 0:
            patience_s = self._asking.patience_s(len(current.decoding), len(expected), now_s)
            self._kept.patience = patience_s
            patience_s = 0.0 if self._is_urgent(current) else patience_s
            is_late = late_s > patience_s
            current.waited_s = min(late_s, patience_s)
            if not is_late:
                current.draft_s, self._preparing_s = self._preparing_s, 0.0
        missed = []
        for job in speculating:
            if job.kind and is_late:
                current.misses["late"] += 1
            elif job.kind:
                (current.hits if job.ready else current.misses)[job.kind] += 1
            if job.ready and not is_late:
                job.depth = min(job.depth, job.ready)
            else:
                missed.append(job)
            job.ready, job.kind = 0, ""
        return missed

    def _is_urgent(self, current: _Round) -> bool:
        """Some prompt comes to its end, and the policy lets its first token wait for no draft."""
        return self.policy.spares_first_tokens and any(job.unread == chunk for job, chunk in current.reading)

    def _ask(self, current: _Round, near: list[Job], now_s: float) -> None:
        deepest = self._kept.asked = self._asking.asked_depth(
            [(job.id, job.depth) for job in near], len(current.decoding), now_s
        )
        if self._is_busy(current, now_s):
            deepest = 0
        for job in near:
            job.depth = min(job.depth, deepest)
        if deepest <= 0:
            return
        current.asked_depth, current.num_asked = deepest, len(near)
        seconds = self._forward_s(sum(job.context - job.known for job in near), sum(job.context for job in near))
        for step in range(1, max(job.depth for job in near)):
            rows = [job.context + step for job in near if job.depth > step]
            seconds += self._forward_s(len(rows), sum(rows))
        for job in near:
            job.known = job.context
        current.draft_s += seconds
        current.waited_s += seconds + 2 * self._pair.hop_s

    def _is_busy(self, current: _Round, now_s: float) -> bool:
        """Whether the draft still owes an answer: then it is asked for nothing (`deployments.draft_pool`)."""
        return self._prepared_s > now_s + current.waited_s

    def _forward_s(self, num_rows: float, context: float) -> float:
        """A step of the draft, which other lanes share."""
        share = self.lanes_per_draft
        return self._pair.draft.step_s(max(round(num_rows * share), 1), round(context * share)) if num_rows else 0.0

    def _prepare(self, current: _Round, now_s: float) -> None:
        """Beside the verify the draft reads what is verified and extends the outcomes that are guessed."""
        if self._is_busy(current, now_s):
            return
        batch, first, rows, context, deepest = len(current.decoding), 0, 0, 0, 0
        for job in current.decoding:
            job.guesses = self._asking.fan_out(job.id, job.depth, batch, now_s) if job.next_depth else ()
            lacking = job.context - job.known
            if any(job.guesses):
                self._kept.guesses[job.depth] = job.guesses
                count = sum(job.guesses)
                rows, context, deepest = rows + count, context + count * job.context, max(deepest, job.next_depth)
                first += lacking + job.depth
            elif job.next_depth and lacking > CATCH_UP_SYNC:
                first += lacking
            else:
                continue
            job.known = job.context
        if not first:
            return
        seconds = self._forward_s(first, sum(job.context for job in current.decoding))
        seconds += deepest * self._forward_s(rows, context)
        self._preparing_s = seconds
        self._prepared_s = now_s + current.waited_s + seconds + 2 * self._pair.hop_s
        current.is_exposed = seconds + 2 * self._pair.hop_s > current.verify_s

    # --- a round ends -------------------------------------------------------------------------------------------------------

    def end(self, started_s: float, round_s: float, num_rounds: int) -> list[Job]:
        """Play the round that was begun ``num_rounds`` times, ``round_s`` each; returns the requests that ended.

        The policy hears of the first of these rounds only.
        """
        current = self._round
        if current is None:
            raise ValueError("a round must be begun before it can end")
        tokens_before, num_drafted, num_accepted = self.num_tokens, 0, 0
        for job in current.decoding:
            accepted, num_played = self._play(job, num_rounds, current.asked_depth)
            job.end_s = started_s + num_played * round_s
            if job.depth:
                num_drafted, num_accepted = num_drafted + job.depth, num_accepted + accepted
                self._asking.observe(job.id, job.depth, accepted)
        for job, chunk in current.reading:
            job.unread -= chunk
            if not job.unread:
                job.done, job.first_s, job.end_s = 1, started_s + round_s, started_s + round_s
                self.num_tokens += 1
        ended = self._leave()
        if self._asking is self.policy and not isinstance(self.policy, FixedDepth):
            report = self._report(current, self.num_tokens - tokens_before, num_drafted, num_accepted, len(ended))
            self.policy.report(report, started_s + num_rounds * round_s)
        self._round = None
        return ended

    def _play(self, job: Job, num_rounds: int, asked_depth: int) -> tuple[int, int]:
        """Returns (draft tokens accepted in the first of the rounds, rounds until the request's end)."""
        done_before, depth, first, played = job.done, job.depth, 0, 0
        while True:
            played += 1
            self.num_drafted += depth
            accepted = self._accepted(depth)
            first = accepted if played == 1 else first
            if job.guesses:
                job.known = job.context
                self._foresee(job, depth, accepted)
            elif depth:
                job.known = job.context + min(accepted, depth - 1)
            job.done += accepted + 1
            room = job.output_tokens - job.done - 1
            if played == num_rounds or room < 0:
                break
            wanted = (job.ready or asked_depth) if job.guesses else job.depth
            depth = min(wanted, room)
        job.guesses = ()
        self.num_tokens += job.done - done_before
        self.num_played += played
        return first, played

    def _accepted(self, depth: int) -> int:
        """How many of ``depth`` draft tokens are accepted: each with the same probability, up to the first that is not."""
        if depth <= 0:
            return 0
        if self._log_alpha == 0.0:
            return depth if self._pair.alpha else 0
        return min(int(math.log(1.0 - self._random.random()) / self._log_alpha), depth)

    def _foresee(self, job: Job, depth: int, accepted: int) -> None:
        """Whether the outcome was among those that were prepared."""
        guesses = self._kept.guesses.get(depth, job.guesses)
        count = guesses[accepted] if accepted < len(guesses) else 0
        job.kind = "recovery" if accepted < depth else "bonus" if depth else "plain"
        chance = (self._recovery if accepted < depth else self._bonus)[min(count, MAX_FAN_OUT)]
        job.ready = job.next_depth if self._random.random() < chance else 0

    def _leave(self) -> list[Job]:
        ended = [job for job in self.running if job.done >= job.output_tokens]
        for job in ended:
            self.running.remove(job)
            self._reserved -= job.prompt_tokens + job.output_tokens
            self.policy.finished(job.id)
        return ended

    def _report(self, current: _Round, committed: int, drafted: int, accepted: int, finished: int) -> StepReport:
        """Of the first of the rounds; without counts by position, which no policy reads."""
        return StepReport(
            round_id=0,
            batch_size=len(current.decoding),
            num_waiting=len(self.waiting),
            num_target_tokens=current.num_verified,
            num_prefill_tokens=sum(chunk for _, chunk in current.reading),
            num_committed=committed,
            num_drafted=drafted,
            num_accepted=accepted,
            num_context_tokens=current.num_context,
            depths=tuple(job.depth for job in current.decoding),
            verify_time_s=current.verify_s,
            draft_time_s=current.draft_s,
            exposed_time_s=current.waited_s,
            hits=dict(current.hits),
            misses=dict(current.misses),
            num_asked=current.num_asked,
            num_finished=finished,
        )

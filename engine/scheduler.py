"""Who takes part in the next round, with which tokens and how deep. Plain bookkeeping: no torch, no I/O, no clock."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import Overloaded
from engine.propose.beside import TextBeside
from engine.propose.from_text import NO_TEXT, TextDraft
from engine.propose.outcomes import OutcomeCache
from engine.request import Event, Request, State
from engine.types import DepthRequest, ModelInfo, StepReport, TextChoice, TextOffer


class DepthPolicy(Protocol):
    """Decides how deep a request speculates. `autoscale.lane_policy.LanePolicy` follows the load; `FixedDepth` does not."""

    @property
    def overlaps(self) -> bool:
        """Whether a source that can work while the target verifies is to: not if it needs the target's own cores for it."""

    def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
        """Depths for the coming round, each from 0 to the request's ``room``; ``batch_size`` requests decode.

        Asked too for prompts whose drafts may be prepared beside them.
        """

    def trim(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """How much of the chosen ``depths`` (by request) to verify in a round that also processes so many prompt tokens."""

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        """What to do with what the text itself offers to draft; asked before `depths`, for all requests that decode.

        ``has_model``: the model can be asked too. Whatever this looks at must be known before the model draws a draft: see
        `autoscale.choice`.
        """

    def trim_texts(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """As `trim`, of what `text_choices` said to verify of the texts; asked before the model's `depths`."""

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        """How much of what the text offers after the model's drafts to verify after them: offers, each with the length of the
        draft that it would go on. The round's forward has so many tokens of prompts and of drafts already.

        It may look at all offers, but not at what the target would say; no draft is shortened or replaced for it.
        """

    def observe_text(self, request_id: str, offer: TextDraft, kept: int, tested: int) -> None:
        """Tell how an offer compared with what was committed, used or not: ``kept`` of the first ``tested`` tokens agree."""

    def fan_out(self, request_id: str, draft_length: int, batch_size: int, now_s: float) -> tuple[int, ...]:
        """How many next tokens to prepare for after 0, 1, ..., ``draft_length`` accepted ones; () = prepare nothing."""

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        """Of requests without a prepared draft (id, planned depth): how deep to ask for drafts and wait; 0 = not at all."""

    def patience_s(self, batch_size: int, num_expected: int, now_s: float) -> float:
        """How long to wait for ``num_expected`` prepared drafts that have not come when a round begins."""

    @property
    def spares_first_tokens(self) -> bool:
        """Whether a round that makes some request's first token waits for no draft: others' drafts would delay it."""

    def observe(self, request_id: str, drafted: int, accepted: int, *, reached: bool = True) -> None:
        """Tell how the model's draft of this request fared. ``reached`` false: it followed tokens of the text that were not all
        kept, so none of its own was tested.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request."""

    def report(self, report: StepReport, now_s: float) -> None:
        """Learn from a finished round."""

    def look_ahead(self, batch_size: int) -> None:
        """Called while the target verifies, if there is time: what can be computed now for the next round."""


class FixedDepth:
    """The same for everybody: for tests and measurements.

    ``fan_out``: next tokens to prepare for after every number of accepted ones, 0 = sequential rounds. ``asks``: whether a
    round asks for drafts that were not prepared.
    """

    overlaps = True

    def __init__(self, depth: int, fan_out: int = 0, asks: bool = True):
        self._depth = depth
        self._fan_out = fan_out
        self._asks = asks

    def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
        """As many of the fixed number as there is room for."""
        return [min(self.choose(request.request_id), request.room) for request in requests]

    def choose(self, request_id: str) -> int:
        """The depth of one request in this round, if it has room; for policies that are only as simple as this one."""
        return self._depth

    def trim(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """All of it."""
        return depths

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        """What was found in the text is used, as many tokens of it as are drafted at all."""
        depths = (min(self.choose(offer.request.request_id), offer.length) for offer in offers)
        return [TextChoice(depth, depth > 0) for depth in depths]

    def trim_texts(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """All of it."""
        return depths

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        """Nothing: a draft is as deep as was fixed."""
        return [0] * len(offers)

    def observe_text(self, request_id: str, offer: TextDraft, kept: int, tested: int) -> None:
        """Nothing to learn."""

    def fan_out(self, request_id: str, draft_length: int, batch_size: int, now_s: float) -> tuple[int, ...]:
        """The fixed number everywhere."""
        return (self._fan_out,) * (draft_length + 1) if self._fan_out else ()

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        """As deep as planned, or nothing."""
        return max(depth for _, depth in missed) if self._asks else 0

    def patience_s(self, batch_size: int, num_expected: int, now_s: float) -> float:
        """A round does not wait for what may yet come."""
        return 0.0

    spares_first_tokens = False
    """The depth is the same in every round."""

    def observe(self, request_id: str, drafted: int, accepted: int, *, reached: bool = True) -> None:
        """Nothing to learn."""

    def finished(self, request_id: str) -> None:
        """Nothing to forget."""

    def report(self, report: StepReport, now_s: float) -> None:
        """Nothing to learn."""

    def look_ahead(self, batch_size: int) -> None:
        """Nothing to compute."""


@dataclass(slots=True)
class Planned:
    """One request's part in a round: its tokens [start, end) go to the target, with up to ``depth`` draft tokens after them."""

    request: Request
    start: int
    end: int
    depth: int = 0
    next_depth: int = 0
    """Draft tokens to prepare for the round after this one."""
    miss_reason: str | None = None
    """Why the source prepared no draft although it was to."""
    text: TextDraft = NO_TEXT
    """What the text itself offers, beside a model."""
    text_depth: int = 0
    """Tokens of it that are verified where the model has drafted nothing."""
    text_first: bool = False
    """Then the model's draft of this round is not looked at, unless it goes on after the text's tokens."""
    extended: int = 0
    """Tokens of the text after which the model is asked for ``depth`` more; 0 = its draft is one of its own."""

    @property
    def ahead(self) -> tuple[int, ...]:
        """The tokens of the text that the model is to go on after."""
        return self.text.tokens[: self.extended]

    @property
    def most_drafted(self) -> int:
        """Tokens of the longest draft that the request may get in this round."""
        return max(self.text_depth, self.extended + self.depth)

    def drop_hybrid(self) -> None:
        """The text's own draft is left."""
        self.depth = self.extended = 0

    @property
    def sample(self) -> bool:
        """Whether the target has seen all committed tokens after this, so that it can commit the next, if one is wanted."""
        return self.end == len(self.request.ids) and self.request.params.max_tokens > 0


@dataclass(slots=True)
class Plan:
    """A round before it is played."""

    items: list[Planned] = field(default_factory=list)
    num_preempted: int = 0
    spare_blocks: int = 0
    """Of the KV cache, beyond what the requests and their drafts take."""

    @property
    def makes_first_tokens(self) -> bool:
        """Whether some request comes to the end of its prompt."""
        return any(item.sample and item.request.state is not State.DECODING for item in self.items)

    @property
    def num_prompt_tokens(self) -> int:
        """Of the requests that do not decode yet."""
        return sum(item.end - item.start for item in self.items if item.request.state is not State.DECODING)

    @property
    def batch_size(self) -> int:
        """Requests that decode; where none does yet, those that will after this round."""
        decoding = sum(item.request.state is State.DECODING for item in self.items)
        return decoding or sum(item.sample for item in self.items)


class Scheduler:
    """The request table of one lane.

    Every running request takes part in every round (lock-step); prompts are prefilled in chunks beside the decoding requests,
    so that a long prompt never stalls running streams. KV blocks are counted here, so the target is never asked for more than
    it has: under pressure first drafts are given up, then the youngest request is preempted and prefilled again later.
    """

    def __init__(
        self,
        info: ModelInfo,
        policy: DepthPolicy,
        *,
        max_batch: int,
        prefill_tokens: int,
        max_waiting: int,
        text: TextBeside | None = None,
    ):
        """``text``: a source of drafts beside the one that rounds ask."""
        self.info = info
        self.eos_token_ids = frozenset(info.eos_token_ids)
        self.policy = policy
        self.text = text
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.target_released: list[str] = []
        """Sequences that the target may forget; the next round tells it."""
        self.draft_released: list[str] = []
        """Sequences that the draft may forget; told with other messages, never on its own, until one of them is answered."""
        self.outcomes = OutcomeCache(info.vocab_size)
        """What the draft prepared."""
        self._queue_times_s: list[float] = []
        self._told: tuple[int, tuple[str, ...]] = (0, ())
        self._num_blocks = info.kv_capacity_tokens // info.kv_block_size
        self._ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a round would do anything."""
        return bool(self.running or self.waiting or self.target_released)

    @property
    def kv_used_tokens(self) -> int:
        """Tokens of KV cache that the running requests take, in whole blocks, with room for one more token of each."""
        return self._used_blocks() * self.info.kv_block_size

    def take_queue_times(self) -> tuple[float, ...]:
        """Seconds that each request waited which was admitted for the first time since the last call."""
        times, self._queue_times_s = self._queue_times_s, []
        return tuple(times)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `Overloaded` when the queue is full, ValueError when the id is already in use."""
        if request.id in self._ids:
            raise ValueError(f"request id {request.id} is already in use")
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already (api.max_waiting); try again later")
        self._ids.add(request.id)
        if request.id in self.draft_released:  # a new text under an old name: opening it is what makes the draft forget
            self.draft_released.remove(request.id)
            request.draft_opened = True
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def remove(self, request: Request, event: Event) -> None:
        """End a live request by FINISH, CANCEL or FAIL."""
        request.apply(event)
        if request in self.running:
            self.running.remove(request)
            self.target_released.append(request.id)
        else:
            self.waiting.remove(request)
        if request.draft_opened:
            self.draft_released.append(request.id)
        if self.text is not None:
            self.text.release((request.id,))
        self.outcomes.forget(request.id)
        self._ids.discard(request.id)
        self.policy.finished(request.id)

    def forget_target(self) -> None:
        """The target lost everything (it died and came back): whoever is running prefills again from its ids."""
        for request in self.running:
            request.apply(Event.LOSE_CACHE)
            request.target_length = 0
        self.target_released.clear()

    def forget_draft(self, request_ids: Collection[str] | None = None) -> None:
        """Another draft answers from now on, for these requests or for all: nothing it holds is known.

        Drafts that have been prepared stay good, whoever made them.
        """
        for request in (*self.running, *self.waiting):
            if request_ids is None or request.id in request_ids:
                request.draft_length = 0
                request.draft_opened = False
        self.draft_was_told(self.draft_released if request_ids is None else request_ids)
        self.outcomes.lose_answers(request_ids)

    def tell_draft(self, round_id: int) -> tuple[str, ...]:
        """What a message that is answered later tells the draft to forget."""
        self._told = round_id, tuple(self.draft_released)
        return self._told[1]

    def draft_has_answered(self, round_id: int) -> None:
        """The answer to such a message came."""
        if round_id == self._told[0]:
            self.draft_was_told(self._told[1])

    def draft_was_told(self, released: Collection[str]) -> None:
        """The draft has forgotten these."""
        if released:
            gone = frozenset(released)
            self.draft_released[:] = [request_id for request_id in self.draft_released if request_id not in gone]

    def depth_request(self, request: Request, drafted: int) -> DepthRequest:
        """A request that decodes, as the policy sees it after a draft of so many tokens."""
        return DepthRequest(request.id, max(self.room(request) - drafted, 0), request.num_output)

    def plan(self, now_s: float, *, drafts: bool, prepares: bool = False, extends: bool = False) -> Plan:
        """Choose the next round. ``drafts`` false: no source of drafts can be asked now, so all there is comes from the text.

        With ``prepares`` the source can work on the round after it meanwhile, with ``extends`` go on after the text's tokens.
        """
        plan = Plan()
        self._make_room(plan)
        self._admit(now_s)
        budget = self.prefill_tokens
        for request in self.running:
            if request.state is State.DECODING:
                plan.items.append(Planned(request, request.target_length, len(request.ids)))
            elif budget > 0:
                chunk = min(request.num_pending, budget)
                budget -= chunk
                plan.items.append(Planned(request, request.target_length, request.target_length + chunk))
        if self.text is not None:
            self._choose_texts(self.text, plan, now_s, drafts=drafts, extends=drafts and extends)
        if drafts:
            self._choose_depths(plan, now_s, prepares)
        self._fit_to_blocks(plan)
        return plan

    def room(self, request: Request) -> int:
        """Most draft tokens that can be of use: the bonus token must still fit into max_tokens and the context."""
        left = min(request.params.max_tokens - request.num_output, self.info.max_context - len(request.ids)) - 1
        for bound in (request.params.max_depth, self.info.max_draft_depth):
            left = left if bound is None else min(left, bound)
        return max(left, 0)

    def _choose_depths(self, plan: Plan, now_s: float, prepares: bool) -> None:
        """Depths of the requests that decode; with ``prepares`` also how deep those that are still prefilled are going to
        speculate: the draft may read their prompts meanwhile.
        """
        items = [item for item in plan.items if prepares or item.request.state is State.DECODING]
        if not items:
            return
        asked = [self._depth_request(item) for item in items]
        wanted = self.policy.depths(asked, max(plan.batch_size, 1), now_s)
        depths = self._trimmed(plan, dict(zip((item.request.id for item in items), wanted, strict=True)), now_s)
        for item, request, depth in zip(items, asked, wanted, strict=True):
            if item.request.state is not State.DECODING:
                item.next_depth = depth
                continue
            item.next_depth = max(min(depth, request.room - 1), 0)  # the round makes one token at least
            item.depth = self._depth(item, depths[request.request_id])

    def _depth(self, item: Planned, depth: int) -> int:
        """Tokens that the model is asked for; a hybrid without any is none."""
        if item.extended:
            depth = min(depth, self.room(item.request) - item.extended)
        elif item.text_first:
            depth = 0
        if depth <= 0:
            item.extended = 0
        return max(depth, 0)

    def _choose_texts(self, text: TextBeside, plan: Plan, now_s: float, *, drafts: bool, extends: bool) -> None:
        """Look up what the texts offer, before anything of the model's is looked at; read on in prompts."""
        decoding = [item for item in plan.items if item.request.state is State.DECODING]
        for item in plan.items:
            if item.request.state is not State.DECODING:
                text.read(item.request, item.end)
        if not decoding:
            return
        offers = []
        for item in decoding:
            item.text = text.draft(item.request, self.room(item.request))
            tokens, match, share = item.text
            extendable = self.num_before_end(item.request, item.text.tokens) if extends else 0
            unread = _num_unread(item.request)
            offers.append(TextOffer(self._depth_request(item), len(tokens), match, share, unread, extendable))
        choices = self.policy.text_choices(offers, len(decoding), now_s, has_model=drafts)
        for item, offer, choice in zip(decoding, offers, choices, strict=True):
            item.text_depth, item.text_first = choice.depth, choice.is_first
            item.extended = min(choice.extended, offer.extendable)
        self._trim_texts(plan, decoding, now_s)

    def _trim_texts(self, plan: Plan, decoding: Sequence[Planned], now_s: float) -> None:
        """What of the texts is verified beside the prompts of this round. A hybrid that begins with more goes with the rest."""
        if plan.num_prompt_tokens == 0:
            return
        depths = {item.request.id: item.text_depth for item in decoding}
        trimmed = self.policy.trim_texts(depths, plan.num_prompt_tokens, plan.batch_size, now_s)
        for item in decoding:
            item.text_depth = trimmed[item.request.id]
            if item.extended > item.text_depth:
                item.extended = 0

    def num_before_end(self, request: Request, tokens: tuple[int, ...]) -> int:
        """Leading tokens of a draft before the first that ends the answer: nothing follows that one."""
        ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else self.eos_token_ids)}
        return next((place for place, token in enumerate(tokens) if token in ends), len(tokens))

    def _fit_to_blocks(self, plan: Plan) -> None:
        """Cut the drafts that the KV cache has no blocks for. Whichever draft a request gets, the longer one fits."""
        spare = self._num_blocks - self._used_blocks()
        for item in plan.items:
            depth, held = item.most_drafted, self._blocks(len(item.request.ids) + 1)
            while depth and self._blocks(len(item.request.ids) + 1 + depth) - held > spare:
                depth -= 1
            spare -= self._blocks(len(item.request.ids) + 1 + depth) - held
            item.text_depth = min(item.text_depth, depth)
            item.depth = min(item.depth, depth - item.extended)
            if item.extended and item.depth <= 0:
                item.drop_hybrid()
        plan.spare_blocks = spare

    def fit_tail(self, plan: Plan, item: Planned, drafted: int, tail: int) -> int:
        """How many of ``tail`` more tokens the KV cache has blocks for after a draft; those are taken from the spare ones."""
        held = self._blocks(len(item.request.ids) + 1 + max(item.most_drafted, drafted))
        while tail and self._blocks(len(item.request.ids) + 1 + drafted + tail) - held > plan.spare_blocks:
            tail -= 1
        plan.spare_blocks -= max(self._blocks(len(item.request.ids) + 1 + drafted + tail) - held, 0)
        return tail

    def _depth_request(self, item: Planned) -> DepthRequest:
        return DepthRequest(item.request.id, self._room_of(item), item.request.num_output)

    def _trimmed(self, plan: Plan, wanted: dict[str, int], now_s: float) -> Mapping[str, int]:
        """What of it is verified beside the prompts of this round. The next round may have none, so it is prepared in full."""
        decoding = [item for item in plan.items if item.request.state is State.DECODING]
        if plan.num_prompt_tokens == 0 or not decoding:
            return wanted
        depths = {item.request.id: self._depth(item, wanted[item.request.id]) for item in decoding}
        return self.policy.trim(depths, plan.num_prompt_tokens, plan.batch_size, now_s)

    def _room_of(self, item: Planned) -> int:
        """In this round, or, for a prompt, in the first one after it has a token."""
        room = self.room(item.request)
        return room if item.request.state is State.DECODING else max(room - 1, 0)

    def _make_room(self, plan: Plan) -> None:
        """Preempt from the youngest until the others fit with one more token each."""
        while self._used_blocks() > self._num_blocks:
            youngest = self.running.pop()
            youngest.apply(Event.PREEMPT)
            youngest.apply(Event.REQUEUE)
            youngest.target_length = 0
            self.target_released.append(youngest.id)
            self.waiting.appendleft(youngest)
            plan.num_preempted += 1

    def _admit(self, now_s: float) -> None:
        used = self._used_blocks()
        while self.waiting and len(self.running) < self.max_batch:
            needed = self._blocks(len(self.waiting[0].ids) + 1)
            # A released sequence keeps its blocks until the target hears of it, which happens before the round's own items.
            if used + needed > self._num_blocks:
                return
            used += needed
            request = self.waiting.popleft()
            request.apply(Event.ADMIT)
            self.running.append(request)
            if not request.was_admitted:
                request.was_admitted = True
                self._queue_times_s.append(now_s - request.arrived_s)

    def _used_blocks(self) -> int:
        """With room for one more token of every running request."""
        return sum(self._blocks(len(request.ids) + 1) for request in self.running)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.info.kv_block_size)


def _num_unread(request: Request) -> int:
    """Committed tokens that a draft which has begun to read the request has not read."""
    return len(request.ids) - request.draft_length if request.draft_length else 0

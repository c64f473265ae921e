"""The invariance matrix: the same requests under every draft, depth, batching and fault must say what the target says alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from deployments.lossless.play import (
    NO_LIMITS,
    ChosenDepth,
    CrashingSource,
    Limits,
    Played,
    RandomSource,
    ReplaySource,
    Text,
    play,
    play_alone,
    random_depth,
)
from deployments.lossless.reference import LogitsOf, near_tie_margin
from engine.errors import OutriderError
from engine.propose.base import DraftSource, can_prepare
from engine.propose.from_text import TextSource
from engine.propose.ngram import NgramSource
from engine.propose.suffix import SuffixSource
from engine.scheduler import DepthPolicy, FixedDepth
from engine.types import GenerateRequest, ModelInfo, SamplingParams
from engine.verify.base import TargetModel

QUICK_DEPTHS = (1, 3, 8, 20)
ALL_DEPTHS = tuple(range(1, 21))
"""0 is the plain batch."""
IDLE = {
    "draft": "the draft never made a token",
    "accept": "no draft token was ever accepted",
    "fail": "no draft failed",
    "preempt": "nobody was preempted",
    "cache": "no prefix was found in the cache",
    "hit": "no draft had been prepared for what the target said",
}
MUST = {"half-right": ("accept",), "random": ("draft",), "crashing": ("fail",)}
FULL_TURNS = 5
"""Batches in which a draft that is not the user's own meets all depths, each with other requests."""
ERROR_RATE = 0.2
SHARED_TOKENS = 1 << 16
"""Requests of the matrix end at different times, so that later ones are drafted from the texts of others."""
PARAMETERS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "T=0.8, top_p=0.9, penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
    "top_k=40, min_p=0.02, min_tokens": {"top_k": 40, "min_p": 0.02, "ignore_eos": False},
}
"""All under the rules whose text does not depend on the draft."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a request said something else than the target alone."""

    arm: str
    request: str
    position: int
    """Output tokens before it."""
    expected: int | None
    got: int | None
    what: str
    """token | logprob | end"""
    margin: float | None = None
    """Between the two tokens at this place, in units of a logit; None where nothing about tokens differs."""
    tolerated: bool = False


@dataclass(slots=True)
class Arm:
    """One way to play all requests."""

    name: str
    play: Callable[[], Played]
    must: tuple[str, ...] = ()
    """Keys of `IDLE`: what has to happen, or the arm has checked nothing."""
    num_requests: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    num_hits: int = 0
    keeps_prefixes: bool = False
    """Whether the target may still know prompts from the arm before; otherwise it computes everything anew."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def idle(self) -> str | None:
        """Why this arm has tested nothing of what it is for."""
        happened = {
            "draft": self.num_drafted,
            "accept": self.num_accepted,
            "fail": len(self.fallbacks),
            "preempt": self.num_preempted,
            "cache": self.num_cached,
            "hit": self.num_hits,
        }
        return next((IDLE[one] for one in self.must if not happened[one]), None)


class Matrix:
    """Requests, what the target says to each of them alone, and the arms."""

    def __init__(
        self,
        target: TargetModel,
        source: DraftSource | None,
        requests: Sequence[GenerateRequest],
        logits_of: LogitsOf,
        *,
        exact: bool,
        tolerance: float,
        forget_prefixes: Callable[[], None] | None = None,
    ):
        """``source``: the configured draft; ``exact``: ids and logprobs must be the same bits, whatever ``tolerance`` says.

        ``forget_prefixes`` empties the target's prefix cache; None: it has none.
        """
        self.target = target
        self.source = source
        self.requests = list(requests)
        self.exact = exact
        self.tolerance = tolerance
        self._logits_of = logits_of
        self._forget_prefixes = forget_prefixes
        self._by_id = {request.request_id: request for request in self.requests}
        self.texts: dict[str, Text] = {}

    def play_reference(self) -> None:
        """Raises `OutriderError` when the target cannot even answer alone."""
        self.texts = play_alone(self.target, self.requests)
        for name, text in self.texts.items():
            if text.error is not None:
                raise OutriderError(f"{name}: the target fails without any draft: {text.error}")

    def arms(self, *, quick: bool) -> Iterator[Arm]:
        """Every draft at every depth, then other batches, chunks, faults. After `play_reference`."""
        yield self._arm("no draft, one batch", None, FixedDepth(0))
        if self._forget_prefixes is not None:
            must = ("cache",) if self._fills_a_block else ()
            warm = self._arm("prompts from the prefix cache", self._half_right(), random_depth(4), must=must)
            warm.keeps_prefixes = True
            yield warm
        for source, make in self._sources().items():
            is_own = source == _model_name(self.source)
            must = MUST.get(source, ("draft",) if is_own else ())
            for label, policy in self._depths(quick, own=is_own):
                yield self._arm(f"{source} draft, {label}", make(), policy, must=must)
            yield self._arm(f"{source} draft, a random K each round", make(), random_depth(5), must=must)
        beside = "text beside a draft, a random K each round"
        yield self._arm(beside, self._chosen(), random_depth(12, fan_out=2), must=("draft",), text=NgramSource())
        yield from self._prepared_arms(quick)
        half_right, chosen = self._half_right, self._chosen
        alone = half_right if quick else chosen
        yield self._arm("each request alone, random K", alone(), random_depth(6), Limits(max_batch=1))
        yield self._arm("chunked prefill, batches of 3", chosen(), random_depth(7), Limits(max_batch=3, prefill_tokens=7))
        tight = Limits(kv_capacity_tokens=self._tight_capacity())
        yield self._arm("preempted and resumed", half_right(), random_depth(8), tight, must=("preempt",))
        yield Arm("moved to another lane halfway", lambda: self._migrate(chosen(), random_depth(9)))

    def _prepared_arms(self, quick: bool) -> Iterator[Arm]:
        """The configured draft works while the target verifies, if it can."""
        if self.source is None or not can_prepare(self.source):
            return
        name, crashing = self.source.name, CrashingSource(self.source, self.target.info.vocab_size)
        for fan_out in (2,) if quick else (1, 2, 4):
            label = f"{name} draft prepared for {fan_out} next tokens"
            yield self._arm(f"{label}, K=4", self.source, FixedDepth(4, fan_out), must=("hit",))
            yield self._arm(f"{label}, a random K each round", self.source, random_depth(10, 8, fan_out), must=("hit",))
        yield self._arm("crashing draft prepared for 2 next tokens", crashing, random_depth(11, 8, 2), must=("hit", "fail"))

    def control(self) -> Arm:
        """The same requests with other seeds: the comparison must notice."""
        others = [replace(r, params=replace(r.params, seed=r.params.seed ^ 1)) for r in self.requests if not r.params.greedy]
        return Arm("control: other seeds", lambda: play(self.target, None, others, FixedDepth(0)))

    def run(self, arm: Arm) -> None:
        """Play an arm and compare."""
        if self._forget_prefixes is not None and not arm.keeps_prefixes:
            self._forget_prefixes()
        played = arm.play()
        arm.num_drafted, arm.num_accepted = played.num_drafted, played.accepted.total()
        arm.num_preempted, arm.num_cached, arm.fallbacks = played.num_preempted, played.num_cached, played.fallbacks
        arm.num_hits = played.num_hits
        for name, text in played.texts.items():
            difference = self._first_difference(arm.name, name, text)
            arm.num_requests += 1
            arm.num_tokens += len(text.ids) if difference is None else difference.position
            if difference is not None:
                arm.divergences.append(difference)

    # --- arms ---------------------------------------------------------------------------------------------------------------

    def _arm(
        self,
        name: str,
        source: DraftSource | None,
        policy: DepthPolicy,
        limits: Limits = NO_LIMITS,
        must: tuple[str, ...] = (),
        text: TextSource | None = None,
    ) -> Arm:
        return Arm(name, lambda: play(self.target, source, self.requests, policy, limits, text), must)

    @property
    def _fills_a_block(self) -> bool:
        return max(len(r.prompt_ids) for r in self.requests) > self.target.info.kv_block_size

    def _sources(self) -> dict[str, Callable[[], DraftSource]]:
        vocab_size = self.target.info.vocab_size
        own: dict[str, Callable[[], DraftSource]] = {}
        if (name := _model_name(self.source)) is not None:
            own[name] = self._chosen
        return {
            **own,
            "ngram": NgramSource,
            "suffix": lambda: SuffixSource(SHARED_TOKENS),
            "half-right": self._half_right,
            "random": lambda: RandomSource(vocab_size),
            "crashing": lambda: CrashingSource(self._chosen(), vocab_size),
        }

    def _chosen(self) -> DraftSource:
        return self.source or self._half_right()

    def _half_right(self) -> DraftSource:
        texts = {name: self._by_id[name].prompt_ids + text.ids for name, text in self.texts.items()}
        return ReplaySource(texts, self.target.info.vocab_size, ERROR_RATE)

    def _depths(self, quick: bool, *, own: bool) -> Iterator[tuple[str, DepthPolicy]]:
        """Each depth for all requests with the user's own draft; the other drafts share the depths out among the requests."""
        depths = QUICK_DEPTHS if quick else ALL_DEPTHS
        if own:
            yield from ((f"K={depth}", FixedDepth(depth)) for depth in depths)
            return
        names = _shuffled(self._by_id)
        for turn in range(1 if quick else FULL_TURNS):
            depth_of = {name: depths[(i + turn * len(names)) % len(depths)] for i, name in enumerate(names)}
            label = ", ".join(map(str, sorted(set(depth_of.values()))))
            yield f"K={label} in one batch", ChosenDepth(depth_of.__getitem__)

    def _tight_capacity(self) -> int:
        """Room for all prompts, or for the largest request, and hardly more: whoever is admitted outgrows it."""
        prompts = sum(len(r.prompt_ids) + 1 for r in self.requests)
        return max(prompts, *(len(r.prompt_ids) + r.params.max_tokens + 1 for r in self.requests))

    def _migrate(self, source: DraftSource, policy: DepthPolicy) -> Played:
        """Half of each text is known already; the rest is made as if another lane had died."""
        resumed = []
        for request in self.requests:
            made = self.texts[request.request_id].ids
            if len(made) > 1:
                resumed.append(replace(request, output_ids=made[: len(made) // 2]))
        played = play(self.target, source, resumed, policy)
        for request in resumed:
            text, whole = played.texts[request.request_id], self.texts[request.request_id]
            count = len(request.output_ids)
            text.ids = request.output_ids + text.ids
            text.logprobs = whole.logprobs[:count] + text.logprobs
        return played

    # --- comparing ----------------------------------------------------------------------------------------------------------

    def _first_difference(self, arm: str, name: str, text: Text) -> Divergence | None:
        expected = self.texts[name]
        for position, (wanted, got) in enumerate(zip(expected.ids, text.ids, strict=False)):
            if wanted != got:
                margin = self._margin(name, position, got)
                tolerated = not self.exact and margin <= self.tolerance
                return Divergence(arm, name, position, wanted, got, "token", margin, tolerated)
        if (expected.ids, expected.finish_reason) != (text.ids, text.finish_reason):
            return Divergence(arm, name, min(len(expected.ids), len(text.ids)), None, None, text.error or "end")
        if self.exact and expected.logprobs != text.logprobs:
            pairs = enumerate(zip(expected.logprobs, text.logprobs, strict=True))
            position = next(i for i, (wanted, got) in pairs if wanted != got)
            return Divergence(arm, name, position, None, None, "logprob")
        return None

    def _margin(self, name: str, position: int, got: int) -> float:
        request = self._by_id[name]
        ids = (*request.prompt_ids, *self.texts[name].ids[:position])
        (logits,) = self._logits_of([ids])
        return near_tie_margin(logits, request, ids, got, self.target.info.eos_token_ids)


def make_requests(
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    info: ModelInfo,
    parameters: Mapping[str, dict[str, object]] = PARAMETERS,
) -> list[GenerateRequest]:
    """Every prompt with every set of parameters; prompts that leave no room lose their beginning."""
    room = min(info.max_context, info.kv_capacity_tokens // info.kv_block_size * info.kv_block_size) - num_tokens - 1
    requests: list[GenerateRequest] = []
    for kind, ids in prompts.items():
        for label, values in parameters.items():
            fields = {"ignore_eos": True, "logprobs": 2, "max_tokens": num_tokens, "seed": 7919 * len(requests) + 1, **values}
            if "min_tokens" in label:
                fields["min_tokens"] = num_tokens // 2
            params = SamplingParams(**fields)  # type: ignore[arg-type]
            requests.append(GenerateRequest(request_id=f"{kind}, {label}", prompt_ids=tuple(ids[-room:]), params=params))
    return requests


def _model_name(source: DraftSource | None) -> str | None:
    """Of a draft that is a model; drafts from text are played anyway, and may find nothing."""
    return None if source is None or isinstance(source, TextSource) else source.name


def _shuffled(names: Mapping[str, object]) -> list[str]:
    """In another order than parameters repeat in, so that a set of parameters meets several depths."""
    listed = list(names)
    return [listed[i] for step in range(5) for i in range(step, len(listed), 5)]

"""Whole rounds against a language model of a few tokens whose distribution is known exactly.

Two kinds of proof. Under the coupled and the greedy rule the text must be *identical* for every draft, depth, batch and
chunking. Under every rule the joint distribution of the text must be the target's: a chi-square test, with seeds that are
fixed, so that it cannot fail by chance once it passes; for another choice of seeds its false-alarm probability is `FALSE_ALARM`
per case. The same test must reject each of the deliberately wrong rules at the end of this file.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine import sampling
from engine.accept import DraftProbs, Drafts, Verdicts
from engine.accept import coupled as accept_coupled
from engine.accept import rejection as accept_rejection
from engine.accept.coupled import draw
from engine.drivers import SyncDriver
from engine.noise import Stream
from engine.propose.base import DraftSource
from engine.propose.ngram import NgramSource
from engine.scheduler import DepthPolicy, FixedDepth, Scheduler
from engine.testing import TableModel
from engine.types import Delta, FinishReason, GenerateRequest, ProposeReply, ProposeRequest, SamplingParams, SequenceContext

FALSE_ALARM = 1e-6
NUM_REQUESTS = 6_000
FIRST_SEED = 1_000_000
DEPTH = 2
LENGTH = DEPTH + 2
"""One token comes with the prefill, then one round of full depth makes the other three."""
VOCAB = 5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


def table(vocab: int, seed: int, scale: float = 1.3) -> Tensor:
    return scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def lane(target: TableModel, source: DraftSource | None, policy: DepthPolicy, **limits: int) -> SyncDriver:
    limits = {"max_batch": 10_000, "prefill_tokens": 1 << 20, "max_waiting": 1 << 20, **limits}
    return SyncDriver(target, source, Scheduler(target.info, policy, **limits))


@dataclass
class Played:
    """What a set of requests came to."""

    tokens: dict[str, list[int]]
    last: dict[str, Delta]

    @property
    def acceptance(self) -> float:
        return sum(d.num_accepted for d in self.last.values()) / max(sum(d.num_drafted for d in self.last.values()), 1)


def play(driver: SyncDriver, requests: Sequence[GenerateRequest]) -> Played:
    played = Played({request.request_id: [] for request in requests}, {})
    for delta in driver.generate(requests):
        played.tokens[delta.request_id].extend(delta.token_ids)
        if delta.finish_reason is not None:
            played.last[delta.request_id] = delta
    return played


# --- identical text -----------------------------------------------------------------------------------------------------------

LARGE = 32
MODEL = table(LARGE, 11, 2.0)
LAST_ID = LARGE - 1


def mixed_requests(rule: str) -> list[GenerateRequest]:
    """Requests of many kinds: short and long prompts, every option, ends by EOS, by stop id and by length."""
    greedy: dict[str, object] = {"temperature": 0.0} if rule == "greedy" else {}
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 4, "min_tokens": 12},
        {"min_p": 0.1, "stop_token_ids": (5, 6)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 0.8, "logit_bias": {3: 2.0, LAST_ID: -5.0}},
        {"ignore_eos": True, "max_tokens": 23},
        {"max_tokens": 1},
        {"temperature": 1.5, "max_depth": 2},
        {"temperature": 0.0},
    ]
    choose = random.Random(3)
    requests = []
    for i, kind in enumerate(kinds + kinds[:5]):
        prompt = tuple(choose.randrange(1, LARGE) for _ in range(choose.choice([1, 2, 9, 40])))
        params = SamplingParams(**{"max_tokens": 30, "seed": 7919 * i, "logprobs": i % 2 or None, **kind, **greedy})  # type: ignore[arg-type]
        requests.append(GenerateRequest(request_id=str(i), prompt_ids=prompt, params=params))
    return requests


class RandomDepth(FixedDepth):
    """Any depth, drawn anew for every request and round."""

    def __init__(self) -> None:
        super().__init__(0)
        self._random = random.Random(4)

    def depth(self, request_id: str, room: int, batch_size: int, now_s: float) -> int:
        return self._random.randint(0, min(room, 20))


class Recorded:
    """Remembers every delta of a lane, with its logprobs."""

    def __init__(self, target: TableModel, source: DraftSource | None, policy: DepthPolicy, **limits: int):
        self.driver = lane(target, source, policy, **limits)
        self.fallbacks: set[str] = set()
        self.num_accepted = 0
        self.num_preempted = 0

    def play(self, requests: Sequence[GenerateRequest]) -> dict[str, tuple[object, ...]]:
        """Request id -> (ids, logprobs, reason)."""
        for request in requests:
            self.driver.add(request)
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        while self.driver.scheduler.running or self.driver.scheduler.waiting:
            result = self.driver.step()
            self.fallbacks |= set(result.report.fallbacks)
            self.num_accepted += result.report.num_accepted
            self.num_preempted += result.report.num_preempted
            for delta in result.deltas:
                deltas[delta.request_id].append(delta)
        return {name: _joined(parts) for name, parts in deltas.items()}


def _joined(deltas: Sequence[Delta]) -> tuple[object, ...]:
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    assert not logprobs or [entry.token_id for entry in logprobs] == list(tokens)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return tokens, logprobs, deltas[-1].finish_reason


def model(logits: Tensor = MODEL, **info: int) -> TableModel:
    return TableModel(logits, eos_token_ids=(0,), **info)


@pytest.fixture(scope="module", params=["coupled", "greedy"])
def plain(request: pytest.FixtureRequest) -> tuple[list[GenerateRequest], dict[str, tuple[object, ...]]]:
    """Requests, and what each of them says alone, without drafts, with its prompt in one piece."""
    requests = mixed_requests(request.param)
    texts: dict[str, tuple[object, ...]] = {}
    for one in requests:
        texts |= Recorded(model(), None, FixedDepth(0)).play([one])
    reasons = {text[2] for text in texts.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    return requests, texts


Plain = tuple[list[GenerateRequest], dict[str, tuple[object, ...]]]
SOURCES: dict[str, Callable[[], DraftSource | None]] = {
    "none": lambda: None,
    "perfect": lambda: model(),
    "good": lambda: model(MODEL + table(LARGE, 12, 0.5)),
    "random": lambda: model(table(LARGE, 13)),
    "adversarial": lambda: model(-MODEL),
    "n-grams": lambda: NgramSource(),
}


@pytest.mark.parametrize(
    ("source", "depth"), [("none", 0), *itertools.product([name for name in SOURCES if name != "none"], [1, 2, 3, 5, 8, 20])]
)
def test_the_text_does_not_depend_on_draft_or_depth(plain: Plain, source: str, depth: int) -> None:
    """Bug guarded: anything by which a draft, good or bad, could reach the text: ids, logprobs and reasons are identical to
    those of each request alone without drafts (cases L01 to L03, L14, L17)."""
    requests, texts = plain
    recorded = Recorded(model(), SOURCES[source](), FixedDepth(depth))
    assert recorded.play(requests) == texts
    assert "need_context" not in recorded.fallbacks
    if source == "perfect":
        assert recorded.num_accepted > 0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "limits",
    [{"max_batch": 1}, {"max_batch": 3, "prefill_tokens": 16}, {"max_batch": 20, "prefill_tokens": 7}, {"max_batch": 7}],
    ids=str,
)
def test_the_text_does_not_depend_on_batch_chunks_or_policy(plain: Plain, source: str, limits: dict[str, int]) -> None:
    """Bug guarded: neighbours, chunked prefill or a depth that changes every round reach the text (case L37)."""
    requests, texts = plain
    assert Recorded(model(), SOURCES[source](), RandomDepth(), **limits).play(requests) == texts


def test_the_text_does_not_depend_on_preemption(plain: Plain) -> None:
    """Bug guarded: a request that was prefilled again draws other noise, or counts its penalties from another place."""
    requests, texts = plain
    recorded = Recorded(
        model(kv_capacity_tokens=96, kv_block_size=4), SOURCES["good"](), RandomDepth(), max_batch=20, prefill_tokens=32
    )
    assert recorded.play(requests) == texts
    assert recorded.num_preempted > 0


def test_a_request_resumed_elsewhere_says_the_same(plain: Plain) -> None:
    """Bug guarded: after a router died, noise, penalties or min_tokens start again at the resumed token."""
    requests, texts = plain
    for request in requests:
        tokens, _, reason = texts[request.request_id]
        assert isinstance(tokens, tuple)
        for cut in (1, len(tokens) // 2):
            if cut < len(tokens):
                resumed = GenerateRequest(
                    request_id="again", prompt_ids=request.prompt_ids, params=request.params, output_ids=tokens[:cut]
                )
                rest, _, ended = Recorded(model(), SOURCES["good"](), FixedDepth(3)).play([resumed])["again"]
                assert (rest, ended) == (tokens[cut:], reason)


def test_a_draft_with_broken_numbers_changes_nothing(plain: Plain) -> None:
    """Bug guarded: NaN in the draft's logits becomes a draft token, or stops the drafts of the whole batch (case L31)."""
    requests, texts = plain
    logits = MODEL.clone()
    logits[::3] = torch.nan
    recorded = Recorded(model(), model(logits), FixedDepth(4))
    assert recorded.play(requests) == texts
    assert "invalid_draft" in recorded.fallbacks
    assert recorded.num_accepted > 0


def test_a_target_with_broken_numbers_fails_the_request_alone(plain: Plain) -> None:
    """Bug guarded: NaN in the target's logits becomes a token or ends the neighbours (case L31)."""
    requests, texts = plain
    seen = {r.request_id: {r.prompt_ids[-1], *texts[r.request_id][0][:-1]} for r in requests}  # type: ignore[index]
    broken = next(token for token in range(LARGE) if 2 <= sum(token in tokens for tokens in seen.values()) < len(requests) - 1)
    logits = MODEL.clone()
    logits[broken] = torch.nan
    played = Recorded(model(logits), model(), FixedDepth(4)).play(requests)
    for name, (tokens, _, reason) in played.items():
        if broken in seen[name]:
            assert reason is FinishReason.ERROR
            assert tokens == texts[name][0][: len(tokens)]  # type: ignore[index, arg-type]
        else:
            assert played[name] == texts[name]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_seed_decides(rule: str) -> None:
    """Bug guarded: unseeded neighbours share one stream, or a seed means something else after a restart (cases L10, L11)."""

    def text(seed: int, beside: int) -> object:
        requests = [
            GenerateRequest(request_id=str(i), prompt_ids=(1,), params=SamplingParams(seed=s, max_tokens=20, rule=rule))
            for i, s in enumerate([seed, *range(1000, 1000 + beside)])
        ]
        return Recorded(TableModel(MODEL), SOURCES["good"](), FixedDepth(3)).play(requests)["0"]

    assert text(5, 0) == text(5, 0) == text(5, 9)
    assert len({str(text(seed, 0)) for seed in (0, 1, 5, 1 << 32, (1 << 63) + 5, (1 << 64) - 1)}) == 6


# --- the joint distribution -------------------------------------------------------------------------------------------------


def exact_rows(logits: Tensor, params: SamplingParams) -> Tensor:
    """softmax(logits / T) after the filters, float64 [V, V]; logits have no ties."""
    scaled = logits.double() / params.temperature
    if params.top_k:
        scaled[scaled < scaled.topk(params.top_k, dim=1).values[:, -1:]] = -torch.inf
    if params.top_p < 1.0:
        values, ids = torch.softmax(scaled, dim=1).sort(dim=1, descending=True)
        outside = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, ids, values.cumsum(dim=1) - values >= params.top_p)
        scaled[outside] = -torch.inf
    probs = torch.softmax(scaled, dim=1)
    probs[probs < params.min_p * probs.amax(dim=1, keepdim=True)] = 0.0
    return probs / probs.sum(dim=1, keepdim=True)


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Upper tail; cells with an expectation below 5 are pooled, and a hit in an impossible cell is certain proof."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    large = expected >= 5
    pooled_counts = torch.cat([counts[large], counts[~large].sum()[None]])
    pooled = torch.cat([expected[large], expected[~large].sum()[None]])
    if pooled[-1] < 5:
        pooled_counts, pooled = pooled_counts[:-1], pooled[:-1]
    statistic = ((pooled_counts - pooled) ** 2 / pooled).sum()
    return float(torch.special.gammaincc(torch.tensor(max(len(pooled) - 1, 1) / 2, dtype=torch.float64), statistic / 2))


def p_value(played: Played, target: Tensor, params: SamplingParams, first: int) -> float:
    """Of the text under the target's exact distribution: the whole joint, every single token and every pair (Bonferroni)."""
    p = exact_rows(target, params)
    joint = p[first]
    for _ in range(LENGTH - 1):
        joint = joint[..., None] * p
    counts = torch.zeros_like(joint)
    index = torch.tensor(list(played.tokens.values())).T
    counts.index_put_(tuple(index), torch.ones(len(played.tokens), dtype=torch.float64), accumulate=True)
    expected = joint * len(played.tokens)
    axes = range(LENGTH)
    views = [tuple(axes), *itertools.combinations(axes, 1), *itertools.combinations(axes, 2)]
    smallest = 1.0
    for kept in views:
        summed = [axis for axis in axes if axis not in kept]
        seen, wanted = (t.sum(dim=summed).flatten() if summed else t.flatten() for t in (counts, expected))
        smallest = min(smallest, chi_square_p(seen, wanted))
    return min(smallest * len(views), 1.0)


SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature and top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.15, "temperature": 1.2},
}
TARGET, DRAFT = table(VOCAB, 5), table(VOCAB, 5) + table(VOCAB, 6, 2.0)


def sample(rule: str, settings: dict[str, float], source: DraftSource | None, depth: int = DEPTH) -> tuple[Played, float]:
    """Play `NUM_REQUESTS` short requests of distinct seeds; returns them and the p-value of their texts."""
    params = SamplingParams(rule=rule, max_tokens=LENGTH, **settings)  # type: ignore[arg-type]
    driver = lane(TableModel(TARGET, kv_capacity_tokens=1 << 30), source, FixedDepth(depth))
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_REQUESTS)
    requests = [GenerateRequest(request_id=str(seed), prompt_ids=(2,), params=replace(params, seed=seed)) for seed in seeds]
    played = play(driver, requests)
    return played, p_value(played, TARGET, params, first=2)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_has_the_targets_distribution(rule: str, settings: str) -> None:
    """Bug guarded: any bias between proposing, accepting and resampling, including streams of noise that are not independent;
    every seed is used once, and a round of depth 2 makes tokens 2 to 4 (cases L05, L06)."""
    played, p = sample(rule, SETTINGS[settings], TableModel(DRAFT))
    assert p > FALSE_ALARM
    assert 0.2 < played.acceptance < 0.8, "the draft is right often enough, and wrong often enough, to test both ways"
    assert all(delta.num_drafted >= DEPTH for delta in played.last.values())


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_certain_draft_keeps_the_distribution(rule: str) -> None:
    """Bug guarded: a source that sends no q (n-gram lookup) is treated as if its q were something else than one-hot."""

    class Certain:
        """Drafts what follows most often in the target: often right, always the same."""

        name = "certain"

        def propose(self, request: ProposeRequest) -> ProposeReply:
            reply = NgramSource().propose(request)
            likely = TARGET.argmax(dim=1).tolist()
            proposals = []
            for item, proposal in zip(request.items, reply.proposals, strict=True):
                tokens = [likely[item.tokens[-1]]]
                while len(tokens) < item.depth:
                    tokens.append(likely[tokens[-1]])
                proposals.append(replace(proposal, tokens=tuple(tokens), reason=None))
            return replace(reply, proposals=tuple(proposals))

    played, p = sample(rule, {}, Certain())
    assert p > FALSE_ALARM
    assert 0.2 < played.acceptance < 0.8


# --- wrong rules must be found ----------------------------------------------------------------------------------------------


class Tampered:
    """A draft that draws with other parameters than the target's, but reports the q of the target's parameters."""

    name = "tampered"

    def __init__(self, change: Callable[[SamplingParams], SamplingParams]):
        self._model = TableModel(DRAFT)
        self._change = change
        self._params = SamplingParams()

    def propose(self, request: ProposeRequest) -> ProposeReply:
        items = tuple(replace(item, context=self._other(item.context)) for item in request.items)
        reply = self._model.propose(replace(request, items=items))
        rows = exact_rows(DRAFT, self._params).tolist()
        proposals = []
        for item, proposal in zip(request.items, reply.proposals, strict=True):
            before = (item.tokens[-1], *proposal.tokens[:-1])
            probs = tuple((tuple(range(VOCAB)), tuple(rows[token])) for token in before)
            proposals.append(replace(proposal, probs=probs))
        return replace(reply, proposals=tuple(proposals))

    def _other(self, context: SequenceContext | None) -> SequenceContext | None:
        if context is None:
            return None
        self._params = context.params
        return replace(context, params=self._change(context.params))


def _share_noise(patch: pytest.MonkeyPatch) -> DraftSource:
    """The draft draws with the noise of the resampling (the public bug of design section 4)."""
    keys = sampling._keys

    def shared(sequences: Sequence[sampling.SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        return keys(sequences, Stream.RESAMPLE if stream is Stream.DRAFT else stream, device)

    patch.setattr(sampling, "_keys", shared)
    return TableModel(DRAFT)


def _q_before_temperature(patch: pytest.MonkeyPatch) -> DraftSource:
    """The draft draws at temperature 0.5 and reports the q of temperature 1."""
    return Tampered(lambda params: replace(params, temperature=0.5))


def _bonus_from_q(patch: pytest.MonkeyPatch) -> DraftSource:
    """After a full acceptance the next token is drawn from the draft's last distribution."""
    rejection = accept_rejection

    def wrong(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
        good = rejection(drafts, p, q, uniforms, noise)
        if drafts.tokens.shape[1] == 0 or noise.shape[1] == 1:
            return good
        last = torch.zeros_like(noise).scatter_add(1, q.ids[:, -1], q.probs[:, -1])
        full = (good.accepted == drafts.lengths) & (drafts.lengths > 0)
        return Verdicts(good.accepted, torch.where(full, (last.log() + noise).argmax(dim=1), good.tokens))

    patch.setattr(sampling, "rejection", wrong)
    return TableModel(DRAFT)


def _resample_from_p(patch: pytest.MonkeyPatch) -> DraftSource:
    """After a refusal the next token is drawn from p."""
    rejection = accept_rejection

    def wrong(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
        good = rejection(drafts, p, q, uniforms, noise)
        return Verdicts(good.accepted, (p[drafts.first_row + good.accepted].log() + noise).argmax(dim=1))

    patch.setattr(sampling, "rejection", wrong)
    return TableModel(DRAFT)


def _noise_by_round(patch: pytest.MonkeyPatch) -> DraftSource:
    """Every position of a round has the same noise."""
    keys = sampling._keys

    def same(sequences: Sequence[sampling.SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        all_keys = keys(sequences, stream, device)
        rows = [row for start, s in zip(_starts(sequences), sequences, strict=True) for row in [start] * s.num_rows]
        return all_keys[torch.tensor(rows)]

    patch.setattr(sampling, "_keys", same)
    return TableModel(DRAFT)


def _keep_likely_tokens(patch: pytest.MonkeyPatch) -> DraftSource:
    """A draft token is kept when the target finds it rather likely ("typical acceptance")."""
    match = accept_coupled

    def wrong(drafts: Drafts, logits: Tensor, noise: Tensor, ids: Tensor | None = None) -> Verdicts:
        own = draw(logits, noise, ids)
        p = torch.softmax(logits, dim=1)
        rows = drafts.position_rows()
        likely = (p[rows, drafts.tokens.clamp_min(0)] > 0.3) & (drafts.tokens >= 0)
        own = own.index_put((rows[likely],), drafts.tokens[likely])
        return match(drafts, torch.nn.functional.one_hot(own, logits.shape[1]).double().log(), torch.zeros_like(noise))

    patch.setattr(sampling, "coupled", wrong)
    return TableModel(DRAFT)


def _starts(sequences: Sequence[sampling.SampledSequence]) -> Iterator[int]:
    return itertools.accumulate((s.num_rows for s in sequences[:-1]), initial=0)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("rejection", _share_noise),
        ("rejection", _q_before_temperature),
        ("rejection", _bonus_from_q),
        ("rejection", _resample_from_p),
        ("coupled", _noise_by_round),
        ("coupled", _keep_likely_tokens),
    ],
)
def test_the_chi_square_test_finds_wrong_rules(
    rule: str, wrong: Callable[[pytest.MonkeyPatch], DraftSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a statistical test without the power to see the errors that engines have really had."""
    _, p = sample(rule, {}, wrong(monkeypatch))
    assert p < FALSE_ALARM

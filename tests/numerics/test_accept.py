"""Acceptance rules as pure functions: their distributions are computed, not sampled.

A ratio rule keeps or refuses by uniforms in (0, 1), and each uniform matters only through the side of a threshold that it is
on. So the cube of uniforms falls into boxes with one outcome each, and what a round commits has a distribution that is a finite
sum: over the drafts (drawn from q), over the boxes (their volumes) and over the token drawn last, whose weights a recording
`Draw` sees. `round_law` computes that sum. Where the boxes end comes from formulas written here, apart from the engine's; the
rule is then asked at the lowest and the highest corner of every box, which finds thresholds that are anywhere else, at any
distance above rounding. `read_cuts` and `read_drawn` treat a rule as a black box instead, by bisection; slow, they prove the
fast way right.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.accept import RULES, DraftProbs, Drafts, Draw, TargetProbs, Verdicts, block, coupled, greedy, rejection
from engine.accept.base import draw_next, leading_true, match_own_tokens
from engine.accept.greedy import peaks
from engine.noise import Stream, gumbel_argmax, row_keys
from engine.request import check_request
from engine.testing import model_info
from engine.types import SAMPLING_RULES, GenerateRequest, SamplingParams

RatioRule = Callable[[Drafts, TargetProbs, DraftProbs, Tensor, Draw], Verdicts]
RATIO_RULES: dict[str, RatioRule] = {"rejection": rejection, "block": block}
SMALLEST = 2.0**-53
"""The smallest uniform of `engine.noise`; the largest is 1 minus it."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


# --- packing ----------------------------------------------------------------------------------------------------------------


def test_drafts_of_different_lengths_are_packed_row_after_row() -> None:
    """Bug guarded: an empty draft or a shorter one shifts the rows of every sequence after it."""
    drafts = Drafts.from_lists([(5, 6), (), (7,), (8, 9, 10)])
    assert drafts.tokens.tolist() == [[5, 6, -1], [-1, -1, -1], [7, -1, -1], [8, 9, 10]]
    assert drafts.lengths.tolist() == [2, 0, 1, 3]
    assert drafts.first_row.tolist() == [0, 3, 4, 6]
    assert drafts.position_rows().tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5], [6, 7, 8]]


@pytest.mark.parametrize("lists", [[], [()], [(), ()]], ids=["empty batch", "one", "two"])
def test_without_any_draft(lists: list[tuple[int, ...]]) -> None:
    """Bug guarded: a round of plain decoding (K = 0 everywhere) or an empty one fails on empty tensors, or draws from
    something else than p."""
    n = len(lists)
    logits = torch.randn(n, 4, dtype=torch.float64)
    drafts = Drafts.from_lists(lists)
    q = DraftProbs(torch.zeros(n, 0, 1, dtype=torch.int64), torch.zeros(n, 0, 1, dtype=torch.float64))
    drawn: list[Tensor] = []

    def draw(log_weights: Tensor, rows: Tensor) -> Tensor:
        assert rows.tolist() == list(range(n))
        drawn.append(torch.softmax(log_weights, dim=-1))
        return log_weights.argmax(dim=-1)

    verdicts = [greedy(drafts, logits.argmax(dim=-1)), coupled(drafts, logits, draw)]
    uniforms = torch.zeros(n, 0, dtype=torch.float64)
    verdicts += [rule(drafts, TargetProbs.from_logits(logits), q, uniforms, draw) for rule in RATIO_RULES.values()]
    for verdict in verdicts:
        assert verdict.accepted.tolist() == [0] * n
        assert verdict.tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert len(drawn) == 3
    for weights in drawn:
        torch.testing.assert_close(weights, torch.softmax(logits, dim=-1), rtol=1e-14, atol=0)


def test_only_leading_matches_count() -> None:
    """Bug guarded: a match after a mismatch is counted, so that a token is committed after a wrong one."""
    kept = torch.tensor([[True, True, False], [False, True, True], [True, False, True], [True, True, True]])
    assert leading_true(kept).tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("draft", [d for k in range(4) for d in itertools.product(range(3), repeat=k)], ids=str)
def test_matching_against_a_walk_by_hand(draft: tuple[int, ...]) -> None:
    """Bug guarded: the recovery token is taken from the wrong row; padding matches; a neighbour's row is read."""
    own = [1, 2, 0, 1]
    accepted = 0
    while accepted < len(draft) and draft[accepted] == own[accepted]:
        accepted += 1
    neighbour = (2, 2)
    rows = torch.tensor([2, 2, 2, *own[: len(draft) + 1], 0])
    verdicts = match_own_tokens(Drafts.from_lists([neighbour, draft, ()]), rows)
    assert verdicts.accepted.tolist() == [2, accepted, 0]
    assert verdicts.tokens.tolist() == [2, own[accepted], 0]


def test_padding_matches_no_row_without_a_token() -> None:
    """Bug guarded: a row without any token to draw has own token -1, which equals the padding of a shorter draft: more tokens
    are accepted than were drafted."""
    verdicts = match_own_tokens(Drafts.from_lists([(2,), (1, 1)]), torch.tensor([2, -1, 1, 1, 0]))
    assert verdicts.accepted.tolist() == [1, 2]
    assert verdicts.tokens.tolist() == [-1, 0]


def test_the_total_of_a_row_does_not_depend_on_the_batch() -> None:
    """Bug guarded: a sum that is split over threads for a lone row only gives p other bits when the batch changes."""
    torch.set_num_threads(2)
    logits = 3.0 * torch.randn(6, 151_936)  # at 49,152 no sum is split
    alone = torch.cat([TargetProbs.from_logits(row[None]).log_total for row in logits])
    assert torch.equal(TargetProbs.from_logits(logits).log_total, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_target_probs_are_the_softmax_of_the_logits(dtype: torch.dtype) -> None:
    """Bug guarded: a constant in a row of logits, or a token without mass, changes p; broadcasting reads another row."""
    logits = torch.randn(5, 7, dtype=dtype)
    logits[2, :6] = -math.inf
    expected = torch.softmax(logits.double(), dim=-1)
    p = TargetProbs.from_logits(logits + torch.tensor([0.0, 5.0, -3.0, 80.0, 1.0], dtype=dtype)[:, None])
    rows, ids = torch.tensor([[4], [2]]), torch.tensor([[0, 6, 3]])
    tolerance = 1e-14 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(p.of_rows(torch.tensor([3, 2])), expected[[3, 2]], rtol=tolerance, atol=0)
    torch.testing.assert_close(p.at(rows, ids), expected[rows, ids], rtol=tolerance, atol=0)
    torch.testing.assert_close(TargetProbs.from_probs(expected).at(rows, ids), expected[rows, ids], rtol=1e-14, atol=0)


# --- greedy -----------------------------------------------------------------------------------------------------------------


def test_greedy_ties_take_the_lowest_id() -> None:
    """Bug guarded: draft and target break ties differently, or differently from run to run, and greedy text is not
    reproducible."""
    logits = torch.zeros(6, 50_000)
    logits[:, [777, 778, 40_000]] = 3.0
    verdicts = greedy(Drafts.from_lists([(777, 778), (777, 777)]), peaks(logits)[1])
    assert verdicts.accepted.tolist() == [1, 2]
    assert verdicts.tokens.tolist() == [777, 777]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_most_likely_token_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    """Bug guarded: a faster argmax that takes another one of equal maxima, or reads a slice of the rows wrongly."""
    logits = (4 * torch.randn(50, 3000, generator=torch.Generator().manual_seed(1))).round().to(dtype)
    logits[7] = -torch.inf
    logits[7, 11] = 0.0
    for view in (logits, logits[:, 5:900], logits[::3]):
        wanted = [row.index(max(row)) for row in view.tolist()]
        assert peaks(view)[1].tolist() == wanted


def test_greedy_ignores_how_likely_the_draft_was() -> None:
    """Bug guarded: the ratio test on raw probabilities keeps a token that is not the most likely one (case L08)."""
    verdicts = greedy(Drafts.from_lists([(0,)]), peaks(torch.tensor([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2]]).log())[1])
    assert (verdicts.accepted.tolist(), verdicts.tokens.tolist()) == ([0], [1])


# --- cases ------------------------------------------------------------------------------------------------------------------

KINDS = [
    "random",
    "equal",
    "nearly equal",
    "q lacks tokens",
    "p lacks tokens",
    "disjoint",
    "p is certain",
    "q is certain",
    "both are certain",
    "heavy ratios",
]
Tables = tuple[Tensor, Tensor]
"""p and q after each last token, float64 [cases, V + 1, V] each; row V is the start."""


def random_tables(kind: str, vocab: int, seed: int, count: int = 1) -> Tables:
    generator = torch.Generator().manual_seed(100_000 * vocab + 100 * seed + KINDS.index(kind))
    shape = (count, vocab + 1, vocab)
    spread = 12.0 if kind == "heavy ratios" else 2.0
    p, q = (torch.softmax(spread * torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))
    order = torch.rand(shape, generator=generator).argsort(dim=-1)
    some = order < torch.randint(1, vocab, (*shape[:2], 1), generator=generator)  # at least one token, never all
    if kind == "equal":
        q = p.clone()
    elif kind == "nearly equal":
        distance = 10.0 ** -(3 + 12 * torch.rand((count, 1, 1), generator=generator, dtype=torch.float64))
        q = p * (1 + distance * torch.rand(shape, generator=generator, dtype=torch.float64))
    elif kind == "q lacks tokens":
        q = q * some
    elif kind == "p lacks tokens":
        p = p * some
    elif kind == "disjoint":
        p, q = p * some, q * ~some
    if kind in ("p is certain", "both are certain"):
        p = (order == 0).double()
    if kind in ("q is certain", "both are certain"):
        q = (order == torch.randint(2, (*shape[:2], 1), generator=generator)).double()
    return p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)


SIZES = [(vocab, depth) for depth in range(1, 5) for vocab in range(2, 17)]
MOST_DRAFTS = 4096
FEW_TOKENS = 6
"""Where q could draw more drafts (K = 4, vocabulary above 8), it is cut to so many tokens: 16^4 would take half a minute."""
WORK_PER_SIZE = 3_500_000


def truncated(q: Tensor, num_tokens: int) -> Tensor:
    """q [..., V] cut to its most likely tokens and renormalised."""
    probs, ids = q.topk(num_tokens, dim=-1)
    return torch.zeros_like(q).scatter(-1, ids, probs / probs.sum(dim=-1, keepdim=True))


@cache
def tables_of_size(vocab: int, depth: int) -> tuple[Tables, list[str]]:
    """As many cases as a fixed amount of work allows, and the kind of each. Sizes that allow few start at different kinds."""
    known = vocab if vocab**depth <= MOST_DRAFTS else FEW_TOKENS
    work = 2 ** (depth + 1) * (depth + 1) * known**depth * vocab
    count = min(30 * len(KINDS), max(2, WORK_PER_SIZE // work))
    kinds = sorted(KINDS[(vocab + 3 * depth + i) % len(KINDS)] for i in range(count))
    tables = [random_tables(kind, vocab, depth, len(list(alike))) for kind, alike in itertools.groupby(kinds)]
    p, q = (torch.cat(parts) for parts in zip(*tables, strict=True))
    return (p, truncated(q, known) if known < vocab else q), kinds


# --- one round, computed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Every draft of length K that q can draw, in every case: N sequences of one verify."""

    tables: Tables
    case: Tensor
    """int64 [N]."""
    tokens: Tensor
    """int64 [N, K]."""
    drawn: Tensor
    """Probability of each draft, [N]."""
    p: Tensor
    """[N, K + 1, V]."""
    q: Tensor
    """[N, K, V]."""
    drafts: Drafts
    target: TargetProbs
    pairs: DraftProbs


def dense(q: Tensor) -> DraftProbs:
    """q [..., V] as pairs, in an order that is not the vocabulary's; tokens without mass are sent too."""
    return DraftProbs(torch.arange(q.shape[-1] - 1, -1, -1).expand(q.shape).contiguous(), q.flip(-1))


def sparse(q: Tensor, num_pairs: int) -> DraftProbs:
    """The most likely ``num_pairs`` tokens of q [N, K, V], padded with two empty pairs."""
    probs, ids = q.topk(num_pairs, dim=-1)
    ids = torch.where(probs > 0, ids, 0)
    return DraftProbs(torch.nn.functional.pad(ids, (0, 2)), torch.nn.functional.pad(probs, (0, 2)))


def all_drafts(tables: Tables, depth: int, pack: Callable[[Tensor], DraftProbs] = dense) -> Blocks:
    p_table, q_table = tables
    vocab = p_table.shape[-1]
    every = torch.cartesian_prod(*[torch.arange(vocab)] * depth).view(-1, depth)
    before = torch.cat([torch.full((len(every), 1), vocab), every], dim=1)
    drawn = q_table[:, before[:, :-1], every].prod(dim=-1)
    case, draft = (drawn > 0).nonzero().unbind(dim=1)
    p, q = p_table[case[:, None], before[draft]], q_table[case[:, None], before[draft, :-1]]
    lengths, first_row = torch.full_like(case, depth), torch.arange(len(case)) * (depth + 1)
    drafts = Drafts(every[draft], lengths, first_row)
    target = TargetProbs.from_probs(p.flatten(0, 1))
    return Blocks(tables, case, every[draft], drawn[case, draft], p, q, drafts, target, pack(q))


def outcome(rule: RatioRule, blocks: Blocks, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted lengths [N] and the distributions [N, V] that the next tokens are drawn from. uniforms [N, K]."""
    return decided(rule, blocks.drafts, blocks.target, blocks.pairs, uniforms)


def decided(rule: RatioRule, drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def record(log_weights: Tensor, rows: Tensor) -> Tensor:
        seen.append(torch.softmax(log_weights, dim=-1))
        return rows  # a number that a rule can only have from here: what it commits is what was drawn

    verdicts = rule(drafts, p, q, uniforms, record)
    assert torch.equal(verdicts.tokens, drafts.first_row + verdicts.accepted), "drawn for the row after the accepted tokens"
    (weights,) = seen
    return verdicts.accepted, weights


@dataclass(frozen=True)
class Law:
    """What a round commits, per case."""

    error: Tensor
    """Largest difference between the joint distribution of the next K + 1 tokens and the target's, plus the probability of
    uniforms so close to a threshold that rounding decides."""
    accepted: Tensor
    """Expected number of accepted tokens."""


def round_law(rule: RatioRule, blocks: Blocks, cuts: Tensor, slack: Tensor) -> Law:
    """Sum over all drafts and boxes. ``cuts`` [N, K, C], ascending, part the axis of each uniform, up to ``slack``.

    A rule may accept less at a larger uniform, never more (`test_a_smaller_uniform_never_refuses_more`); so a box has one
    outcome if its lowest and its highest corner have.
    """
    n, depth, num_cuts = cuts.shape
    zeros, ones = torch.zeros(n, depth, 1, dtype=torch.float64), torch.ones(n, depth, 1, dtype=torch.float64)
    sizes = torch.cat([zeros, cuts, ones], dim=-1).diff(dim=-1)
    lowest = torch.cat([zeros, cuts + slack], dim=-1).clamp(SMALLEST, 1 - SMALLEST)
    highest = torch.cat([cuts - slack, ones], dim=-1).clamp_max(1 - SMALLEST).maximum(lowest)
    lengths, volumes = [], []
    rounds = _Sum(blocks)
    for box in itertools.product(range(num_cuts + 1), repeat=depth):
        at = (slice(None), torch.arange(depth), torch.tensor(box))
        accepted, weights = outcome(rule, blocks, lowest[at])
        accepted_above, weights_above = outcome(rule, blocks, highest[at])
        assert torch.equal(accepted, accepted_above), f"a threshold is not where the formula has it: box {box}"
        assert torch.equal(weights, weights_above), f"what is drawn depends on the uniforms: box {box}"
        volumes.append(sizes[at].prod(dim=1))
        lengths.append(accepted)
        rounds.add(accepted, weights, blocks.drawn * volumes[-1])
    grid = [num_cuts + 1] * depth + [n]
    undecided = _undecided(torch.stack(lengths).view(grid), torch.stack(volumes).view(grid), slack)
    return Law(rounds.error() + rounds.per_case(undecided * blocks.drawn), rounds.accepted)


def _undecided(lengths: Tensor, volumes: Tensor, slack: Tensor) -> Tensor:
    """Volume of the bands around thresholds that part two outcomes, [N]; lengths, volumes [C + 1, ..., N], slack [N, K, C]."""
    total = torch.zeros(len(slack), dtype=torch.float64)
    for axis in range(slack.shape[1]):
        parts = (lengths.diff(dim=axis) != 0) * volumes.sum(dim=axis, keepdim=True)
        bands = 2 * slack[:, axis].T
        total += (parts.movedim(axis, -2) * bands).flatten(0, -2).sum(dim=0)
    return total


class _Sum:
    """Adds up rounds: by case, kept prefix and next token."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.p = blocks.tables[0]
        cases, vocab, depth = len(self.p), self.p.shape[-1], blocks.tokens.shape[1]
        self.accepted = torch.zeros(cases, dtype=torch.float64)
        self.sizes = [cases * vocab**length for length in range(depth + 1)]
        self.masses = torch.zeros(sum(self.sizes), vocab, dtype=torch.float64)
        places, code, start = [], blocks.case, 0
        for length, size in enumerate(self.sizes):
            places.append(start + code)
            start += size
            code = code * vocab + blocks.tokens[:, length] if length < depth else code
        self.place = torch.stack(places, dim=1)
        """Where a kept prefix of each length counts, [N, K + 1]."""

    def per_case(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.accepted).index_add_(0, self.blocks.case, values)

    def add(self, accepted: Tensor, weights: Tensor, mass: Tensor) -> None:
        self.masses.index_add_(0, self.place.gather(1, accepted[:, None]).squeeze(1), weights * mass[:, None])
        self.accepted += self.per_case(mass * accepted)

    def error(self) -> Tensor:
        """Against the target, [cases]; what a round leaves open of K + 1 tokens is filled in by the target itself."""
        cases, vocab = len(self.p), self.p.shape[-1]
        following = self.p[:, None, :vocab]
        joint = torch.zeros(cases, 1, vocab, dtype=torch.float64)
        target = self.p[:, vocab:]
        for length, masses in enumerate(torch.split(self.masses, self.sizes)):
            if length:
                joint, target = ((law[..., None] * following).flatten(1, 2) for law in (joint, target))
            joint = joint + masses.view(cases, -1, vocab)
        return (joint - target).abs().amax(dim=(1, 2))


# --- thresholds, by formula and by bisection --------------------------------------------------------------------------------


def ratios(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p(x) / q(x) of tokens [N, K] under p [N, K + 1, V] and q [N, K, V]."""
    at = tokens[..., None]
    return (p[:, :-1].gather(2, at) / q.gather(2, at)).squeeze(2)


def rejection_cuts(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """min(1, p/q) and how far rounding may move it (the rule works with exp(log p)): [N, K, 1] each."""
    cuts = ratios(blocks.tokens, blocks.p, blocks.q).clamp_max(1.0)[..., None]
    return cuts, 5e-14 * cuts


def block_formula(
    tokens: Tensor, p: Tensor, q: Tensor, most: float = 1.0, missing: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """b_1 … b_K, h_1 … h_K and the h's denominators (1 for h_K), [N, K] each, from whole rows of p and q.

    ``most`` bounds b and ``missing`` weighs 1 - b in the denominator: other values make wrong rules.
    """
    b, reached = torch.ones(len(tokens), dtype=torch.float64), []
    for ratio in ratios(tokens, p, q).unbind(dim=1):
        b = (b * ratio).clamp_max(most)
        reached.append(b)
    b = torch.stack(reached, dim=1)
    left = (b[:, :-1, None] * p[:, 1:-1] - q[:, 1:]).relu().sum(dim=-1)
    total = left + missing * (1.0 - b[:, :-1])
    passing = torch.where(total > 0, left / total, 1.0)
    return b, torch.cat([passing, b[:, -1:]], dim=1), torch.cat([total, torch.ones_like(b[:, -1:])], dim=1)


def block_cuts(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """h, and how far rounding may move it: much where S + 1 - b is a small difference of large numbers."""
    b, passing, total = block_formula(blocks.tokens, blocks.p, blocks.q)
    slack = torch.where(total > 0, (5e-14 * b + 1e-15) / total, 1.0).clamp_max(1.0)
    return passing[..., None], slack[..., None]


Cuts = Callable[[Blocks], tuple[Tensor, Tensor]]
CUTS: dict[str, Cuts] = {"rejection": rejection_cuts, "block": block_cuts}


def read_cuts(rule: RatioRule, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """The largest uniform at each position with which that token or a later one is kept, those before it being kept easily
    and those after it hardly: [N, K, 1], and the slack of the bisection."""
    n, depth = blocks.tokens.shape
    cuts = torch.empty(n, depth, 1, dtype=torch.float64)
    for position in range(depth):
        low, high = torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
        uniforms = torch.full((n, depth), SMALLEST, dtype=torch.float64)
        uniforms[:, position + 1 :] = 1 - SMALLEST
        for _ in range(54):
            uniforms[:, position] = (low + high) / 2
            kept = outcome(rule, blocks, uniforms)[0] > position
            low, high = torch.where(kept, uniforms[:, position], low), torch.where(kept, high, uniforms[:, position])
        cuts[:, position, 0] = torch.where(low == 0, 0.0, high)
    return cuts, torch.full_like(cuts, 1e-15)


FAR = 800.0
"""Noise that outweighs every weight of a float64."""


def read_drawn(rule: RatioRule, blocks: Blocks, uniforms: Tensor) -> Tensor:
    """Distribution of the committed token, [N, V], from the noise at which each other token overtakes the likeliest one: the
    difference of noise is then the difference of log-weights."""
    (n, _), vocab = blocks.tokens.shape, blocks.p.shape[-1]

    def winner(noise: Tensor) -> Tensor:
        return rule(blocks.drafts, blocks.target, blocks.pairs, uniforms, lambda w, _: (w + noise).argmax(dim=-1)).tokens

    favourite = winner(torch.zeros(n, vocab, dtype=torch.float64))
    weights = torch.ones(n, vocab, dtype=torch.float64)
    for challenger in range(vocab):
        low, high = torch.full((n,), -FAR, dtype=torch.float64), torch.full((n,), FAR, dtype=torch.float64)
        for _ in range(64):
            middle = (low + high) / 2
            noise = torch.full((n, vocab), -FAR, dtype=torch.float64)
            noise[:, challenger] = middle
            noise[torch.arange(n), favourite] = 0.0
            won = winner(noise) == challenger
            low, high = torch.where(won, low, middle), torch.where(won, middle, high)
        overtakes = torch.where(high >= FAR / 2, 0.0, (-high).exp())
        weights[:, challenger] = torch.where(favourite == challenger, 1.0, overtakes)
    return weights / weights.sum(dim=1, keepdim=True)


# --- the ratio rules are exact ----------------------------------------------------------------------------------------------


@cache
def law_of_size(name: str, vocab: int, depth: int) -> Law:
    blocks = all_drafts(tables_of_size(vocab, depth)[0], depth)
    return round_law(RATIO_RULES[name], blocks, *CUTS[name](blocks))


@pytest.mark.parametrize(("vocab", "depth"), SIZES)
@pytest.mark.parametrize("name", RATIO_RULES)
def test_what_is_committed_has_the_target_distribution(name: str, vocab: int, depth: int) -> None:
    """Bug guarded: any error in the test, the residual or the bonus token, at any probability (cases L05, L06): the joint
    distribution of the next K + 1 tokens equals the target's to 1e-12 in each of 8762 cases per rule. Or a rule that is exact
    but keeps less than it may: its thresholds must be those of the papers."""
    kinds = tables_of_size(vocab, depth)[1]
    error = law_of_size(name, vocab, depth).error
    worst = int(error.argmax())
    assert error.max().item() < 1e-12, f"case {worst}, {kinds[worst]}"


@pytest.mark.parametrize(("vocab", "depth"), SIZES)
def test_block_keeps_at_least_as_much_as_rejection(vocab: int, depth: int) -> None:
    """Bug guarded: block verification that is exact but keeps fewer tokens than the simpler rule, in any case."""
    gain = law_of_size("block", vocab, depth).accepted - law_of_size("rejection", vocab, depth).accepted
    assert gain.min().item() > -1e-12
    if depth == 1:
        assert gain.max().item() < 1e-12, "on a single token the two are the same"


def test_block_keeps_more_than_rejection() -> None:
    """Bug guarded: a block rule that is rejection under another name."""
    kinds = tables_of_size(4, 3)[1]
    gain = law_of_size("block", 4, 3).accepted - law_of_size("rejection", 4, 3).accepted
    assert gain[[kind == "random" for kind in kinds]].min().item() > 1e-3


@pytest.mark.parametrize("num_pairs", [1, 2, 5])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_exact_with_a_truncated_draft(name: str, num_pairs: int) -> None:
    """Bug guarded: a remote draft sends the n likeliest tokens of its q; tokens that it does not know are lost from the
    residual, or the padding of the pairs counts as token 0."""
    p, q = (torch.cat(tables) for tables in zip(*(random_tables(kind, 5, 7, 4) for kind in KINDS), strict=True))
    q = truncated(q, num_pairs)
    blocks = all_drafts((p, q), 2, lambda rows: sparse(rows, num_pairs))
    assert round_law(RATIO_RULES[name], blocks, *CUTS[name](blocks)).error.max().item() < 1e-12


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_smaller_uniform_never_refuses_more(name: str) -> None:
    """Bug guarded: `round_law` looks at corners only; a rule with more than one threshold per uniform would escape it."""
    generator = torch.Generator().manual_seed(3)
    blocks = all_drafts(random_tables("random", 4, 2, 3), 3)
    for _ in range(100):
        uniforms, others = (torch.rand(blocks.tokens.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        most, _ = outcome(RATIO_RULES[name], blocks, uniforms.minimum(others))
        assert (most >= outcome(RATIO_RULES[name], blocks, uniforms)[0]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RATIO_RULES)
def test_the_black_box_says_the_same(name: str, kind: str) -> None:
    """Bug guarded: the fast computation believes a formula or a recorded weight that is not what the rule acts on."""
    rule = RATIO_RULES[name]
    blocks = all_drafts(random_tables(kind, 3, 1), 2)
    by_formula, by_bisection = (round_law(rule, blocks, *cuts) for cuts in (CUTS[name](blocks), read_cuts(rule, blocks)))
    assert by_bisection.error.item() < 1e-12
    torch.testing.assert_close(by_bisection.accepted, by_formula.accepted, rtol=0, atol=1e-12)
    uniforms = torch.rand(blocks.tokens.shape, dtype=torch.float64)
    torch.testing.assert_close(read_drawn(rule, blocks, uniforms), outcome(rule, blocks, uniforms)[1], rtol=0, atol=1e-12)


# --- and the computation finds rules that are not ---------------------------------------------------------------------------


Redraw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def redrawing(rule: RatioRule, weights_of: Redraw) -> RatioRule:
    """Wrong: as ``rule``, but the last token is drawn from weights_of(right weights, refused, p, q) of the accepted length."""

    def wrong(drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor, draw: Draw) -> Verdicts:
        right: list[Tensor] = []

        def record(log_weights: Tensor, rows: Tensor) -> Tensor:
            right.append(log_weights.exp())
            return rows

        accepted = rule(drafts, p, q, uniforms, record).accepted
        rows = drafts.first_row + accepted
        at = torch.arange(len(rows)), accepted.clamp_max(q.ids.shape[1] - 1)
        p_rows = p.of_rows(rows)
        q_rows = torch.zeros_like(p_rows).scatter(1, q.ids[at], q.probs[at])
        weights = weights_of(right[0], (accepted < drafts.lengths)[:, None], p_rows, q_rows)
        return Verdicts(accepted, draw(weights.log(), rows))

    return wrong


def from_p(right: Tensor, refused: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The target's distribution instead of what q lacks of it."""
    return p


def from_another_temperature(right: Tensor, refused: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """After a refusal the residual of p and q at twice the temperature."""
    return torch.where(refused, (hotter(p) - hotter(q)).relu(), right)


def bonus_from_q(right: Tensor, refused: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """After a whole draft the draft's last distribution."""
    return torch.where(refused, right, q)


def hotter(probs: Tensor) -> Tensor:
    """Probabilities [..., V] at twice the temperature."""
    return probs.sqrt() / probs.sqrt().sum(dim=-1, keepdim=True)


def with_another_q(rule: RatioRule) -> RatioRule:
    """Wrong: q before the temperature, not the one that the token was drawn from."""
    return lambda drafts, p, q, uniforms, draw: rule(drafts, p, DraftProbs(q.ids, hotter(q.probs)), uniforms, draw)


def keeping_the_likely(rule: RatioRule) -> RatioRule:
    """Wrong: keeps whatever is at least half as likely as the draft has it, as "typical acceptance" does."""
    return lambda drafts, p, q, uniforms, draw: rule(drafts, p, q, torch.full_like(uniforms, 0.5), draw)


def sharing_a_uniform(rule: RatioRule) -> RatioRule:
    """Wrong: one uniform for all positions."""
    return lambda drafts, p, q, uniforms, draw: rule(drafts, p, q, uniforms[:, :1].expand_as(uniforms), draw)


def last_true(passed: Tensor) -> Tensor:
    """The largest number of tokens whose prefix passes: bool [N, K] -> int64 [N]."""
    return (passed * torch.arange(1, passed.shape[1] + 1)).amax(dim=1)


def block_by_hand(
    most: float = 1.0,
    missing: float = 1.0,
    select: Callable[[Tensor], Tensor] = last_true,
    scaled: bool = True,
    whole_only: bool = False,
) -> RatioRule:
    """Block verification from `block_formula`, right as it stands, wrong with any argument changed."""

    def rule(drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor, draw: Draw) -> Verdicts:
        n, depth = drafts.tokens.shape
        p_rows = p.of_rows(torch.arange(n * (depth + 1))).view(n, depth + 1, -1)
        q_rows = torch.zeros_like(p_rows[:, 1:]).scatter(2, q.ids, q.probs)
        b, passing, _ = block_formula(drafts.tokens, p_rows, q_rows, most, missing)
        accepted = select(uniforms < (b if whole_only else passing))
        reached = torch.cat([torch.ones_like(b[:, :1]), b], dim=1).gather(1, accepted[:, None]).squeeze(1)
        return Verdicts(accepted, draw_next(drafts, p, q, accepted, reached if scaled else torch.ones_like(reached), draw))

    return rule


def all_cuts_on_each_axis(cuts: Cuts) -> Cuts:
    """For rules that compare a uniform with thresholds of other positions too: [N, K, K]."""

    def parted(blocks: Blocks) -> tuple[Tensor, Tensor]:
        own, slack = (values.squeeze(2) for values in cuts(blocks))
        order = own.argsort(dim=1)
        own, slack = own.gather(1, order), slack.gather(1, order)
        return own[:, None].expand(-1, own.shape[1], -1), slack[:, None].expand(-1, own.shape[1], -1)

    return parted


CHANGES: dict[str, Callable[[RatioRule], RatioRule]] = {
    "recovery token from p": lambda rule: redrawing(rule, from_p),
    "residual of another temperature": lambda rule: redrawing(rule, from_another_temperature),
    "bonus token from q": lambda rule: redrawing(rule, bonus_from_q),
    "tests with another q": with_another_q,
    "keeps the likely": keeping_the_likely,
}
WRONG: dict[str, RatioRule] = {
    **{f"{name}: {what}": change(rule) for name, rule in RATIO_RULES.items() for what, change in CHANGES.items()},
    "block: b not bounded by 1": block_by_hand(most=math.inf),
    "block: h without 1 - b": block_by_hand(missing=0.0),
    "block: b in the place of h": block_by_hand(whole_only=True),
    "block: first failure instead of longest prefix": block_by_hand(select=leading_true),
    "block: residual not scaled by b": block_by_hand(scaled=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_computation_finds_wrong_rules(name: str) -> None:
    """Bug guarded: a computation that says "exact" to everything. The thresholds are read from the wrong rule itself, so that
    what is found is its distribution."""
    blocks = all_drafts(random_tables("random", 4, 0, 3), 2)
    assert round_law(WRONG[name], blocks, *read_cuts(WRONG[name], blocks)).error.max().item() > 1e-3


def test_the_computation_finds_thresholds_that_have_moved() -> None:
    """Bug guarded: with the right formula given, a rule that parts the uniforms elsewhere goes unnoticed."""
    blocks = all_drafts(random_tables("random", 4, 0), 2)
    shifted: RatioRule = lambda drafts, p, q, uniforms, draw: rejection(drafts, p, q, uniforms * (1 + 1e-12), draw)  # noqa: E731
    with pytest.raises(AssertionError, match="a threshold is not where"):
        round_law(shifted, blocks, *rejection_cuts(blocks))


@pytest.mark.parametrize("name", RATIO_RULES)
def test_the_computation_finds_shared_uniforms(name: str) -> None:
    """Bug guarded: one uniform for all positions keeps drafts too often as a whole, which no test of one position sees. (The
    right rule, computed over the same finer boxes, is exact.)"""
    blocks = all_drafts(random_tables("random", 4, 0, 3), 2)
    cuts, slack = all_cuts_on_each_axis(CUTS[name])(blocks)
    assert round_law(RATIO_RULES[name], blocks, cuts, slack).error.max().item() < 1e-12
    assert round_law(sharing_a_uniform(RATIO_RULES[name]), blocks, cuts, slack).error.max().item() > 1e-3


def test_block_by_hand_is_exact() -> None:
    """Bug guarded: the wrong variants of it above are found for another reason than what they change."""
    blocks = all_drafts(random_tables("random", 4, 0, 3), 2)
    assert round_law(block_by_hand(), blocks, *read_cuts(block_by_hand(), blocks)).error.max().item() < 1e-12


# --- ratio rules at the edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_token_without_mass_is_never_kept(name: str) -> None:
    """Bug guarded: p(x) = 0 is kept because u * q(x) underflows to the same zero, so a filtered token appears (case L06)."""
    p = TargetProbs.from_probs(torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64))
    q = DraftProbs(torch.tensor([[[0, 1]]]), torch.tensor([[[5e-324, 1.0]]], dtype=torch.float64))
    tiny = torch.tensor([[SMALLEST]], dtype=torch.float64)
    verdicts = RATIO_RULES[name](Drafts.from_lists([(0,)]), p, q, tiny, lambda weights, _: weights.argmax(dim=-1))
    assert (verdicts.accepted.item(), verdicts.tokens.item()) == (0, 1)


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_draft_with_an_impossible_token_is_cut_before_it(name: str) -> None:
    """Bug guarded: block verification passes a longer prefix although a token inside it has no mass."""
    blocks = all_drafts(random_tables("p lacks tokens", 5, 3, 20), 3)
    possible = leading_true(blocks.p[:, :-1].gather(2, blocks.tokens[..., None]).squeeze(2) > 0)
    accepted, weights = outcome(RATIO_RULES[name], blocks, torch.full_like(blocks.tokens, SMALLEST, dtype=torch.float64))
    assert (accepted <= possible).all()
    assert (possible < 3).any()
    assert (weights[blocks.p[torch.arange(len(accepted)), accepted] == 0] == 0).all()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_perfect_draft_is_never_refused(name: str, depth: int) -> None:
    """Bug guarded: p = q gives 0 / 0 where nothing is left, and a draft that is right is refused (beyond rounding: at uniforms
    up to 1 - 1e-13)."""
    blocks = all_drafts(random_tables("equal", 4, 1, 20), depth)
    accepted, weights = outcome(RATIO_RULES[name], blocks, torch.full_like(blocks.tokens, 1 - 1e-13, dtype=torch.float64))
    assert (accepted == depth).all()
    torch.testing.assert_close(weights, blocks.p[:, -1], rtol=1e-13, atol=0)


@pytest.mark.parametrize("num_pairs", [1, 2, 6])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_sequences_of_different_depths_do_not_mix(name: str, num_pairs: int) -> None:
    """Bug guarded: padding of a short draft is taken for a token, or its residual for that of a longer one: each sequence
    decided in a batch equals itself decided alone, and draws from the same weights."""
    rule, generator = RATIO_RULES[name], torch.Generator().manual_seed(5)
    vocab, lengths = 6, [3, 0, 1, 2, 3, 0]
    num_rows = sum(lengths) + len(lengths)
    accepted_in_all = set()
    for _ in range(40):
        q = truncated(torch.rand(len(lengths), 3, vocab, generator=generator, dtype=torch.float64), num_pairs)
        uniforms = torch.rand(len(lengths), 3, generator=generator, dtype=torch.float64)
        tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(len(lengths), 3)
        real = torch.arange(3) < torch.tensor(lengths)[:, None]
        lists = [tuple(row[:k]) for row, k in zip(tokens.tolist(), lengths, strict=True)]
        drafts = Drafts.from_lists(lists)
        starts = drafts.first_row.tolist()
        p = torch.softmax(torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64), dim=-1)
        alike = drafts.position_rows()[real]
        p[alike] = (p[alike] + q[real]) / 2  # so that every length is accepted now and then
        together = decided(rule, drafts, TargetProbs.from_probs(p), sparse(q * real[..., None], num_pairs), uniforms)
        for i, (start, k) in enumerate(zip(starts, lengths, strict=True)):
            own = slice(i, i + 1)
            own_p, own_q = TargetProbs.from_probs(p[start : start + k + 1]), sparse(q[own, :k], num_pairs)
            alone = decided(rule, Drafts.from_lists(lists[own]), own_p, own_q, uniforms[own, :k])
            assert alone[0].item() == together[0][i].item()
            torch.testing.assert_close(alone[1][0], together[1][i], rtol=1e-14, atol=1e-17)
            accepted_in_all.add((k, alone[0].item()))
    assert accepted_in_all == {(k, accepted) for k in lengths for accepted in range(k + 1)}


# --- coupled ----------------------------------------------------------------------------------------------------------------


def coupling_ratios(p: Tensor, q: Tensor) -> Tensor:
    """r_ij = max(p_j / p_i, q_j / q_i), [C, V, V] from [C, V]; inf where token i lacks mass in either."""
    ratio = [probs[:, None] / probs[:, :, None] for probs in (p, q)]
    possible = (p > 0) & (q > 0)
    return torch.where(possible[:, :, None], torch.maximum(*ratio), torch.inf)


def closed_form(p: Tensor, q: Tensor) -> Tensor:
    """Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i) of p and q [C, V]: the probability that both exponential races have one winner."""
    return coupling_ratios(p, q).sum(dim=2).reciprocal().sum(dim=1)


def both_races(p: Tensor, q: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Whether `coupled` keeps the draft token, and what it commits, under exponential noise: p, q, times [C, V] -> [C] each.

    Gumbel noise is -log of exponential noise, so the larger log p + G is the smaller time / p.
    """
    n = len(p)
    noise = -times.clamp(1e-300, 1e300).log()
    drafted = (q.log() + noise).argmax(dim=-1)
    drafts = Drafts(drafted[:, None], torch.ones_like(drafted), 2 * torch.arange(n))

    def draw(weights: Tensor, rows: Tensor) -> Tensor:
        return (weights + noise[rows // 2]).argmax(dim=-1)

    verdicts = coupled(drafts, p.log().repeat_interleave(2, dim=0), draw)
    return verdicts.accepted == 1, verdicts.tokens


@pytest.mark.parametrize("vocab", [2, 3, 4, 8, 16])
def test_coupled_acceptance_is_its_closed_form(vocab: int) -> None:
    """Bug guarded: draft and target do not share their race, which costs acceptance and nothing else, so no other test sees it.

    Given that token i arrives at time 1, both races are its own exactly while every other time exceeds r_ij: looked at just
    inside of all faces of that orthant and just outside of each. Races do not depend on the unit of time, so the acceptance is
    Σ_i ∫ exp(-x Σ_j r_ij) dx, the closed form. 20 cases of each kind.
    """
    tables = [random_tables(kind, vocab, 4, 20) for kind in KINDS]
    p, q = torch.cat([p[:, -1] for p, _ in tables]), torch.cat([q[:, -1] for _, q in tables])
    faces = coupling_ratios(p, q)
    for token in range(vocab):
        orthant, possible = faces[:, token], faces[:, token].isfinite().all(dim=1)
        inside = torch.where(possible[:, None], orthant * (1 + 1e-12), 1e300)
        inside[:, token] = 1.0
        kept, own = both_races(p, q, inside)
        assert torch.equal(kept & (own == token), possible)
        for other in set(range(vocab)) - {token}:
            outside = torch.full_like(inside, 1e300)
            outside[:, token], outside[:, other] = 1.0, orthant[:, other] * (1 - 1e-12)
            kept, own = both_races(p, q, outside)
            blocked = orthant[:, other] > 0
            assert torch.equal(kept & (own == token), possible & ~blocked)


@pytest.mark.parametrize("vocab", range(2, 17))
def test_coupled_acceptance_is_within_its_bounds(vocab: int) -> None:
    """Bug guarded: a closed form with p and q mixed up: it lies between (1 - TV) / (1 + TV) and 1 - TV, and is 1 - TV exactly
    for two tokens."""
    tables = [random_tables(kind, vocab, 5, 20) for kind in KINDS]
    p, q = torch.cat([p for p, _ in tables]).flatten(0, 1), torch.cat([q for _, q in tables]).flatten(0, 1)
    alpha, tv = closed_form(p, q), 0.5 * (p - q).abs().sum(dim=1)
    assert (alpha >= (1 - tv) / (1 + tv) - 1e-12).all()
    assert (alpha <= 1 - tv + 1e-12).all()
    if vocab == 2:
        torch.testing.assert_close(alpha, 1 - tv, rtol=0, atol=1e-12)


NUM_DRAWS = 100_000


def keys_of_draws(stream: Stream, position: int = 17) -> Tensor:
    seeds = torch.arange(NUM_DRAWS)
    return row_keys(seeds, torch.full_like(seeds, position), stream)


def accepted_fraction(p: Tensor, q: Tensor, draft_keys: Tensor, target_keys: Tensor) -> float:
    """Of drafts of one token, drawn with the engine's noise. p, q [V]."""
    drafted = gumbel_argmax(q.log().expand(NUM_DRAWS, -1), draft_keys)
    rows = torch.stack([target_keys, keys_of_draws(Stream.COUPLED, 18)], dim=1).flatten()
    drafts = Drafts(drafted[:, None], torch.ones(NUM_DRAWS, dtype=torch.int64), 2 * torch.arange(NUM_DRAWS))
    verdicts = coupled(drafts, p.log().expand(2 * NUM_DRAWS, -1), lambda weights, at: gumbel_argmax(weights, rows[at]))
    return verdicts.accepted.double().mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_acceptance_with_real_noise(kind: str) -> None:
    """Bug guarded: the noise that draft and target share is not Gumbel noise, or the draft's is another position's. Five
    standard deviations: false alarm 6e-7 per case."""
    p, q = (table[0, -1] for table in random_tables(kind, 6, 1))
    keys = keys_of_draws(Stream.COUPLED)
    alpha = closed_form(p[None], q[None]).item()
    tolerance = 5 * math.sqrt(max(alpha * (1 - alpha), 1e-9) / NUM_DRAWS)
    assert abs(accepted_fraction(p, q, keys, keys) - alpha) < tolerance


def test_coupled_acceptance_needs_the_same_noise() -> None:
    """Bug guarded: the test above would also pass with noise of another stream."""
    p, q = (table[0, -1] for table in random_tables("nearly equal", 5, 1))
    apart = accepted_fraction(p, q, keys_of_draws(Stream.DRAFT), keys_of_draws(Stream.COUPLED))
    assert apart == pytest.approx((p * q).sum().item(), abs=0.01)
    assert apart < closed_form(p[None], q[None]).item() - 0.1


# --- the table --------------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_table_can_be_requested() -> None:
    """Bug guarded: a rule in the table that no request may name, or one that a request may name and nobody implements."""
    assert all(name == rule.name and rule.summary for name, rule in RULES.items())
    assert set(RULES) == {"greedy", *SAMPLING_RULES}
    assert {name for name, rule in RULES.items() if rule.wire == "sparse_q"} == set(RATIO_RULES)
    for name in SAMPLING_RULES:
        params = SamplingParams(rule=name)
        check_request(GenerateRequest(request_id="r", prompt_ids=(1,), params=params), model_info())
        assert params.acceptance_rule == name
        assert SamplingParams(rule=name, temperature=0.0).acceptance_rule == "greedy"

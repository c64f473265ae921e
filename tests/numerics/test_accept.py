"""Acceptance rules as pure functions: their distributions are computed, not sampled.

`read_rule` treats a rule as a black box. By bisection it reads the probability with which each draft token is kept (the largest
uniform that is accepted) and the weights of the token drawn instead (the difference of noise at which another token wins is the
difference of their log weights). With these, the distribution of what a round commits is a finite sum.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.accept import RULES, DraftProbs, Drafts, Verdicts, coupled, greedy, rejection
from engine.accept.base import leading_true, match_own_tokens
from engine.accept.coupled import draw
from engine.noise import Stream, gumbel, row_keys
from engine.request import check_request
from engine.testing import model_info
from engine.types import GenerateRequest, SamplingParams

RatioRule = Callable[[Drafts, Tensor, DraftProbs, Tensor, Tensor], Verdicts]
FAR = 800.0
"""Noise that outweighs every weight of a float64."""


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


@pytest.mark.parametrize("lists", [[], [()], [(), ()]])
def test_without_any_draft(lists: list[tuple[int, ...]]) -> None:
    """Bug guarded: a round of plain decoding (K = 0 everywhere) fails on empty tensors."""
    n = len(lists)
    logits = torch.randn(n, 4)
    drafts = Drafts.from_lists(lists)
    own = logits.argmax(dim=-1)
    q = DraftProbs(torch.zeros(n, 0, 1, dtype=torch.int64), torch.zeros(n, 0, 1, dtype=torch.float64))
    noise = torch.zeros(n, 4, dtype=torch.float64)
    p = torch.softmax(logits.double(), dim=-1)
    for verdicts in (greedy(drafts, logits), coupled(drafts, logits, noise), rejection(drafts, p, q, torch.zeros(n, 0), noise)):
        assert verdicts.accepted.tolist() == [0] * n
        assert verdicts.tokens.tolist() == own.tolist()


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


# --- greedy -----------------------------------------------------------------------------------------------------------------


def test_greedy_ties_take_the_lowest_id() -> None:
    """Bug guarded: draft and target break ties differently, or differently from run to run, and greedy text is not
    reproducible."""
    logits = torch.zeros(6, 50_000)
    logits[:, [777, 778, 40_000]] = 3.0
    verdicts = greedy(Drafts.from_lists([(777, 778), (777, 777)]), logits)
    assert verdicts.accepted.tolist() == [1, 2]
    assert verdicts.tokens.tolist() == [777, 777]


def test_greedy_ignores_how_likely_the_draft_was() -> None:
    """Bug guarded: the ratio test on raw probabilities keeps a token that is not the most likely one (case L08)."""
    verdicts = greedy(Drafts.from_lists([(0,)]), torch.tensor([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2]]).log())
    assert (verdicts.accepted.tolist(), verdicts.tokens.tolist()) == ([0], [1])


# --- rejection, computed ----------------------------------------------------------------------------------------------------


def dense(q: Tensor) -> DraftProbs:
    """q [N, K, V] as pairs, in an order that is not the vocabulary's."""
    ids = torch.arange(q.shape[-1] - 1, -1, -1).expand(q.shape).contiguous()
    return DraftProbs(ids, q.flip(-1))


def read_accept(rule: RatioRule, tokens: Tensor, p: Tensor, q: Tensor, position: int) -> Tensor:
    """Probability that draft token ``position`` is kept, given that those before it were: [N]. tokens [N, K], p [N, K+1, V]."""
    n, depth = tokens.shape
    drafts = Drafts.from_lists([tuple(row) for row in tokens.tolist()])
    noise = torch.zeros(n, p.shape[-1], dtype=torch.float64)
    low, high = torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        uniforms = torch.full((n, depth), 1e-300, dtype=torch.float64)
        uniforms[:, position] = middle
        kept = rule(drafts, p.flatten(0, 1), dense(q), uniforms, noise).accepted > position
        low, high = torch.where(kept, middle, low), torch.where(kept, high, middle)
    return low


def read_next(rule: RatioRule, tokens: Tensor, p: Tensor, q: Tensor, accepted: int) -> Tensor:
    """Distribution of the token after ``accepted`` kept ones, [N, V]; the next draft token, if there is one, is refused."""
    n, depth = tokens.shape
    vocab = p.shape[-1]
    tokens, p, q = (tensor.repeat_interleave(vocab, dim=0) for tensor in (tokens, p, q))
    drafts, rows, flat_p, pairs = (
        Drafts.from_lists([tuple(row) for row in tokens.tolist()]),
        torch.arange(n * vocab),
        p.flatten(0, 1),
        dense(q),
    )
    uniforms = torch.full((n * vocab, depth), 1e-300, dtype=torch.float64)
    uniforms[:, accepted:] = 1.0

    def winner(noise: Tensor) -> Tensor:
        verdicts = rule(drafts, flat_p, pairs, uniforms, noise)
        return torch.where(verdicts.accepted == accepted, verdicts.tokens, -1)

    challenger = torch.arange(vocab).repeat(n)
    reference = winner(torch.zeros(n * vocab, vocab, dtype=torch.float64))
    low, high = torch.full((n * vocab,), -FAR, dtype=torch.float64), torch.full((n * vocab,), FAR, dtype=torch.float64)
    for _ in range(64):
        middle = (low + high) / 2
        noise = torch.full((n * vocab, vocab), -FAR, dtype=torch.float64)
        noise[rows, reference.clamp_min(0)] = 0.0
        noise[rows, challenger] = middle
        won = winner(noise) == challenger
        low, high = torch.where(won, low, middle), torch.where(won, middle, high)
    weight = torch.where(high >= FAR / 2, 0.0, (-high).exp())
    weight = torch.where(challenger == reference, 1.0, weight).view(n, vocab)
    return torch.where((reference.view(n, vocab)[:, :1] < 0), torch.nan, weight / weight.sum(dim=1, keepdim=True))


def committed_distribution(rule: RatioRule, p: Tensor, q: Tensor, depth: int) -> Tensor:
    """Joint distribution of the next depth + 1 tokens over all drafts, noise and lengths: [V] * (depth + 1).

    ``p`` and ``q`` [V + 1, V] are the distributions after each last token (row V: at the start). What a round leaves open is
    filled in by the target itself.
    """
    vocab = p.shape[1]
    tokens = torch.tensor(list(itertools.product(range(vocab), repeat=depth)), dtype=torch.int64).view(-1, depth)
    before = torch.cat([torch.full((len(tokens), 1), vocab), tokens], dim=1)
    p_rows, q_rows = p[before], q[before[:, :-1]]
    drawn = q_rows.gather(2, tokens[..., None]).squeeze(2).prod(dim=1)
    joint = torch.zeros([vocab] * (depth + 1), dtype=torch.float64)
    alive = drawn
    for accepted in range(depth + 1):
        keeps = read_accept(rule, tokens, p_rows, q_rows, accepted) if accepted < depth else torch.zeros(len(tokens))
        mass = alive * (1 - keeps)
        following = torch.where((mass > 0)[:, None], read_next(rule, tokens, p_rows, q_rows, accepted), 0.0)
        for row in range(len(tokens)):
            tail = following[row] * mass[row]
            for _ in range(depth - accepted):
                tail = tail[..., None] * p[:vocab]
            joint[tuple(tokens[row, :accepted].tolist())] += tail
        alive = alive * keeps
    return joint


def target_distribution(p: Tensor, depth: int) -> Tensor:
    joint = p[-1]
    for _ in range(depth):
        joint = joint[..., None] * p[:-1]
    return joint


def random_tables(vocab: int, seed: int, kind: str) -> tuple[Tensor, Tensor]:
    """p and q [V + 1, V]."""
    generator = torch.Generator().manual_seed(1000 * vocab + seed)
    p, q = (
        torch.softmax(2.0 * torch.randn(vocab + 1, vocab, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2)
    )
    if kind == "equal":
        return p, p.clone()
    if kind == "q lacks tokens":
        q[:, : vocab // 2] = 0.0
    elif kind == "p lacks tokens":
        p[:, vocab // 2 + 1 :] = 0.0
    elif kind == "disjoint":
        p[:, 1:] = 0.0
        q[:, 0] = 0.0
    elif kind == "q is certain":
        q = torch.nn.functional.one_hot(torch.randint(vocab, (vocab + 1,), generator=generator), vocab).double()
    elif kind == "p is certain":
        p = torch.nn.functional.one_hot(torch.randint(vocab, (vocab + 1,), generator=generator), vocab).double()
    elif kind == "nearly equal":
        q = p * (1 + 1e-9 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return p / p.sum(dim=-1, keepdim=True), q / q.sum(dim=-1, keepdim=True)


KINDS = ["random", "equal", "nearly equal", "q lacks tokens", "p lacks tokens", "disjoint", "q is certain", "p is certain"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth", "repeats"), [(2, 1, 2), (5, 1, 2), (2, 3, 1), (3, 2, 1), (4, 2, 1), (3, 3, 1)])
def test_rejection_is_exact(vocab: int, depth: int, repeats: int, kind: str) -> None:
    """Bug guarded: any error in the ratio test, the residual or the bonus token, at any probability: the joint distribution of
    the next depth + 1 tokens equals the target's to 1e-12 (cases L05, L06)."""
    for seed in range(repeats):
        p, q = random_tables(vocab, seed, kind)
        error = (committed_distribution(rejection, p, q, depth) - target_distribution(p, depth)).abs().max().item()
        assert error < 1e-12


def _residual_of_p(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
    """Wrong: after a refusal it draws from p instead of p - q."""
    good = rejection(drafts, p, q, uniforms, noise)
    own = (p[drafts.first_row + good.accepted].log() + noise).argmax(dim=-1)
    return Verdicts(good.accepted, own)


def _q_of_another_temperature(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
    """Wrong: tests against the q before temperature 0.5, not the one that the token was drawn from."""
    flat = q.probs.sqrt()
    return rejection(drafts, p, DraftProbs(q.ids, flat / flat.sum(dim=-1, keepdim=True)), uniforms, noise)


def _bonus_from_q(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
    """Wrong: after a full acceptance the next token comes from the draft's last distribution."""
    good = rejection(drafts, p, q, uniforms, noise)
    last = torch.zeros(len(noise), p.shape[1], dtype=p.dtype).scatter_add(1, q.ids[:, -1], q.probs[:, -1])
    return Verdicts(
        good.accepted, torch.where(good.accepted == drafts.lengths, (last.log() + noise).argmax(dim=-1), good.tokens)
    )


def _greedy_acceptance(drafts: Drafts, p: Tensor, q: DraftProbs, uniforms: Tensor, noise: Tensor) -> Verdicts:
    """Wrong: keeps whatever the target finds more likely than not, as "typical acceptance" does."""
    return rejection(drafts, p, q, torch.full_like(uniforms, 0.5), noise)


@pytest.mark.parametrize("wrong", [_residual_of_p, _q_of_another_temperature, _bonus_from_q, _greedy_acceptance])
def test_the_computation_finds_wrong_rules(wrong: RatioRule) -> None:
    """Bug guarded: a computation that says "exact" to everything."""
    p, q = random_tables(4, 0, "random")
    assert (committed_distribution(wrong, p, q, 2) - target_distribution(p, 2)).abs().max().item() > 1e-3


def test_the_probability_of_keeping_is_the_ratio() -> None:
    """Bug guarded: exact, but wasteful: a rule that refuses more than it must is just as lossless."""
    p, q = random_tables(5, 3, "random")
    tokens = torch.arange(5)[:, None]
    keeps = read_accept(rejection, tokens, p[-1].expand(5, 2, 5), q[-1].expand(5, 1, 5), 0)
    torch.testing.assert_close(keeps, (p[-1] / q[-1]).clamp_max(1.0), rtol=0, atol=1e-14)


def test_a_token_without_mass_is_never_kept() -> None:
    """Bug guarded: p(x) = 0 is kept because u * q(x) underflows to the same zero, so a filtered token appears (case L06)."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    q = DraftProbs(torch.tensor([[[0, 1]]]), torch.tensor([[[5e-324, 1.0]]], dtype=torch.float64))
    tiny = torch.tensor([[2.0**-53]], dtype=torch.float64)
    verdicts = rejection(Drafts.from_lists([(0,)]), p, q, tiny, torch.zeros(1, 2, dtype=torch.float64))
    assert (verdicts.accepted.item(), verdicts.tokens.item()) == (0, 1)


def test_sequences_of_different_depths_do_not_mix() -> None:
    """Bug guarded: padding of a short draft is taken for a token, or its residual for that of a longer one: each sequence
    decided in a batch equals itself decided alone."""
    generator = torch.Generator().manual_seed(5)
    vocab, lists = 6, [(1, 2, 3), (), (4,), (0, 0), (5, 1, 2)]
    rows = sum(len(draft) + 1 for draft in lists)
    for _ in range(50):
        p = torch.softmax(torch.randn(rows, vocab, generator=generator, dtype=torch.float64), dim=-1)
        q = torch.softmax(torch.randn(len(lists), 3, vocab, generator=generator, dtype=torch.float64), dim=-1)
        uniforms = torch.rand(len(lists), 3, generator=generator, dtype=torch.float64)
        noise = -(-torch.rand(len(lists), vocab, generator=generator, dtype=torch.float64).log()).log()
        together = rejection(Drafts.from_lists(lists), p, dense(q), uniforms, noise)
        first = 0
        for i, draft in enumerate(lists):
            k = len(draft)
            alone = rejection(
                Drafts.from_lists([draft]),
                p[first : first + k + 1],
                dense(q[i : i + 1, :k]),
                uniforms[i : i + 1, :k],
                noise[i : i + 1],
            )
            first += k + 1
            assert (alone.accepted.item(), alone.tokens.item()) == (together.accepted[i].item(), together.tokens[i].item())


# --- coupled ----------------------------------------------------------------------------------------------------------------

NUM_DRAWS = 200_000


def shared_noise(vocab: int, stream: Stream = Stream.COUPLED) -> Tensor:
    seeds = torch.arange(NUM_DRAWS)
    return gumbel(row_keys(seeds, torch.full_like(seeds, 17), stream), torch.arange(vocab))


def closed_form(p: Tensor, q: Tensor) -> float:
    """Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i): the probability that both exponential races have the same winner."""
    total = 0.0
    for i in range(len(p)):
        if p[i] > 0 and q[i] > 0:
            total += 1.0 / torch.maximum(p / p[i], q / q[i]).sum().item()
    return total


def accepted_fraction(p: Tensor, q: Tensor, draft_noise: Tensor, target_noise: Tensor) -> float:
    drafted = draw(q.log().expand(NUM_DRAWS, -1), draft_noise)
    own = draw(p.log().expand(NUM_DRAWS, -1), target_noise)
    rows = torch.stack([own, own], dim=1).flatten()
    drafts = Drafts(drafted[:, None], torch.ones(NUM_DRAWS, dtype=torch.int64), 2 * torch.arange(NUM_DRAWS))
    verdicts = match_own_tokens(drafts, rows)
    assert torch.equal(verdicts.tokens, own), "what is committed is the target's own token"
    return verdicts.accepted.double().mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [2, 5, 12])
def test_coupled_acceptance_has_its_closed_form(vocab: int, kind: str) -> None:
    """Bug guarded: draft and target do not really share their noise (another position, stream or order of tokens), which costs
    acceptance and nothing else, so no other test sees it. Five standard deviations: false alarm 6e-7 per case."""
    p, q = (table[-1] for table in random_tables(vocab, 1, kind))
    noise = shared_noise(vocab)
    alpha = closed_form(p, q)
    tolerance = 5 * math.sqrt(max(alpha * (1 - alpha), 1e-9) / NUM_DRAWS)
    assert abs(accepted_fraction(p, q, noise, noise) - alpha) < tolerance
    tv = 0.5 * (p - q).abs().sum().item()
    assert (1 - tv) / (1 + tv) - 1e-12 <= alpha <= 1 - tv + 1e-12


def test_coupled_acceptance_needs_the_same_noise() -> None:
    """Bug guarded: the test above would also pass with noise of another stream."""
    p, q = (table[-1] for table in random_tables(5, 1, "random"))
    apart = accepted_fraction(p, q, shared_noise(5, Stream.DRAFT), shared_noise(5))
    assert apart == pytest.approx((p * q).sum().item(), abs=0.01)
    assert apart < closed_form(p, q) - 0.1


def test_candidates_in_any_order_draw_the_same_token() -> None:
    """Bug guarded: the column number instead of the token id is committed when only some tokens have a chance."""
    logits, ids = torch.randn(40, 30), torch.stack([torch.randperm(30) for _ in range(40)])
    keys = row_keys(torch.arange(40), torch.arange(40), Stream.COUPLED)
    everything = draw(logits, gumbel(keys, torch.arange(30)))
    assert torch.equal(draw(logits.gather(1, ids), gumbel(keys, ids), ids), everything)


# --- the table --------------------------------------------------------------------------------------------------------------


def test_every_rule_of_the_table_can_be_requested() -> None:
    """Bug guarded: a rule in the table that no request may name, or one that a request may name and nobody implements."""
    assert all(name == rule.name and rule.summary for name, rule in RULES.items())
    assert RULES["rejection"].wire == "sparse_q"
    assert RULES["coupled"].wire == RULES["greedy"].wire == "ids"
    for name in set(RULES) - {"greedy"}:
        params = SamplingParams(rule=name)
        check_request(GenerateRequest(request_id="r", prompt_ids=(1,), params=params), model_info())
        assert params.acceptance_rule == name
        assert SamplingParams(rule=name, temperature=0.0).acceptance_rule == "greedy"

"""Processing and deciding against a reference written row by row with Python numbers."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import processing, sampling
from engine.noise import Stream, gumbel, row_keys, signed64, uniform
from engine.sampling import Decision, SampledSequence, decide, propose_tokens
from engine.types import SamplingParams, SparseProbs

EOS = (0, 3)
VOCAB = 40
MARGIN = 1e-5
"""Between a cumulated probability and a threshold: closer ones are decided by rounding and left out."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


def params_of(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1000, **fields})  # type: ignore[arg-type]


# --- the reference ----------------------------------------------------------------------------------------------------------


def penalised(row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Penalties, bias and min_tokens for the token after ``prompt`` + ``output``."""
    logits = list(row)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in (*EOS, *params.stop_token_ids):
            logits[token] = -math.inf
    return logits


def distribution(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Temperature and filters: token id -> probability. Of equally likely tokens the lower id comes first."""
    scaled = {token: logit / params.temperature for token, logit in enumerate(logits) if logit > -math.inf}
    ranking = sorted(scaled, key=lambda token: (-scaled[token], token))
    if params.top_k:
        ranking = ranking[: params.top_k]
    if params.top_p < 1.0:
        probs = softmax({token: scaled[token] for token in ranking})
        before = [0.0, *itertools.accumulate(probs[token] for token in ranking)]
        assume(all(abs(mass - params.top_p) > MARGIN for mass in before))
        ranking = [token for token, mass in zip(ranking, before, strict=False) if mass < params.top_p]
    scaled = {token: scaled[token] for token in ranking}
    floor = max(scaled.values()) + (math.log(params.min_p) if params.min_p else -math.inf)
    if params.min_p not in (0.0, 1.0):
        assume(all(abs(logit - floor) > MARGIN for logit in scaled.values()))
    return softmax({token: logit for token, logit in scaled.items() if logit >= floor})


def softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    weights = {token: math.exp(logit - top) for token, logit in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def noise_of(params: SamplingParams, position: int, stream: Stream, vocab: int = VOCAB) -> list[float]:
    keys = row_keys(torch.tensor([signed64(params.seed)]), torch.tensor([position]), stream)
    row: list[float] = gumbel(keys, torch.arange(vocab))[0].tolist()
    return row


def race(probs: dict[int, float], noise: Sequence[float]) -> int:
    return max(probs, key=lambda token: math.log(probs[token]) + noise[token])


def reference_decision(rows: Sequence[Sequence[float]], sequence: SampledSequence) -> tuple[int, int]:
    """(accepted, token) by walking the rows one after another, as decoding without drafts would."""
    params, prompt = sequence.params, sequence.ids[: sequence.prompt_length]
    output = sequence.ids[sequence.prompt_length : sequence.first_position]
    accepted = 0
    while True:
        position = sequence.first_position + accepted
        drafted = sequence.draft[accepted] if accepted < len(sequence.draft) else None
        logits = penalised(rows[accepted], params, prompt, output)
        if params.acceptance_rule == "block":
            return reference_block(rows, sequence)
        if params.acceptance_rule == "rejection":
            kept, own = reference_ratio_test(distribution(logits, params), sequence, accepted, position)
        else:
            probs = {logits.index(max(logits)): 1.0} if params.greedy else distribution(logits, params)
            own = race(probs, noise_of(params, position, Stream.COUPLED))
            kept = own == drafted
        if not kept or drafted is None:
            return accepted, own
        output = [*output, drafted]
        accepted += 1


def reference_ratio_test(p: dict[int, float], sequence: SampledSequence, index: int, position: int) -> tuple[bool, int]:
    resample = noise_of(sequence.params, position, Stream.RESAMPLE)
    if index == len(sequence.draft):
        return False, race(p, resample)
    drafted = sequence.draft[index]
    q = dict(zip(*sequence.draft_probs[index], strict=True)) if sequence.draft_probs else {drafted: 1.0}
    keys = row_keys(torch.tensor([signed64(sequence.params.seed)]), torch.tensor([sequence.first_position]), Stream.ACCEPT)
    u = uniform(keys, torch.tensor([index])).item()
    if u * q[drafted] < p.get(drafted, 0.0):
        return True, drafted
    left = {token: mass - q.get(token, 0.0) for token, mass in p.items() if mass > q.get(token, 0.0)}
    return False, race(left or p, resample)


def reference_block(rows: Sequence[Sequence[float]], sequence: SampledSequence) -> tuple[int, int]:
    """Sun et al. 2024, algorithm 2, with sums over the whole vocabulary."""
    params, depth = sequence.params, len(sequence.draft)
    prompt, output = sequence.ids[: sequence.prompt_length], sequence.ids[sequence.prompt_length : sequence.first_position]
    p = [distribution(penalised(rows[i], params, prompt, [*output, *sequence.draft[:i]]), params) for i in range(depth + 1)]
    q = [dict(zip(*pairs, strict=True)) for pairs in sequence.draft_probs or [((t,), (1.0,)) for t in sequence.draft]]
    reach, accepted = [1.0], 0
    for i, drafted in enumerate(sequence.draft, start=1):
        reach.append(min(1.0, reach[-1] * p[i - 1].get(drafted, 0.0) / q[i - 1][drafted]))
        left = sum(max(0.0, reach[i] * mass - q[i].get(token, 0.0)) for token, mass in p[i].items()) if i < depth else 0.0
        passes = reach[i] if i == depth else left / (left + 1 - reach[i]) if left + 1 - reach[i] > 0 else 1.0
        keys = row_keys(torch.tensor([signed64(params.seed)]), torch.tensor([sequence.first_position]), Stream.ACCEPT)
        u = uniform(keys, torch.tensor([i - 1])).item()
        assume(abs(u - passes) > MARGIN)
        accepted = i if u < passes else accepted
    resample = noise_of(params, sequence.first_position + accepted, Stream.RESAMPLE)
    if accepted == depth:
        return accepted, race(p[depth], resample)
    scaled = {token: reach[accepted] * mass - q[accepted].get(token, 0.0) for token, mass in p[accepted].items()}
    left_over = {token: mass for token, mass in scaled.items() if mass > MARGIN**2}
    return accepted, race(left_over or p[accepted], resample)


def read_distribution(row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> dict[int, float]:
    """The distribution that a draft reports is the one that p comes from too."""
    sequence = SampledSequence(params, len(prompt), [*prompt, *output])
    ((token, pairs, finite),) = propose_tokens(row[None], [sequence], EOS, num_probs=len(row))
    assert finite
    assert pairs is not None
    probs = dict(zip(*pairs, strict=True))
    assert probs[token] > 0
    return probs


options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
        "top_p": st.sampled_from([1e-9, 0.31, 0.6, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.6, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.4, 0.9]),
        "logit_bias": st.sampled_from([{}, {7: 2.5}, {0: 4.0, 39: -100.0}]),
        "min_tokens": st.sampled_from([0, 1, 4, 9]),
        "stop_token_ids": st.sampled_from([(), (5,)]),
        "seed": st.integers(0, (1 << 64) - 1),
    }
)
tokens = st.integers(0, VOCAB - 1)


def random_rows(count: int, seed: int, ties: bool = False, vocab: int = VOCAB) -> Tensor:
    rows = 2.0 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    return (rows * 2).round() / 2 if ties else rows


# --- filters ----------------------------------------------------------------------------------------------------------------


@given(options, st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6), st.integers(0, 10_000), st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_distribution_equals_the_reference(
    fields: dict[str, object], prompt: list[int], output: list[int], seed: int, ties: bool
) -> None:
    """Bug guarded: an option applied in another order, to the wrong tokens, or only partly; a tie at the edge of a filter that
    is cut according to the order of a sort (case L06)."""
    (row,) = random_rows(1, seed, ties)
    params = params_of(rule="rejection", **fields)
    wanted = distribution(penalised(row.tolist(), params, prompt, output), params)
    found = read_distribution(row, params, prompt, output)
    assert set(found) == set(wanted)
    assert found == pytest.approx(wanted, rel=2e-5)


def test_ties_at_the_edge_go_to_the_lowest_id() -> None:
    """Bug guarded: which of equally likely tokens is kept depends on the order of a sort, which differs between draft and
    target; top_k keeps more than k; a tiny top_p is not greedy where two tokens tie (case L12)."""
    row = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0, 1.0])
    for fields, kept in (
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"min_p": math.exp(-1.0)}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
    ):
        assert set(read_distribution(row, params_of(rule="rejection", **fields), [9], [])) == kept, fields


def test_top_p_is_measured_on_what_top_k_left() -> None:
    """Bug guarded: the nucleus is taken from the whole distribution, so that top-k and top-p together keep too many."""
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(read_distribution(row, params_of(rule="rejection", top_p=0.5), [9], [])) == {0, 1}
    assert set(read_distribution(row, params_of(rule="rejection", top_p=0.5, top_k=2), [9], [])) == {0}


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.97}, {"top_p": 0.9999}, {"top_k": 900}, {"min_p": 1e-3}, {"top_k": 600, "top_p": 0.95}, {"top_p": 0.5}],
    ids=str,
)
def test_a_filter_may_reach_beyond_the_first_window(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a flat distribution is silently cut after the first candidates, so that likely tokens never appear."""
    row = 0.3 * torch.randn(2000, generator=torch.Generator().manual_seed(2))
    params = params_of(rule="rejection", **fields)
    found = []
    for windows in ((0.1, 0.4, torch.inf), (1.5, torch.inf), (torch.inf,)):
        monkeypatch.setattr(processing, "WINDOWS", windows)
        found.append(read_distribution(row, params, [1], []))
    wanted = distribution(row.tolist(), params)
    assert len(wanted) > 16
    for probs in found:
        assert set(probs) == set(wanted)
        assert probs == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("fields", [{}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1.1e-5, 1e-4, 0.01])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_tiny_temperatures_are_greedy(rule: str, temperature: float, fields: dict[str, object]) -> None:
    """Bug guarded: dividing by a tiny temperature overflows to NaN or an empty support (case L12)."""
    rows = random_rows(10, 3)
    rows[:, 17] = rows.amax(dim=1) + 1.0
    sequences = [SampledSequence(params_of(rule=rule, temperature=temperature, seed=s, **fields), 1, [1]) for s in range(10)]
    assert [d.token for d in decide(rows, sequences, EOS)] == [17] * 10


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_filters_that_leave_one_token_are_greedy(rule: str, fields: dict[str, object]) -> None:
    """Bug guarded: the narrowest filter keeps two tokens, or none."""
    rows = random_rows(20, 4)
    sequences = [SampledSequence(params_of(rule=rule, temperature=2.0, seed=s, **fields), 1, [1]) for s in range(20)]
    assert [d.token for d in decide(rows, sequences, EOS)] == rows.argmax(dim=1).tolist()


def test_sampling_is_not_greedy() -> None:
    """Bug guarded: the temperature has no effect on the speculative path, so that every seed gives the same text (case L07)."""
    rows = random_rows(1, 5).expand(64, -1)
    for rule in ("coupled", "rejection"):
        sequences = [SampledSequence(params_of(rule=rule, temperature=1.5, seed=s), 1, [1]) for s in range(64)]
        assert len({d.token for d in decide(rows, sequences, EOS)}) > 10


# --- decisions --------------------------------------------------------------------------------------------------------------


def make_draft(rows: Tensor, params: SamplingParams, ids: list[int], depth: int, luck: int) -> SampledSequence:
    """A draft whose tokens are often right: proposed from the target's own rows, slightly changed."""
    draft: list[int] = []
    probs: list[SparseProbs] = []
    for j in range(depth):
        changed = rows[j] + 0.5 * random_rows(1, 100 * luck + j)[0]
        ((token, pairs, _),) = propose_tokens(changed[None], [SampledSequence(params, 2, [*ids, *draft])], EOS)
        draft.append(token)
        probs += [pairs] if pairs is not None else []
    return SampledSequence(params, 2, [*ids, *draft], tuple(draft), tuple(probs) if probs else None)


batches = st.lists(
    st.tuples(
        options,
        st.sampled_from(["coupled", "rejection", "block", "greedy"]),
        st.lists(tokens, min_size=2, max_size=7),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=5,
)


@given(batches, st.integers(0, 10_000), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_mixed_batch_decides_as_the_reference_does(
    members: list[tuple[dict[str, object], str, list[int], int]], seed: int, ties: bool
) -> None:
    """Bug guarded: rows, keys or parameters of one request are used for another one in the batch; a wrong stream or position;
    draft tokens that penalties do not see (cases L13, L14)."""
    rows = random_rows(sum(depth + 1 for *_, depth in members), seed, ties)
    sequences, first = [], 0
    for i, (fields, rule, ids, depth) in enumerate(members):
        named = {"rule": rule} if rule != "greedy" else {"temperature": 0.0}
        params = params_of(**{**fields, **named})
        sequences.append(make_draft(rows[first:], params, ids, depth, seed + i))
        first += depth + 1
    decisions = decide(rows, sequences, EOS)
    first = 0
    for sequence, decision in zip(sequences, decisions, strict=True):
        wanted = reference_decision(rows[first : first + sequence.num_rows].tolist(), sequence)
        first += sequence.num_rows
        assert (decision.accepted, decision.token) == wanted


def step_by_step(rows: Tensor, params: SamplingParams, prompt: list[int]) -> list[int]:
    """Tokens without any draft."""
    ids = list(prompt)
    for row in rows:
        (decision,) = decide(row[None], [SampledSequence(params, len(prompt), ids)], EOS)
        ids = [*ids, decision.token]
    return ids[len(prompt) :]


PENALTIES = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 0.7, "frequency_penalty": 2.0},
    {"min_tokens": 5, "logit_bias": {0: 8.0}},
]


@pytest.mark.parametrize("fields", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_count_the_drafted_prefix(fields: dict[str, object], temperature: float) -> None:
    """Bug guarded: every row of a draft is penalised with the committed tokens only, so that penalties weaken as acceptance
    rises (case L14). The same logits in every row: only the penalties make the text move."""
    rows = random_rows(1, 8).expand(9, -1)
    prompt = [4, 9]
    plain = step_by_step(rows, params_of(temperature=temperature, seed=5), prompt)
    params = params_of(temperature=temperature, seed=5, **fields)
    text = step_by_step(rows, params, prompt)
    assert text != plain, "the penalty has an effect here"
    (decision,) = decide(rows, [SampledSequence(params, 2, [*prompt, *text[:8]], tuple(text[:8]))], EOS)
    assert (decision.accepted, decision.token) == (8, text[8])


@pytest.mark.parametrize("already", [0, 2, 4, 5, 7])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_min_tokens_masks_the_end_for_exactly_the_first_positions(rule: str, already: int) -> None:
    """Bug guarded: min_tokens counted in rounds, from the prompt's start, or off by one inside a draft (case L17)."""
    rows = torch.full((7, VOCAB), -5.0)
    rows[:, 20] = 30.0
    rows[:, [0, 3, 5]] = torch.tensor([90.0, 80.0, 70.0])
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule}
    params = params_of(min_tokens=5, stop_token_ids=(5,), **fields)
    sequence = SampledSequence(params, 3, [1, 1, 1, *[20] * (already + 6)], (20,) * 6)
    (decision,) = decide(rows, [sequence], EOS)
    assert (decision.accepted, decision.token) == (max(5 - already, 0), 0)


def test_logit_bias_forces_and_bans() -> None:
    """Bug guarded: a bias is applied to the wrong row of a draft, or replaced by a penalty on the same token."""
    rows = random_rows(6, 9)
    params = params_of(logit_bias={11: 100.0, 12: -100.0}, presence_penalty=1.0, seed=3)
    forced = SampledSequence(params, 1, [1, 11, 11], (11, 11))
    rows[3:, 12] = 20.0
    banned = SampledSequence(params_of(logit_bias={12: -100.0}, seed=3), 1, [1, 12, 12], (12, 12))
    first, second = decide(rows, [forced, banned], EOS)
    assert (first.accepted, first.token) == (2, 11)
    assert second.accepted == 0
    assert second.token != 12


# --- what is not finite -----------------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Any, float]] = {
    "NaN": (5, math.nan),
    "infinite": (5, math.inf),
    "nothing possible": (slice(None), -math.inf),
}


@pytest.mark.parametrize("broken_row", [0, 1, 2])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_broken_row_fails_only_its_request(rule: str, broken: str, broken_row: int) -> None:
    """Bug guarded: a NaN becomes a token (argmax of NaN is an id), or takes the neighbours down (case L31)."""
    rows = random_rows(9, 10)
    rows[torch.arange(9), torch.tensor([2, 3, 4] * 3)] = 40.0
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule, "top_k": 7}
    sequences = [SampledSequence(params_of(seed=i, logprobs=1, **fields), 1, [1, 2, 3], (2, 3)) for i in range(3)]
    healthy = decide(rows, sequences, EOS)
    assert [decision.accepted for decision in healthy] == [2, 2, 2]
    column, value = BROKEN[broken]
    rows[3 + broken_row, column] = value
    first, second, third = decide(rows, sequences, EOS)
    assert (first, third) == (healthy[0], healthy[2])
    assert second.error is not None
    assert second.logprobs is None


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_wrong_draft_cannot_make_a_request_fail(rule: str, broken: str) -> None:
    """Bug guarded: a row that is broken only after a draft token that the target refuses ends the request, which without that
    draft would have gone on: the draft changes the output."""
    rows = random_rows(3, 10)
    rows[0, 7] = 40.0
    column, value = BROKEN[broken]
    rows[1:, column] = value
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule}
    params = params_of(logprobs=1, **fields)
    (decision,) = decide(rows, [SampledSequence(params, 1, [1, 2, 3], (2, 3))], EOS)
    assert [decision] == decide(rows[:1], [SampledSequence(params, 1, [1])], EOS)
    assert (decision.token, decision.error) == (7, None)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_impossible_tokens_are_never_drawn(rule: str) -> None:
    """Bug guarded: rows that contain -inf (padding of the vocabulary, a model's own mask) are refused, or draw a masked
    token."""
    rows = torch.full((50, VOCAB), -math.inf)
    rows[:, [6, 8]] = 1.0
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule, "top_p": 0.9}
    sequences = [SampledSequence(params_of(seed=i, repetition_penalty=1.2, **fields), 1, [30]) for i in range(50)]
    decisions = decide(rows, sequences, EOS)
    assert {d.token for d in decisions} == ({6} if rule == "greedy" else {6, 8})
    assert all(d.error is None for d in decisions)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_request_whose_options_leave_no_token_fails(rule: str) -> None:
    """Bug guarded: min_tokens masks the only tokens that the model allows; what is left is a row of -inf, from which argmax
    takes token 0 although its probability is zero."""
    rows = random_rows(2, 11)
    rows[0] = -math.inf
    rows[0, list(EOS)] = 1.0
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule}
    first, second = decide(rows, [SampledSequence(params_of(min_tokens=3, **fields), 1, [1]) for _ in range(2)], EOS)
    assert first.error is not None
    assert second.error is None
    ((token, _, usable),) = propose_tokens(rows[:1], [SampledSequence(params_of(min_tokens=3, **fields), 1, [1])], EOS)
    assert (token, usable) == (-1, False)


def test_a_broken_draft_row_is_told() -> None:
    """Bug guarded: a draft invents a token from NaN, or one broken row stops the drafts of the whole batch (case L31)."""
    rows = random_rows(3, 12)
    rows[1, 0] = math.nan
    sequences = [SampledSequence(params_of(seed=i), 1, [1]) for i in range(3)]
    results = propose_tokens(rows, sequences, EOS)
    assert [usable for *_, usable in results] == [True, False, True]
    assert results[1] == (-1, None, False)


# --- threads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "expected"), [(2, 1), (2 + sampling.FEW_LOGITS // VOCAB, 2)])
def test_few_rows_wake_no_thread(num_rows: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a single request waits for threads that the system does not let run; or, after an error, everything in this
    process is left with one thread."""
    torch.set_num_threads(2)
    seen: list[int] = []

    def fail(*args: Any) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("no penalties")

    monkeypatch.setattr(sampling, "penalised", fail)
    rows = torch.zeros(num_rows, VOCAB)
    for call in (decide, propose_tokens):
        with pytest.raises(RuntimeError, match="no penalties"):
            call(rows, [SampledSequence(params_of(), 1, [1]) for _ in range(num_rows)], EOS)
    assert seen == [expected, expected]
    assert torch.get_num_threads() == 2


# --- rows do not depend on the batch ----------------------------------------------------------------------------------------

SINGLE_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 50},
    "large top_k": {"top_k": 3000},
    "top_p": {"top_p": 0.9},
    "wide top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 0.8, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {5: 3.0, 49151: -2.0}},
    "min_tokens": {"min_tokens": 40},
    "rejection": {"rule": "rejection", "temperature": 0.9},
    "rejection with filters": {"rule": "rejection", "top_k": 100, "top_p": 0.8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_alone_is_bit_identical_to_itself_in_a_batch(dtype: torch.dtype) -> None:
    """Bug guarded: a reduction whose order depends on the number of rows, or a filter whose width depends on the neighbours,
    changes a seeded text with the load. A real vocabulary, every option beside every other one, and threads that could share a
    row."""
    torch.set_num_threads(2)
    vocab, depth = 49_152, 2
    names = list(SINGLE_OPTIONS)
    rows = (3.0 * torch.randn(len(names) * (depth + 1), vocab)).to(dtype)
    sequences = []
    for i, name in enumerate(names):
        params = params_of(seed=977 * i, logprobs=3, **SINGLE_OPTIONS[name])
        first = i * (depth + 1)
        draft = tuple(step_by_step(rows[first : first + depth], params, [1, 2, 3]))
        probs = tuple(((token, 7), (0.6, 0.4)) for token in draft) if params.rule == "rejection" else None
        sequences.append(SampledSequence(params, 3, [1, 2, 3, *draft], draft, probs))
    together = decide(rows, sequences, EOS)
    for i, (name, sequence) in enumerate(zip(names, sequences, strict=True)):
        (alone,) = decide(rows[3 * i : 3 * i + 3], [sequence], EOS)
        assert alone == together[i], name
        if sequence.params.rule not in ("rejection", "block"):
            assert alone.accepted == depth, name
    assert len({d.token for d in together}) > len(names) // 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_taken(dtype: torch.dtype) -> None:
    """Bug guarded: half-precision logits are compared before they are widened, or refused."""
    rows = random_rows(12, 13).to(dtype)
    sequences = [SampledSequence(params_of(seed=i, top_k=5, logprobs=2), 1, [1, 2, 3], (2, 3)) for i in range(4)]
    assert decide(rows, sequences, EOS) == decide(rows.float(), sequences, EOS)


def test_the_logits_are_left_as_they_were() -> None:
    """Bug guarded: penalties or filters write into the caller's logits, from which logprobs or the next draft are read (case
    L27)."""
    rows = random_rows(12, 14)
    before = rows.clone()
    for rule in ("coupled", "rejection"):
        fields = {"rule": rule, "top_k": 5, "frequency_penalty": 1.0, "min_tokens": 9, "temperature": 0.5, "logprobs": 2}
        sequences = [SampledSequence(params_of(seed=i, **fields), 1, [1, 2, 3], (2, 3)) for i in range(4)]
        decide(rows, sequences, EOS)
        propose_tokens(rows[:4], sequences_without_draft(sequences), EOS)
    assert torch.equal(rows, before)


def sequences_without_draft(sequences: list[SampledSequence]) -> list[SampledSequence]:
    return [SampledSequence(s.params, s.prompt_length, s.ids) for s in sequences]


def test_nothing_to_decide() -> None:
    """Bug guarded: a round of prefill chunks alone has no rows and fails."""
    assert decide(torch.zeros(0, VOCAB), [], EOS) == []
    assert propose_tokens(torch.zeros(0, VOCAB), [], EOS) == []


# --- logprobs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_logprobs_are_those_of_the_model(rule: str, num_top: int) -> None:
    """Bug guarded: logprobs of processed logits, of the top candidate instead of the chosen token, or one entry per round
    instead of per token (cases L26 to L28)."""
    rows = random_rows(12, 15)
    fields = {"temperature": 0.0} if rule == "greedy" else {"rule": rule, "temperature": 0.3, "top_k": 3}
    params = params_of(logprobs=num_top, logit_bias={9: 50.0, 10: 50.0}, frequency_penalty=1.0, **fields)
    text = step_by_step(rows[:3], params_of(logit_bias={9: 50.0, 10: 50.0}, frequency_penalty=1.0, **fields), [1])
    sequences = [
        SampledSequence(params, 1, [1, *text], tuple(text)),
        SampledSequence(params_of(**fields), 1, [1, 2, 3], (2, 3)),
        SampledSequence(params, 1, [1, 8, 8, 8], (8, 8, 8)),
        SampledSequence(params, 1, [1]),
    ]
    decisions = decide(rows, sequences, EOS)
    assert decisions[1].logprobs is None
    first = 0
    for sequence, decision in zip(sequences, decisions, strict=True):
        if sequence.params.logprobs is not None:
            check_logprobs(rows[first:], sequence, decision, num_top)
        first += sequence.num_rows


def check_logprobs(rows: Tensor, sequence: SampledSequence, decision: Decision, num_top: int) -> None:
    committed = [*sequence.draft[: decision.accepted], decision.token]
    assert decision.logprobs is not None
    assert [entry.token_id for entry in decision.logprobs] == committed
    for row, entry in zip(rows.double(), decision.logprobs, strict=False):
        raw = row - row.exp().sum().log()
        assert entry.logprob == pytest.approx(raw[entry.token_id].item(), abs=1e-5)
        ranking = raw.sort(descending=True)
        assert [token for token, _ in entry.top] == ranking.indices[:num_top].tolist()
        assert [value for _, value in entry.top] == pytest.approx(ranking.values[:num_top].tolist(), abs=1e-5)


# --- proposing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, fields in SINGLE_OPTIONS.items() if "rule" not in fields])
def test_a_draft_equal_to_the_target_is_always_accepted(name: str) -> None:
    """Bug guarded: draft and target process the same logits differently, which costs acceptance and shows nowhere else."""
    rows = random_rows(60, 16, vocab=512)
    fields = {**SINGLE_OPTIONS[name], **({"logit_bias": {5: 3.0}} if name == "logit_bias" else {})}
    sequences = [SampledSequence(params_of(seed=i, **fields), 1, [1, 2]) for i in range(60)]
    proposed = [token for token, *_ in propose_tokens(rows, sequences, EOS)]
    assert proposed == [decision.token for decision in decide(rows, sequences, EOS)]


def test_a_draft_reports_the_distribution_it_sampled_from() -> None:
    """Bug guarded: q on the wire is not the one that the token was drawn from (before the cut to the most likely tokens, or
    before the temperature), which biases the ratio test (case L05). 30,000 draws; false alarm 1e-6."""
    count, vocab = 30_000, sampling.DRAFT_PROBS + 40
    row = random_rows(1, 17, vocab=vocab)
    params = [params_of(rule="rejection", temperature=0.8, seed=seed) for seed in range(count)]
    results = propose_tokens(row.expand(count, -1), [SampledSequence(p, 1, [1, 2]) for p in params], EOS)
    pairs = results[0][1]
    assert pairs is not None
    assert len(pairs[0]) == sampling.DRAFT_PROBS
    assert sum(pairs[1]) == pytest.approx(1.0, abs=1e-12)
    assert all(other == pairs for _, other, _ in results[1:50])
    expected = torch.tensor(pairs[1]) * count
    counts = torch.tensor([Counter(token for token, *_ in results)[token] for token in pairs[0]], dtype=torch.float64)
    assert counts.sum() == count
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    statistic = ((observed - wanted) ** 2 / wanted.clamp_min(1e-9)).sum()
    assert torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2), statistic / 2) > 1e-6


def test_greedy_and_coupled_drafts_send_ids_only() -> None:
    """Bug guarded: probabilities that nobody reads travel with every draft token."""
    rows = random_rows(3, 18)
    fields: list[dict[str, object]] = [{"temperature": 0.0}, {}, {"rule": "rejection"}]
    results = propose_tokens(rows, [SampledSequence(params_of(**f), 1, [1]) for f in fields], EOS)
    assert [probs is None for _, probs, _ in results] == [True, True, False]


def test_every_position_has_noise_of_its_own() -> None:
    """Bug guarded: noise keyed by round or row instead of the token's position: the same text at every depth is then
    impossible."""
    row = torch.zeros(1, VOCAB)
    tokens_by_position = [
        decide(row, [SampledSequence(params_of(seed=4), 1, [1] * length)], ())[0].token for length in range(1, 40)
    ]
    assert len(set(tokens_by_position)) > 15
    for start, depth in itertools.product((1, 5, 20), (1, 3, 8)):
        draft = tuple(tokens_by_position[start - 1 : start - 1 + depth])
        sequence = SampledSequence(params_of(seed=4), 1, [1] * start + list(draft), draft)
        (decision,) = decide(row.expand(depth + 1, -1), [sequence], ())
        assert (decision.accepted, decision.token) == (depth, tokens_by_position[start - 1 + depth])

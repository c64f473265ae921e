"""`outrider verify-lossless` on models of a few tokens: it passes what is right, and names what is wrong."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from deployments.lossless.checks import Matrix, make_requests
from deployments.lossless.command import verify
from deployments.lossless.play import RandomSource, UniformSource
from deployments.lossless.reference import Floats, LogitsOf, changed_logits, distribution, kept_tokens, near_tie_margin
from deployments.lossless.report import Plan, Report, as_object, verdict_line
from deployments.lossless.statistics import FALSE_ALARM, Statistics, chi_square, exact_distribution
from engine.errors import ConfigError
from engine.processing import SampledSequence, filtered, penalised, tempered
from engine.testing import TableModel
from engine.types import GenerateRequest, SamplingParams, VerifyReply, VerifyRequest

VOCAB = 24
TABLE = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
DRAFT = TABLE + 0.7 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
PROMPTS = {"short": [1, 2, 3], "long": [5 + i % 11 for i in range(40)]}
PREFIXES = {"a": [4], "b": [5, 6]}
PLAN = Plan(quick=True, num_seeds=400, num_tokens=24)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


def target(kind: type[TableModel] = TableModel, *, row_invariant: bool = True, max_context: int = 512) -> TableModel:
    return kind(TABLE, eos_token_ids=(0,), row_invariant=row_invariant, max_context=max_context)


def logits_of(texts: Sequence[Sequence[int]]) -> Floats:
    return TABLE[[ids[-1] for ids in texts]].double().numpy()


def check(model: TableModel, source: Any, plan: Plan = PLAN, tolerance: float = 0.0, of: LogitsOf = logits_of) -> Report:
    return verify(model, source, PROMPTS, PREFIXES, of, tolerance, plan)


@pytest.mark.parametrize("has_draft", [True, False])
def test_a_lossless_engine_passes(has_draft: bool) -> None:
    """Bug guarded: a check that cries wolf, one that leaves an arm idle, one that needs a draft model to run at all."""
    report = check(target(), TableModel(DRAFT, eos_token_ids=(0,)) if has_draft else None)
    assert report.problems == []
    assert report.divergences == []
    assert report.controls_found
    names = [arm.name for arm in report.arms]
    assert len(names) == len(set(names)) == (24 if has_draft else 16)
    assert [arm.num_preempted > 0 for arm in report.arms if "preempt" in arm.must] == [True]
    crashing = next(arm for arm in report.arms if arm.name.startswith("crashing"))
    assert {"crashed", "invalid_draft"} <= set(crashing.fallbacks)
    assert sum(arm.num_hits > 0 for arm in report.arms) == (4 if has_draft else 0)
    assert {(s.rule, s.draft) for s in report.sampled} == {
        (rule, "table" if has_draft else "uniform") for rule in ("coupled", "rejection", "block")
    }
    assert verdict_line(report).startswith("PASS")
    told = json.loads(json.dumps(as_object(report, PLAN)))
    assert told["verdict"] == "pass"
    assert told["matrix"]["num_tokens_compared"] == sum(arm.num_tokens for arm in report.arms) > 2000


def test_the_full_check_takes_every_depth_and_a_second_draft() -> None:
    """Bug guarded: a full run that is the quick one in disguise."""
    source = TableModel(DRAFT, eos_token_ids=(0,))
    requests = make_requests(PROMPTS, 22, target().info)
    matrix = Matrix(target(), source, requests, logits_of, exact=True, tolerance=0.0)
    matrix.play_reference()
    names = [arm.name for arm in matrix.arms(quick=False)]
    assert {f"table draft, K={depth}" for depth in range(1, 21)} <= set(names)
    for draft in ("ngram", "suffix", "half-right", "random", "crashing"):
        shared = [name for name in names if name.startswith(f"{draft} draft, K=")]
        depths = {int(depth) for name in shared for depth in re.findall(r"\d+", name)}
        assert depths == set(range(1, 21))
    _, exact = exact_distribution(PREFIXES, logits_of)
    tests = Statistics(target(), exact, 400, row_invariant=True).tests(source, quick=False)
    assert len(tests) == 6


# --- what must be found -----------------------------------------------------------------------------------------------------


class BatchDependent(TableModel):
    """Logits move with the number of rows of the forward, as those of kernels that are not row-invariant do."""

    size = 0.02

    def verify(self, request: VerifyRequest) -> VerifyReply:
        rows = sum(len(item.tokens) + len(item.draft) for item in request.items)
        right = self.table
        noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(rows))
        self.table = right + (self.size * noise if rows > 1 else 0.0)
        try:
            return super().verify(request)
        finally:
            self.table = right


class WrongBonus(TableModel):
    """Says something else after five accepted draft tokens or more."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        reply = super().verify(request)
        return VerifyReply(round_id=reply.round_id, verdicts=tuple(map(_last_token_off_by_one, request.items, reply.verdicts)))


def _last_token_off_by_one(item: Any, verdict: Any) -> Any:
    if verdict.accepted < 5:
        return verdict
    return replace(verdict, tokens=(*verdict.tokens[:-1], (verdict.tokens[-1] + 1) % VOCAB))


def test_a_wrong_bonus_token_is_found_and_placed() -> None:
    """Bug guarded: a check that compares too little: here only the token after five accepted draft tokens is wrong."""
    report = check(target(WrongBonus), TableModel(DRAFT, eos_token_ids=(0,)))
    assert report.problems
    assert verdict_line(report).startswith("FAIL")
    assert {d.arm for d in report.divergences} & {"table draft, K=8", "table draft, K=20"}
    assert all(d.what in ("token", "logprob") for d in report.divergences)
    assert not any(arm.divergences for arm in report.arms if arm.name.startswith("no draft"))


def test_rounding_fails_a_row_invariant_target_and_is_a_near_tie_elsewhere() -> None:
    """Bug guarded: a tolerance that also excuses a target which promised equal bits, or one that excuses nothing."""
    claims = check(target(BatchDependent), None)
    assert any("differ from what the target says alone" in problem for problem in claims.problems)
    honest = check(target(BatchDependent, row_invariant=False), None, tolerance=0.2)
    margins = [d.margin for d in honest.divergences]
    assert margins
    assert all(margin is not None and 0 <= margin < 0.2 for margin in margins)
    assert honest.problems == []
    assert honest.near_ties_per_1000 > 0
    strict = check(
        target(BatchDependent, row_invariant=False), None, Plan(quick=True, num_seeds=400, num_tokens=24, tolerance=1e-9)
    )
    assert strict.problems


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_lies_about_its_draw_is_found(rule: str) -> None:
    """Bug guarded: a statistical test without the power to see a q that is not what was drawn from."""
    _, exact = exact_distribution(PREFIXES, logits_of)
    statistics = Statistics(target(), exact, 400, row_invariant=True)
    assert statistics.sample(rule, UniformSource(exact.likely), 400).passes
    assert not statistics.sample(rule, UniformSource(exact.likely, pick=lambda tokens: tokens[0]), 400).passes
    assert not statistics.control().passes


def test_an_idle_arm_is_no_pass() -> None:
    """Bug guarded: PASS for a draft that never had a token accepted, so that nothing about accepting was checked."""

    class Mute(RandomSource):
        def __init__(self) -> None:
            super().__init__(VOCAB)
            self._name = "mute"

        def _propose(self, item: Any) -> Any:
            return replace(super()._propose(item), tokens=(), reason="out_of_context")

    report = check(target(), Mute())
    assert any("mute" in problem and "checked nothing" in problem for problem in report.problems)


def test_too_little_is_refused() -> None:
    """Bug guarded: options that are accepted although they cannot mean anything."""
    for wrong, word in (({"seeds": 5}, "--seeds"), ({"tokens": 1}, "--tokens"), ({"tolerance": math.nan}, "--tolerance")):
        with pytest.raises(ConfigError, match=word):
            Plan.of(**{"quick": True, "seeds": None, "tokens": None, "tolerance": None, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="row-invariant"):
        check(target(), None, Plan(quick=True, num_seeds=400, num_tokens=24, tolerance=0.1))
    with pytest.raises(ConfigError, match="--tokens"):
        check(target(max_context=64), None, Plan(quick=True, num_seeds=400, num_tokens=60))


# --- the second opinion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 5},
        {"top_k": 6, "top_p": 0.7, "temperature": 1.4},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {2: 1.5}, "min_tokens": 9},
    ],
)
def test_the_float64_distribution_agrees_with_the_engines(options: dict[str, Any]) -> None:
    """Bug guarded: a reference that is wrong in the same tests that are to judge the engine."""
    params = SamplingParams(**options)
    request = GenerateRequest(request_id="x", prompt_ids=(1, 2, 2), params=params)
    ids = [1, 2, 2, 7, 9, 7]
    for row in TABLE:
        sequence = [SampledSequence(params, 3, ids)]
        scaled = tempered(penalised(row[None], sequence, (0,)), sequence)
        kept = filtered(scaled, sequence)
        expected = torch.softmax(kept.dense(scaled).double(), dim=1)[0].numpy()
        changed = changed_logits(row.double().numpy(), request, ids, (0,))
        probabilities = distribution(changed, params)
        assert sorted(probabilities) == sorted(np.flatnonzero(expected).tolist())
        assert probabilities == pytest.approx({token: expected[token] for token in probabilities}, abs=1e-6)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 4}, {"min_p": 0.15}])
def test_a_change_of_the_margin_changes_the_token(options: dict[str, Any]) -> None:
    """Bug guarded: a margin that is too small excuses errors, one that is too large accuses rounding."""
    params = SamplingParams(**options, seed=9)
    request = GenerateRequest(request_id="x", prompt_ids=(1,), params=params)
    crossed = 0
    for row in TABLE.double().numpy():
        chosen = _choice(row, request)
        for got in range(VOCAB):
            if got == chosen:
                continue
            margin = near_tie_margin(row, request, (1,), got, (0,))
            assert margin >= 0
            # Less never does; the whole margin does, unless it is the other token's logit that has to move.
            less, enough = row.copy(), row.copy()
            less[got] += 0.99 * margin
            enough[got] += margin + 1e-9
            assert margin < 1e-9 or _choice(less, request) != got
            crossed += _choice(enough, request) == got
    total = VOCAB * (VOCAB - 1)
    assert crossed > total // 10 if params.top_k or params.min_p else crossed == total


def _choice(row: Floats, request: GenerateRequest) -> int:
    from deployments.lossless.reference import _noise

    if request.params.greedy:
        return int(row.argmax())
    scaled = row / request.params.temperature
    kept = kept_tokens(scaled, request.params)
    return int(kept[(scaled + _noise(request.params.seed, 1, len(row)))[kept].argmax()])


def test_chi_square_is_uniform_and_pools() -> None:
    """Bug guarded: rare cells that make the test reject by chance, and outcomes that cannot happen passing as rare ones."""
    probabilities: dict[tuple[int, ...], float] = {(i,): 2.0 ** -min(i + 1, 12) for i in range(13)}
    draws = torch.multinomial(
        torch.tensor(list(probabilities.values())), 300 * 200, replacement=True, generator=torch.Generator().manual_seed(0)
    ).view(200, 300)
    values = [chi_square(Counter((int(i),) for i in row), probabilities, strict=True) for row in draws]
    assert {cells for _, cells in values} == {6}
    assert 0.35 < sum(p for p, _ in values) / len(values) < 0.65
    assert min(p for p, _ in values) > FALSE_ALARM
    assert chi_square(Counter({(0,): 99, (99,): 1}), probabilities, strict=True)[0] == 0.0
    assert (
        chi_square(Counter({(0,): 150, (1,): 75, (2,): 37, (3,): 19, (4,): 9, (99,): 10}), probabilities, strict=False)[0]
        > FALSE_ALARM
    )
    assert chi_square(Counter({(0,): 150, (1,): 0, (99,): 150}), probabilities, strict=False)[0] < FALSE_ALARM

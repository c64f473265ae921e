"""Chi-square of what comes out of the whole system against the target's own probabilities."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import App
from scipy.stats import chisquare

from engine.models import load_tokenizer
from engine.types import SamplingParams, SequenceContext, VerifyItem, VerifyRequest

PROMPT = "My favourite animal is the"
TOP_K = 3
NUM_TOKENS = 3
NUM_SAMPLES = 480
FALSE_ALARM = 1e-4
"""Per rule: a correct system fails one run in 10,000."""


@pytest.fixture(scope="module")
def app(pair: App) -> App:
    return pair


@pytest.fixture(scope="module")
def expected(app: App) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of three tokens at T=1, top-k 3, from the target alone, in this process.

    Computed one token at a time and without any draft; the same engine, because a third place that another rounding gives to
    another token would be a difference of the reference, not of the rule.
    """
    from engine.build import build_target

    target = build_target(app.config)
    prompt = tuple(load_tokenizer(app.config.target.model).tokenizer.encode(PROMPT))
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        extended: dict[tuple[int, ...], float] = {}
        for tokens, mass in probabilities.items():
            top = most_likely(target, (*prompt, *tokens))
            total = sum(math.exp(logprob) for _, logprob in top)
            for token, logprob in top:
                extended[*tokens, token] = mass * math.exp(logprob) / total
        probabilities = extended
    return probabilities


def most_likely(target: Any, ids: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """(token, logprob) of what top-k 3 keeps after ``ids``: of equal ones, and bfloat16 has many, those with the lowest ids."""
    params = SamplingParams(temperature=0.0, logprobs=20)
    context = SequenceContext(params=params, prompt_length=len(ids))
    item = VerifyItem(sequence_id="reference", base_length=0, tokens=ids, context=context)
    (verdict,) = target.verify(VerifyRequest(round_id=0, items=(item,), release=("reference",))).verdicts
    top: tuple[tuple[int, float], ...] = verdict.logprobs[0].top
    return tuple(sorted(top, key=lambda pair: (-pair[1], pair[0]))[:TOP_K])


def sample(app: App, expected: dict[tuple[int, ...], float], **params: object) -> Counter[tuple[int, ...]]:
    """Token triples of many seeded requests, through HTTP. The tokens are read from the logprobs' text."""
    tokenizer = load_tokenizer(app.config.target.model).tokenizer
    names = {tuple(tokenizer.decode([token]) for token in tokens): tokens for tokens in expected}
    assert len(names) == len(expected)

    def one(seed: int) -> list[tuple[str, ...]]:
        result = app.complete(
            PROMPT,
            **{"temperature": 1.0, "top_k": TOP_K, "max_tokens": NUM_TOKENS, "n": 16, "seed": seed, "logprobs": 0, **params},
        )
        return [tuple(choice["logprobs"]["tokens"]) for choice in result["choices"]]

    with ThreadPoolExecutor(2) as pool:
        triples = [triple for triples in pool.map(one, range(NUM_SAMPLES // 16)) for triple in triples]
    return Counter(names[triple] for triple in triples)


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square over all triples; those expected fewer than five times share one cell."""
    total = sum(counts.values())
    cells = [(counts[t], total * p) for t, p in expected.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    if rest:
        large.append((sum(seen for seen, _ in rest), sum(wanted for _, wanted in rest)))
    seen, wanted = zip(*large, strict=True)
    return float(chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_samples_have_the_targets_distribution(app: App, expected: dict[tuple[int, ...], float], rule: str) -> None:
    """Guards against a draft's distribution showing through anywhere between noise, wire, acceptance and bonus token."""
    counts = sample(app, expected, speculation={"max_depth": 2, "rule": rule})
    value = p_value(counts, expected)
    print(f"{rule}: p = {value:.3g} over {len(expected)} triples")
    assert value > FALSE_ALARM


def test_the_test_can_fail(app: App, expected: dict[tuple[int, ...], float]) -> None:
    """Negative control: the same number of samples at another temperature must be told apart."""
    assert p_value(sample(app, expected, temperature=1.8), expected) < FALSE_ALARM

"""Chi-square of what comes out of the whole system against the target's own probabilities."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from conftest import App
from scipy.stats import chisquare
from test_lossless import wait_for_draft

PROMPT = "My favourite animal is the"
TOP_K = 3
NUM_TOKENS = 3
NUM_SAMPLES = 480
FALSE_ALARM = 1e-4
"""Per rule: a correct system fails one run in 10,000."""


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App]) -> App:
    app = deploy_app(speculation={"depth": 2, "max_depth": 2})
    wait_for_draft(app)
    return app


@pytest.fixture(scope="module")
def expected(app: App) -> dict[tuple[int, ...], float]:
    """Exact probability of every continuation of three tokens at T=1, top-k 3, from the target's plain forward."""
    from engine.models import load_model

    loaded = load_model(app.config.target.model, dtype=app.config.target.dtype)
    prompt = loaded.tokenizer.encode(PROMPT)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        extended: dict[tuple[int, ...], float] = {}
        for tokens, mass in probabilities.items():
            with torch.inference_mode():
                logits = loaded.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            values, ids = logits.topk(TOP_K)
            for token, p in zip(ids.tolist(), torch.softmax(values, 0).tolist(), strict=True):
                extended[*tokens, token] = mass * p
        probabilities = extended
    return probabilities


def sample(app: App, expected: dict[tuple[int, ...], float], **params: object) -> Counter[tuple[int, ...]]:
    """Token triples of many seeded requests, through HTTP. The tokens are read from the logprobs' text."""
    from engine.models import load_tokenizer

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


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_samples_have_the_targets_distribution(app: App, expected: dict[tuple[int, ...], float], rule: str) -> None:
    """Guards against a draft's distribution showing through anywhere between noise, wire, acceptance and bonus token."""
    counts = sample(app, expected, speculation={"max_depth": 2, "rule": rule})
    value = p_value(counts, expected)
    print(f"{rule}: p = {value:.3g} over {len(list(product(range(TOP_K), repeat=NUM_TOKENS)))} triples")
    assert value > FALSE_ALARM


def test_the_test_can_fail(app: App, expected: dict[tuple[int, ...], float]) -> None:
    """Negative control: the same number of samples at another temperature must be told apart."""
    assert p_value(sample(app, expected, temperature=1.8), expected) < FALSE_ALARM

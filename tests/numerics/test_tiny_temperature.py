"""Temperature 0 and temperatures next to it give one text."""

import itertools
from typing import Any

import pytest
import torch

from engine.drivers import SyncDriver
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import TableModel
from engine.types import SAMPLING_RULES, GenerateRequest, SamplingParams

VOCAB, NUM_TOKENS, START = 12, 24, 3
SEEDS = (0, 1, 2**64 - 1)


def _table(kind: str) -> torch.Tensor:
    """Logits [V, V] in steps of 0.125, as those of a head in bfloat16: exact ties at the top in most rows, or in all."""
    logits = torch.randint(0, 4, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(3)).float() / 8 + 17.0
    if kind == "all equal":
        logits.fill_(17.0)
    return logits


def _texts(table: torch.Tensor, depth: int, requests: list[dict[str, Any]]) -> list[list[int]]:
    """All requests in one batch, with a draft that is right now and then."""
    model, draft = TableModel(table), TableModel(table.flip(0))
    scheduler = Scheduler(model.info, FixedDepth(depth), max_batch=64, prefill_tokens=256, max_waiting=64)
    made = [
        GenerateRequest(request_id=str(i), prompt_ids=(5, START), params=SamplingParams(max_tokens=NUM_TOKENS, **params))
        for i, params in enumerate(requests)
    ]
    texts: list[list[int]] = [[] for _ in made]
    for delta in SyncDriver(model, draft, scheduler).generate(made):
        texts[int(delta.request_id)] += delta.token_ids
    return texts


def _lowest_of_the_likeliest(table: torch.Tensor) -> list[int]:
    ids = [START]
    for _ in range(NUM_TOKENS):
        row = table[ids[-1]].tolist()
        ids.append(row.index(max(row)))
    return ids[1:]


@pytest.mark.parametrize("kind", ["ties", "all equal"])
@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("filtered", [{"top_p": 1e-9}, {"top_k": 1}, {"top_p": 1e-9, "top_k": 5, "min_p": 0.5}], ids=str)
def test_tiny_temperatures_are_greedy(rule: str, filtered: dict[str, float], kind: str) -> None:
    """Bug guarded: an empty text, NaN, or a text that depends on the seed, at a temperature that leaves one token (case L12); a
    tie at the top decided otherwise than by the lowest id, as greedy does."""
    table = _table(kind)
    requests: list[dict[str, Any]] = [{"temperature": 0.0}]
    for temperature, seed in itertools.product((0.0, 1e-6, 1e-4, 0.01, 1.0), SEEDS):
        requests.append({"temperature": temperature, "seed": seed, "rule": rule, **filtered})
    expected = _lowest_of_the_likeliest(table)
    for depth in (0, 3):
        for request, text in zip(requests, _texts(table, depth, requests), strict=True):
            assert text == expected, request


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_without_filters_a_tiny_temperature_keeps_only_ties(rule: str) -> None:
    """Bug guarded: a tiny temperature that overflows, or that lets less likely tokens through."""
    table = _table("ties")
    requests = [
        {"temperature": temperature, "seed": seed, "rule": rule}
        for temperature, seed in itertools.product((2e-5, 1e-4, 1e-3), SEEDS)
    ]
    for depth in (0, 3):
        for text in _texts(table, depth, requests):
            assert len(text) == NUM_TOKENS
            assert all(table[a, b] == table[a].max() for a, b in itertools.pairwise((START, *text)))

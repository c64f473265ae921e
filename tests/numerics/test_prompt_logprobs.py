"""Logprobs of the prompt from a real forward: the model's own distribution, to the same bits however the prefill went."""

import math
from typing import Any

import pytest
import torch
import transformers

from engine.drivers import SyncDriver
from engine.models import LoadedModel
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft, TableModel
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob, VerifyReply, VerifyRequest
from engine.verify.target import Target

VOCAB = 97
PROMPT = tuple((11 * i * i + 5 * i + 3) % 90 + 3 for i in range(41))


def tiny_model(dtype: torch.dtype) -> LoadedModel:
    """Random weights; keys of 64 values, for which attention in bfloat16 is row-invariant on a CPU."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)
    return LoadedModel(
        name="tiny",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=256,
        fingerprint="tiny",
        model=model,
        dtype=dtype,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(torch.bfloat16), kv_capacity_tokens=512)


class Forgetful:
    """The target, which loses everything at some verifies."""

    def __init__(self, target: Target, forgets: tuple[int, ...]):
        self._target, self._forgets, self._count = target, forgets, 0
        self.info = target.info

    def verify(self, request: VerifyRequest) -> VerifyReply:
        self._count += 1
        if self._count in self._forgets:
            for item in request.items:
                self._target._release(item.sequence_id)
        return self._target.verify(request)


def _request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 3, **fields})
    return GenerateRequest(request_id=name, prompt_ids=prompt, params=params)


def _run(target: Any, *requests: GenerateRequest, prefill_tokens: int = 64) -> dict[str, list[Delta]]:
    scheduler = Scheduler(target.info, FixedDepth(3), max_batch=8, prefill_tokens=prefill_tokens, max_waiting=8)
    draft = ScriptedDraft(lambda ids: (ids[-1] * 5 + 1) % VOCAB)
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    driver = SyncDriver(target, draft, scheduler)
    for delta in driver.generate(requests):
        deltas[delta.request_id].append(delta)
    target.verify(VerifyRequest(round_id=0, items=(), release=tuple(scheduler.target_released)))
    return deltas


def _scores(target: Any, *others: GenerateRequest, prefill_tokens: int = 64, **fields: Any) -> tuple[TokenLogprob, ...]:
    scores = _run(target, _request(**fields), *others, prefill_tokens=prefill_tokens)["r"][0].prompt_logprobs
    assert scores is not None
    return scores


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "top_k": 2, "logit_bias": {5: 50.0}, "repetition_penalty": 1.5}])
def test_scores_are_the_models_own_distribution(options: dict[str, Any]) -> None:
    """Bug guarded: rows shifted by one token, scores after temperature, penalties or filters, wrong alternatives (L27)."""
    loaded = tiny_model(torch.float32)
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    exact = torch.log_softmax(logits.double(), dim=-1)
    scores = _scores(Target(loaded, kv_capacity_tokens=512), **options)
    assert [score.token_id for score in scores] == list(PROMPT[1:])
    for row, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(exact[row, PROMPT[row + 1]]), abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx(exact[row].topk(3).values.tolist(), abs=1e-3)
        assert [value for _, value in score.top] == sorted((value for _, value in score.top), reverse=True)


def test_scores_do_not_depend_on_how_the_prompt_was_processed(target: Target) -> None:
    """Bug guarded: a score of another batch, chunk or prefill that differs in its last bit, so that answers cannot be compared;
    rows of neighbours mixed up when some are scored and some are sampled."""
    assert target.row_invariance.holds, target.row_invariance.verdict
    expected = _scores(target)
    for prefill_tokens in (1, 2, 5, 16, 40, 41):
        assert _scores(target, prefill_tokens=prefill_tokens) == expected
    neighbours = [_request(name, PROMPT[i:], prompt_logprobs=i, max_tokens=20) for i, name in enumerate(("a", "b"))]
    plain = _request("c", PROMPT[7:], prompt_logprobs=None)
    for prefill_tokens in (3, 30, 200):
        assert _scores(target, *neighbours, plain, prefill_tokens=prefill_tokens) == expected
    for forgets in ((1,), (2, 3), (5,), (7, 12)):
        assert _scores(Forgetful(target, forgets), prefill_tokens=6) == expected
    assert _scores(target, max_tokens=0) == expected


def test_scoring_does_not_change_what_is_said(target: Target) -> None:
    """Bug guarded: the rows that are sampled are taken from the wrong place once others are scored."""
    requests = [_request(str(i), PROMPT[i:], max_tokens=12, logprobs=1) for i in range(3)]
    plain = [_request(str(i), PROMPT[i:], max_tokens=12, logprobs=1, prompt_logprobs=None) for i in range(3)]
    for prefill_tokens in (4, 50):
        scored, unscored = (_run(target, *r, prefill_tokens=prefill_tokens) for r in (requests, plain))
        for name in scored:
            assert [d.token_ids for d in scored[name]] == [d.token_ids for d in unscored[name]]
            assert [d.logprobs for d in scored[name]] == [d.logprobs for d in unscored[name]]


def test_a_prompt_and_its_continuation_are_scored_alike(target: Target) -> None:
    """Bug guarded: a token that scores otherwise in a prompt than when it was generated: logprobs of two definitions."""
    made = _run(target, _request(max_tokens=9, logprobs=3, ignore_eos=True))["r"]
    tokens = tuple(token for delta in made for token in delta.token_ids)
    logprobs = tuple(entry for delta in made for entry in delta.logprobs or ())
    assert _scores(target, prompt=PROMPT + tokens, max_tokens=0)[-len(tokens) :] == logprobs


def test_a_row_that_is_no_number_fails_its_request_alone() -> None:
    """Bug guarded: NaN handed out as a logprob, which JSON turns into null, or a neighbour that fails with it (L31)."""
    table = torch.randn(8, 8)
    table[5] = float("nan")
    model = TableModel(table)
    deltas = _run(model, _request("bad", (1, 5, 2)), _request("good", (1, 3, 2), max_tokens=0))
    assert deltas["bad"][-1].finish_reason is FinishReason.ERROR
    assert "logits are not finite" in (deltas["bad"][-1].error or "")
    good = deltas["good"][-1]
    assert good.finish_reason is FinishReason.LENGTH
    expected = [float(torch.log_softmax(table[a], dim=-1)[b]) for a, b in ((1, 3), (3, 2))]
    assert [score.logprob for score in good.prompt_logprobs or ()] == pytest.approx(expected)
    assert all(math.isfinite(value) for score in good.prompt_logprobs or () for _, value in score.top)

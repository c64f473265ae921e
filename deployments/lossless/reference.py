"""A second opinion: the sampled distribution in float64 NumPy, written independently of `engine.processing`, and near-ties."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.types import GenerateRequest, SamplingParams

Floats = npt.NDArray[np.float64]
LogitsOf = Callable[[Sequence[Sequence[int]]], Floats]
"""Texts as token ids -> the target's logits after each of them, float64 [N, V], from plain prefills."""


def target_logits(target: Any) -> LogitsOf:
    """From a `Target`'s model; the sequences are gone again afterwards."""
    from engine.verify.attention import Chunk
    from engine.verify.kv_cache import CachedSequence

    model = target.model

    def prefill(texts: Sequence[Sequence[int]]) -> Floats:
        rows = []
        for start in range(0, len(texts), 16):
            chunks = [Chunk(CachedSequence(), tuple(ids), 1) for ids in texts[start : start + 16]]
            for chunk in chunks:
                model.cache.reserve(chunk.sequence, len(chunk.ids))
            rows.append(model.forward(chunks).double().cpu().numpy())
            for chunk in chunks:
                model.cache.truncate(chunk.sequence, 0)
        return np.concatenate(rows)

    return prefill


def changed_logits(logits: Floats, request: GenerateRequest, ids: Sequence[int], eos_token_ids: Sequence[int]) -> Floats:
    """Logits [V] after penalties, bias and min_tokens, before the temperature; ``ids``: prompt and output."""
    params, output = request.params, ids[len(request.prompt_ids) :]
    changed = logits.copy()
    for token in set(ids):
        value = changed[token]
        changed[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(output).items():
        changed[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    if len(output) < params.min_tokens:
        changed[list({*eos_token_ids, *params.stop_token_ids})] = -np.inf
    return changed


def kept_tokens(scaled: Floats, params: SamplingParams) -> npt.NDArray[np.intp]:
    """Ids that top-k, then top-p, then min-p leave of tempered logits [V], the best first, lower ids first on ties."""
    order = np.argsort(-scaled, kind="stable")
    order = order[: params.top_k] if params.top_k else order
    p = np.exp(scaled[order] - scaled[order[0]])
    p /= p.sum()
    before = np.cumsum(p) - p
    keep = p >= params.min_p * p[0]
    if params.top_p < 1.0:
        keep &= before < params.top_p
    kept: npt.NDArray[np.intp] = order[keep & (p > 0)]
    return kept


def distribution(logits: Floats, params: SamplingParams) -> dict[int, float]:
    """Probability of every token that temperature and filters leave, for logits [V] that are not penalised."""
    scaled = logits / params.temperature
    kept = kept_tokens(scaled, params)
    p = np.exp(scaled[kept] - scaled[kept[0]])
    return dict(zip(kept.tolist(), (p / p.sum()).tolist(), strict=True))


def near_tie_margin(
    logits: Floats, request: GenerateRequest, ids: Sequence[int], got: int, eos_token_ids: Sequence[int]
) -> float:
    """How far logits [V] are from choosing ``got`` after ``ids``: the least change of a logit, in its own units.

    Scores carry the noise and are multiplied by the temperature, so that an error of a logit counts as itself. ``got`` wins
    when it is kept by the filters and every better score is either overtaken or cut.
    """
    params = request.params
    changed = changed_logits(logits, request, ids, eos_token_ids)
    if params.greedy:
        return float(changed.max() - changed[got])
    scaled = changed / params.temperature
    scores = scaled + _noise(params.seed, len(ids), len(scaled))
    slack = _slack(scaled, params)
    better = (slack >= 0) & (scores > scores[got])
    overtaken_or_cut = np.minimum(scores[better] - scores[got], slack[better]).max(initial=0.0)
    return float(max(-slack[got], overtaken_or_cut) * params.temperature)


def _noise(seed: int, position: int, vocab_size: int) -> Floats:
    """The Gumbel noise that draft and target share; engine code, since the noise is what the text is a function of."""
    import torch

    from engine import noise

    one = torch.tensor([noise.signed64(seed)]), torch.tensor([position])
    drawn: Floats = noise.gumbel(noise.row_keys(*one, noise.Stream.COUPLED), torch.arange(vocab_size))[0].numpy()
    return drawn


def _slack(scaled: Floats, params: SamplingParams) -> Floats:
    """How far inside (at least 0) or outside of the filters each token of tempered logits [V] is.

    For top-k and min-p the change of its logit that crosses the edge, for top-p the relative change of the mass before it.
    """
    order = np.argsort(-scaled, kind="stable")
    slack = np.full_like(scaled, np.inf)
    ranked = order
    if 0 < params.top_k < len(scaled):
        ranked = order[: params.top_k]
        slack = scaled - scaled[order[params.top_k - 1]]
        slack[ranked] = scaled[ranked] - scaled[order[params.top_k]]
    if params.min_p > 0:
        slack = np.minimum(slack, scaled - scaled[order[0]] - np.log(params.min_p))
    if params.top_p < 1.0:
        p = np.exp(scaled[order] - scaled[order[0]])
        before = (np.cumsum(p) - p) / p[: len(ranked)].sum()
        with np.errstate(divide="ignore"):
            slack[order] = np.minimum(slack[order], np.log(params.top_p) - np.log(before))
    return slack

"""What a source of drafts may send. A draft may be anything: a stale replica, another model, a bug."""

from engine.types import SparseProbs

REASONS = frozenset(
    {
        "bad_logits",
        "catching_up",
        "draft_backoff",
        "draft_busy",
        "draft_failed",
        "empty",
        "kv_full",
        "moved",
        "need_context",
        "no_draft",
        "no_match",
        "out_of_context",
        "unknown_token",
    }
)
"""Why a source may give no draft. Others are counted as "other": what a source sends does not become the name of a metric."""


def known_reason(reason: str | None) -> str:
    """The name under which a missing draft is counted."""
    if not reason:
        return "empty"
    return reason if reason in REASONS else "other"


def is_valid_draft(tokens: tuple[int, ...], probs: tuple[SparseProbs, ...] | None, depth: int, vocab_size: int) -> bool:
    """Whether 1 to ``depth`` tokens of the vocabulary were sent, with probabilities that fit where there are any."""
    if not 0 < len(tokens) <= depth or not all(0 <= token < vocab_size for token in tokens):
        return False
    return probs is None or _probs_fit(tokens, probs, vocab_size)


def _probs_fit(tokens: tuple[int, ...], probs: tuple[SparseProbs, ...], vocab_size: int) -> bool:
    """Each token must have been possible under the q it claims to come from, or the ratio test would not be exact."""
    return len(probs) == len(tokens) and all(
        _is_drawn_from(token, *q, vocab_size) for token, q in zip(tokens, probs, strict=True)
    )


def _is_drawn_from(token: int, ids: tuple[int, ...], probs: tuple[float, ...], vocab_size: int) -> bool:
    if len(ids) != len(probs) or len(set(ids)) != len(ids) or not all(0 <= other < vocab_size for other in ids):
        return False
    if not all(p >= 0 for p in probs) or not abs(sum(probs) - 1.0) <= 1e-6:
        return False
    return dict(zip(ids, probs, strict=True)).get(token, 0.0) > 0.0

"""Temperature 0: the target's most likely token, lowest id on ties."""

import torch
from torch import Tensor

from engine.accept.base import Drafts, Verdicts, match_own_tokens


def greedy(drafts: Drafts, logits: Tensor) -> Verdicts:
    """Decide from float32 or float64 logits [R, V]."""
    return match_own_tokens(drafts, most_likely(logits))


def most_likely(logits: Tensor) -> Tensor:
    """The first of the largest logits of every row, int64 [R]; draft and target use the same.

    On CPU by numpy: its argmax is vectorised, torch's is not (64 rows of 49,152: 0.5 against 2.6 ms).
    """
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.float64):
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))

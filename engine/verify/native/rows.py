"""What sampling asks of rows of logits on CPU, compiled (`rows.c`). Each answer is None where torch or numpy must give it."""

import torch
from torch import Tensor

from engine.verify.native.build import loaded_kernels

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
LARGEST_PER_THREAD = 1 << 20
DRAWS_PER_THREAD = 1 << 19
"""Logits that a thread must find to be worth waking: a quarter of a millisecond of work and more. One that the system does not
let run holds up the others for a slice of 4 to 20 ms.
"""
MARGIN = 1e-9
"""Scores of a draw that lie this close, relative to the largest logit but at least so much, are left to torch's logarithms.

The two C libraries' differ in the last of 53 bits: a margin ten thousand times as wide costs nothing and cannot be crossed.
"""


def largest(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest value of every row of logits [R, V], float32 [R], and its first place, int64 [R]. A NaN is the largest."""
    library = loaded_kernels()
    if library is None or logits.dtype not in FORMATS or not _is_readable(logits):
        return None
    num_rows, size = logits.shape
    values = torch.empty(num_rows)
    ids = torch.empty(num_rows, dtype=torch.int64)
    library.largest(
        logits.data_ptr(),
        FORMATS[logits.dtype],
        logits.stride(0),
        num_rows,
        size,
        _num_threads(logits, LARGEST_PER_THREAD),
        values.data_ptr(),
        ids.data_ptr(),
    )
    return values, ids


def draw(logits: Tensor, temperatures: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor] | None:
    """The token of every row with the largest ``logit / temperature + noise``, int64 [R], and where that is sure, bool [R].

    logits float32 [R, V] with a finite maximum in each row, temperatures float32 [R], None = 1, keys int64 [R] as those of
    `engine.noise.gumbel`.
    Where it is not sure another token came within `MARGIN`.
    """
    library = loaded_kernels()
    if library is None or logits.dtype != torch.float32 or not _is_readable(logits):
        return None
    num_rows, size = logits.shape
    keys = keys.contiguous()
    temperatures = None if temperatures is None else temperatures.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64)
    sure = torch.empty(num_rows, dtype=torch.bool)
    library.draw(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        size,
        None if temperatures is None else temperatures.data_ptr(),
        keys.data_ptr(),
        MARGIN,
        _num_threads(logits, DRAWS_PER_THREAD),
        tokens.data_ptr(),
        sure.data_ptr(),
    )
    return tokens, sure


def _is_readable(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.shape[1] > 0 and logits.stride(1) == 1


def _num_threads(logits: Tensor, per_thread: int) -> int:
    return max(1, min(torch.get_num_threads(), len(logits), logits.numel() // per_thread))

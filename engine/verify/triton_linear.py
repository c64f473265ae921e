"""A linear layer on CUDA whose rows have the same bits in every batch, in Triton.

cuBLAS chooses a kernel, and with it an order of summation, by the number of rows. Here every row is summed by the same tiles in
the same order: one configuration per dtype, no tuning by shape, no split of the sum over programs.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    constexpr: Any = tl.constexpr
except ImportError:  # torch's builds for CPU come without it
    triton, constexpr = None, Any

ROWS, OUTPUTS = 64, 32
"""Of one program: 64 rows are the least that Hopper's matrix instruction takes; few outputs make many programs of few rows."""
INPUTS = {torch.float32: 32, torch.bfloat16: 128, torch.float16: 128}
"""Terms of the sum per step, by dtype."""


def has_triton(device: torch.device) -> bool:
    """Whether products on this device can be Triton's."""
    return device.type == "cuda" and triton is not None


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] · weight [out, in] transposed + bias [out], summed in float32 and rounded once: [..., out], dtype of x."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(len(rows), len(weight), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(len(rows), ROWS), triton.cdiv(len(weight), OUTPUTS))
    _compiled()[grid](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        len(rows),
        len(weight),
        rows.shape[1],
        rows.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS[x.dtype],
        num_warps=4,
        num_stages=3,
    )
    return out.view(*x.shape[:-1], -1)


@lru_cache
def _compiled() -> Any:
    # Triton compiles a kernel anew for numbers that are 1 or multiples of 16; the number of rows must not choose the code.
    return triton.jit(_kernel, do_not_specialize=["num_rows"])


def _kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    HAS_BIAS: constexpr,
    ROWS: constexpr,
    OUTPUTS: constexpr,
    INPUTS: constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, INPUTS)
    # Programs past an edge read the last row or output again and store nothing.
    x_rows = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + tl.minimum(output, num_outputs - 1).to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inside = start + place < num_inputs
        terms = tl.load(x_rows + (start + place)[None, :], mask=inside[None, :], other=0.0)
        factors = tl.load(weight_rows + (start + place)[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(terms, factors, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    stored = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :], total.to(out_ptr.dtype.element_ty), mask=stored
    )

"""Every random bit of the engine: a pure function of (seed, position, stream, token id).

Counter-based, so that no draft, depth, batch, device or restart can change what is drawn. Integers are mixed with the finaliser
of SplitMix64 (Steele, Lea, Flood 2014, constants of Stafford's variant 13) in int64, which wraps alike on CPU and CUDA.
"""

from enum import IntEnum

import torch
from torch import Tensor


class Stream(IntEnum):
    """Who draws. Only the coupled rule shares a stream between draft and target; sharing in the ratio test is a bias."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def signed64(value: int) -> int:
    """The int64 with the same bits as the low 64 bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = signed64(0x9E3779B97F4A7C15)
_MIX_1 = signed64(0xBF58476D1CE4E5B9)
_MIX_2 = signed64(0x94D049BB133111EB)


def row_keys(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Keys of rows, int64 [R], from int64 seeds [R] and int64 positions [R] of the tokens that are being produced."""
    return _mix(_mix(seeds + signed64(_GOLDEN * (stream + 1))) ^ (positions * _GOLDEN))


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """Uniforms strictly inside (0, 1) for every key and token id: int64 keys [R], int64 ids [n] or [R, n] -> float64 [R, n]."""
    bits = _mix(keys[:, None] + (ids + 1) * _GOLDEN)
    # 52 random bits and a half: the largest value is 1 - 2^-53, the smallest 2^-53, so both logarithms of a Gumbel are finite.
    return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise ``-log(-log u)``, float64 [R, n]; shapes as in `uniform`."""
    return uniform(keys, ids).log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)).mul_(_MIX_1)
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copies of the sign bit are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

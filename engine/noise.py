"""Every random bit of the engine: a pure function of (seed, position, stream, token id).

Counter-based, so that no draft, depth, batch, device or restart can change what is drawn. Integers are mixed with the finaliser
of SplitMix64 (Steele, Lea, Flood 2014, constants of Stafford's variant 13) in int64, which wraps alike on CPU and CUDA.
"""

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from engine.verify.native import rows as compiled


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


def gumbel_argmax(logits: Tensor, keys: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """``argmax_v(logits[r, v] / temperatures[r] + gumbel(keys[r], v))``: a draw from softmax(logits / temperatures) per row.

    logits [R, V], keys int64 [R], temperatures as the logits [R], None = 1 -> int64 [R]. The logits may lack any constant per
    row and may be -inf; each row needs a finite maximum.
    """
    drawn = compiled.draw(logits, temperatures, keys)
    if drawn is None:
        return _torch_argmax(logits, keys, temperatures)
    tokens, sure = drawn
    if not sure.all():
        close = ~sure
        tokens[close] = _torch_argmax(logits[close], keys[close], None if temperatures is None else temperatures[close])
    return tokens


def _torch_argmax(logits: Tensor, keys: Tensor, temperatures: Tensor | None) -> Tensor:
    """`gumbel_argmax` in torch's operations. What is close enough for another logarithm to matter is decided here."""
    scaled = logits if temperatures is None else logits / temperatures[:, None]
    if logits.device.type != "cpu":
        return plain_gumbel_argmax(scaled, keys)
    num_rows = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    parts = zip(torch.split(scaled, num_rows), torch.split(keys, num_rows), strict=True)
    return torch.cat([_pruned_argmax(*part) for part in parts]) if len(logits) else keys


def plain_gumbel_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """As `gumbel_argmax`, with noise for every token: what a device does in a fixed number of steps."""
    return (gumbel(keys, torch.arange(logits.shape[1], device=logits.device)) + logits).argmax(dim=-1)


def argmax_among(scores: Tensor, ids: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Per row the id with the highest of its scores, the lowest id on ties: flat scores, ids, rows [M] -> int64 [num_rows].

    A row without any score gets -1.
    """
    best = scores.new_full((num_rows,), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    none = torch.iinfo(torch.int64).max
    winners = ids.new_full((num_rows,), none)
    winners.scatter_reduce_(0, rows, torch.where(scores == best[rows], ids, none), "amin")
    return torch.where(winners == none, -1, winners)


_BLOCK_ELEMENTS = 1 << 20
"""Rows times vocabulary that are hashed in one go: the integers stay in the processor's cache (3 ns against 22 ns each)."""
_WINDOW = 6.0
"""Tokens whose logit lies at most this far below the row's largest are all looked at closely, others if their noise is rare."""


def _pruned_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """The same, with logarithms only for tokens that can win: twice as many would cost more than all the rest.

    The winner scores at least m + G(m's token), m being the row's largest logit. A token more than `_WINDOW` below m can reach
    that only with noise above `_WINDOW` + G(m's token), which is a bound on its random bits.
    """
    largest, at = logits.max(dim=-1)
    bound = gumbel(keys, at[:, None]).squeeze(1) + _WINDOW
    candidates = _bits_at_least(_raw_bits(keys, logits.shape[1]), bound)
    candidates.logical_or_(logits >= (largest - _WINDOW)[:, None])
    rows, ids = candidates.nonzero().unbind(dim=1)
    if len(ids) * 8 > candidates.numel():  # a flat distribution
        return (gumbel(keys, _all_ids(logits.shape[1])) + logits).argmax(dim=-1)
    scores = gumbel(keys[rows], ids[:, None]).squeeze(1) + logits[rows, ids]
    return argmax_among(scores, ids, rows, len(logits))


def _raw_bits(keys: Tensor, num_ids: int) -> Tensor:
    """The hash of `uniform` without its last step, which leaves the upper 31 bits alone: int64 [R, num_ids]."""
    bits = keys[:, None] + _steps(num_ids)
    spare = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return bits


def _bits_at_least(bits: Tensor, bound: Tensor) -> Tensor:
    """Which raw bits [R, V] may belong to Gumbel noise of at least ``bound`` float64 [R] > 0.5; a few more are let through.

    1 - u = 1 - exp(-exp(-bound)) is the share of the 2^64 hashes above; as signed integers those are the ones just below 0.
    """
    share = -torch.expm1(-torch.exp(-bound))
    lowest = -(share * 2.0**64).to(torch.int64) - (1 << 34)
    return (bits >= lowest[:, None]).logical_and_(bits < 0)


@lru_cache(maxsize=4)
def _all_ids(num_ids: int) -> Tensor:
    return torch.arange(num_ids)


@lru_cache(maxsize=4)
def _steps(num_ids: int) -> Tensor:
    return (_all_ids(num_ids) + 1) * _GOLDEN


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)).mul_(_MIX_1)
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copies of the sign bit are masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

"""The closed forms that `outrider bench rounds` compares with, against the table in the literature notes of the project."""

import pytest

from deployments.bench.bounds import (
    expected_tokens,
    overlapped,
    overlapped_depth,
    overlapped_with_misses,
    sequential,
)


@pytest.mark.parametrize(
    ("alpha", "c", "hop", "slow", "deep", "fast", "depth"),
    [
        (0.6, 0.05, 0.1, 1.65, 4, 2.50, 16),
        (0.7, 0.2, 0.05, 1.49, 3, 2.77, 4),
        (0.8, 0.1, 0.0, 2.47, 6, 4.57, 10),
        (0.8, 0.1, 0.05, 2.32, 6, 4.46, 9),
        (0.9, 0.1, 0.1, 3.12, 11, 6.13, 8),
    ],
)
def test_bounds_are_those_of_the_table(
    alpha: float, c: float, hop: float, slow: float, deep: int, fast: float, depth: int
) -> None:
    """Bug guarded: a depth off by one, by rounding 9.999 down, moves every share of the bound that is reported."""
    assert sequential(alpha, c, hop) == (pytest.approx(slow, abs=0.005), deep)
    assert overlapped_depth(c, hop) == depth
    assert overlapped(alpha, c, hop) == pytest.approx(fast, abs=0.005)


def test_misses_cost_what_the_better_fallback_costs() -> None:
    """Bug guarded: a bound that counts misses as hits, or their wait as nothing."""
    assert overlapped_with_misses(0.8, 0.1, 0.0, 1.0) == pytest.approx(overlapped(0.8, 0.1, 0.0))
    assert overlapped_with_misses(0.8, 0.1, 0.0, 0.0) == pytest.approx(sequential(0.8, 0.1, 0.0)[0])
    # Plain step: (.8 * 4.10 + .2) / 1; the table has 3.48 for c=.2, alpha=.9, hop=.1, where asking does not pay.
    assert overlapped_with_misses(0.9, 0.2, 0.1, 0.8) == pytest.approx(3.48, abs=0.005)
    assert expected_tokens(1.0, 3) == 4


def test_a_draft_that_never_pays_leaves_plain_decoding() -> None:
    """Bug guarded: a "best" sequential depth of 1 where every draft makes it slower."""
    assert sequential(0.1, 1.0, 0.5) == (1.0, 0)

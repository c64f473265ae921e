"""The depth of one request from the price."""

from collections.abc import Sequence
from itertools import takewhile


def choose_depth(survival: Sequence[float], price: float, room: int) -> int:
    """Number of leading draft positions whose survival probability is above ``price``, at most ``room``, at least 0.

    A position counts only if all before it do: without them it could never be committed.
    """
    paying = sum(1 for _ in takewhile(lambda probability: probability > price, survival))
    return max(0, min(paying, room))

"""Requests that are behind their latency objective: their tokens count for more than others'."""

import math

from engine.types import DepthRequest

MOST_WORTH = 4.0
LEAST_TOKENS = 4
"""Generated under our eyes before a request's pace says anything."""


class Paces:
    """Follows how fast every request generates.

    Where a request needs ``tpot`` seconds per output token and should need ``objective``, a draft token that is kept is worth
    ``w = tpot / objective`` of another request's, 1 <= w <= `MOST_WORTH`: it is verified while ``w s > price``, as if the price
    were lowered to 1/w. As AdaServe (Li et al. 2025, arXiv 2501.12162), which first serves those whose objective is in danger;
    with a bound, as nobody gains when all the requests of an overloaded lane draft deeply because all are late.
    """

    def __init__(self, objective_s: float | None):
        """``objective_s`` None: all are worth 1."""
        self._objective_s = objective_s
        self._first: dict[str, tuple[float, int]] = {}

    def worth(self, request: DepthRequest, now_s: float) -> float:
        """Of a token of this request, at least 1."""
        if self._objective_s is None or not math.isfinite(now_s):
            return 1.0
        started_s, had = self._first.setdefault(request.request_id, (now_s, request.num_output))
        made = request.num_output - had
        if made < LEAST_TOKENS or now_s <= started_s:
            return 1.0
        return min(max((now_s - started_s) / made / self._objective_s, 1.0), MOST_WORTH)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._first.pop(request_id, None)

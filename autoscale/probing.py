"""When a request whose drafts stopped paying is given one token all the same, to see whether they became good again."""

PROBE_INTERVAL = 64
"""Rounds between probes after failures."""
PROBE_INTERVAL_MIN = 4
PROBE_BACKOFF = 4
PROBE_ALPHA = 0.9
"""A good draft. Where even this one would not pay, or lane and request are as good already, a probe has nothing to find."""
PROBE_ROUNDS = 3
"""A probe waits so many rounds for a draft that has to catch up first."""


class Probes:
    """Which rounds of a lane are probes.

    Every 64th round is one for a request without drafts. The interval falls to 16 and 4 rounds while first draft tokens are
    accepted and rises again with each one that is not. The probes of all requests fall into the same rounds, so that the other
    rounds have no draft step.
    """

    def __init__(self) -> None:
        self._round = PROBE_ROUNDS
        """Beyond the probe that rounds 0, 1, ... would be."""
        self._intervals: dict[str, int] = {}
        self._drafted_in: dict[str, int] = {}
        """Round in which a request last had a draft."""

    def is_due(self, request_id: str) -> bool:
        """Whether this round is a probe of the request."""
        since_start = self._round % self._intervals.get(request_id, PROBE_INTERVAL)
        was_drafted = self._drafted_in.get(request_id, -1) >= self._round - since_start
        return since_start < PROBE_ROUNDS and not was_drafted

    def observe(self, request_id: str, accepted: int) -> None:
        """The request had a draft in this round, of which so many tokens were accepted."""
        self._drafted_in[request_id] = self._round
        interval = self._intervals.get(request_id, PROBE_INTERVAL)
        interval = interval // PROBE_BACKOFF if accepted > 0 else interval * PROBE_BACKOFF
        self._intervals[request_id] = min(max(interval, PROBE_INTERVAL_MIN), PROBE_INTERVAL)

    def end_round(self) -> None:
        """Go on to the next round."""
        self._round += 1

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._intervals.pop(request_id, None)
        self._drafted_in.pop(request_id, None)

"""What a lane tells of every request: a line when it starts, a line when it ends, and a span where tracing samples it.

Both lines carry the ``x-request-id`` of the HTTP answer. A request costs two lines; a round costs nothing but an entry in a
list, unless it fell back or somebody in it is traced.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deployments.logs import SERVE_LOGGER, tell
from deployments.tracing import RequestSpan
from engine.drivers import Clock
from engine.errors import InvalidRequest, Overloaded
from engine.types import Delta, FinishReason, GenerateRequest, StepReport

logger = logging.getLogger(SERVE_LOGGER)


class Entry:
    """One request while it is open."""

    def __init__(self, journal: "Journal", request: GenerateRequest, span: RequestSpan | None):
        self.span = span
        self.last: Delta | None = None
        self.first_token_s: float | None = None
        self.num_plain = 0
        """Rounds without a draft, but for the one that made the first token."""
        self.fallbacks: Counter[str] = Counter()
        """Those among them in which requests of the batch had to do without the draft they were to have, by reason."""
        self._journal = journal
        self._clock = journal.clock
        self._started_s = journal.clock()
        self._had_tokens = False

    def saw(self, delta: Delta) -> None:
        """A round of this request ended."""
        if not self._had_tokens and delta.token_ids:
            self._had_tokens, self.first_token_s = True, self._clock() - self._started_s
        self.last = delta
        self._journal.in_round.append((self, delta))

    @property
    def open_s(self) -> float:
        """Since it came."""
        return self._clock() - self._started_s


class Journal:
    """The open requests of one lane."""

    def __init__(
        self, tracer: Any | None = None, num_target_losses: Callable[[], int] = lambda: 0, clock: Clock = time.monotonic
    ):
        """``tracer``: of OpenTelemetry, None while tracing is off. ``num_target_losses``: targets that died in this lane."""
        self.clock = clock
        self.in_round: list[tuple[Entry, Delta]] = []
        """Of the round that is being delivered; `round_done` empties it."""
        self._tracer = tracer
        self._num_target_losses = num_target_losses

    @contextmanager
    def open(self, request: GenerateRequest) -> Iterator[Entry]:
        """Around one request, from its arrival to its end, however it ends."""
        entry = Entry(self, request, self._start_span(request))
        losses = self._num_target_losses()
        name = request.log_id or request.request_id
        tell(
            logger,
            logging.INFO,
            "request started",
            name,
            choice=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            resumed_tokens=len(request.output_ids) or None,
            max_tokens=request.params.max_tokens,
            rule=request.params.acceptance_rule,
        )
        reason, failed = "", False
        try:
            yield entry
        except asyncio.CancelledError:
            reason = str(FinishReason.CANCELLED)
            raise
        except (InvalidRequest, Overloaded) as error:
            reason = "invalid" if isinstance(error, InvalidRequest) else "overloaded"
            raise
        except Exception as error:
            reason, failed = type(error).__name__, True
            raise
        finally:
            ended = entry.last.finish_reason if entry.last is not None else None
            reason = reason or str(ended or FinishReason.CANCELLED)
            failed = failed or ended is FinishReason.ERROR
            self._tell_end(name, request, entry, reason, self._num_target_losses() - losses, failed=failed)

    def round_done(self, report: StepReport) -> None:
        """A round was delivered; call it once for each, after its deltas."""
        if self.in_round:
            seen, self.in_round = self.in_round, []
            for entry, delta in seen:
                if delta.depth == 0 and delta.num_rounds > 1:
                    entry.num_plain += 1
                    entry.fallbacks.update(report.fallbacks.keys())
                if entry.span is not None:
                    entry.span.round_done(delta, report)

    def _start_span(self, request: GenerateRequest) -> RequestSpan | None:
        if self._tracer is None:
            return None
        span = RequestSpan(self._tracer, request)
        return span if span.is_recorded else None

    def _tell_end(
        self, name: str, request: GenerateRequest, entry: Entry, reason: str, target_losses: int, *, failed: bool
    ) -> None:
        last = entry.last
        tell(
            logger,
            logging.WARNING if failed else logging.INFO,
            "request ended",
            name,
            choice=request.request_id,
            reason=reason,
            error=last.error if last is not None else None,
            tokens=last.num_output_tokens if last is not None else 0,
            rounds=last.num_rounds if last is not None else 0,
            drafted=last.num_drafted if last is not None else 0,
            accepted=last.num_accepted if last is not None else 0,
            plain_rounds=entry.num_plain,
            fallbacks=dict(entry.fallbacks),
            target_losses=target_losses or None,
            first_token_s=None if entry.first_token_s is None else round(entry.first_token_s, 4),
            seconds=round(entry.open_s, 4),
        )
        if entry.span is not None:
            entry.span.end(reason, last, failed=failed)

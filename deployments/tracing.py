"""Spans of requests and their rounds, for OpenTelemetry. Nothing is imported and nothing is done while tracing is off.

Ray Serve's hook switches it on: ``RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=deployments.tracing:otlp_exporter`` before the cluster
starts, with ``RAY_SERVE_TRACING_SAMPLING_RATIO`` (Serve's default is 0.01) and OpenTelemetry's own ``OTEL_EXPORTER_OTLP_*``
variables. Serve makes a span for the HTTP request in each of its processes; the router's span is a child of the Api's.
"""

import sys
from typing import Any

from engine.types import Delta, GenerateRequest, StepReport

TRACER_NAME = "outrider"
SPAN_NAME = "outrider.request"
ROUND_EVENT = "round"
MAX_ROUND_EVENTS = 100
"""Of one span; a long answer has thousands of rounds. Below OpenTelemetry's limit, from which on the oldest are dropped."""
_TRACE_PARENT = "traceparent"


def otlp_exporter() -> list[Any]:
    """Span processors for Serve's hook: OTLP over HTTP, in batches, from a thread of its own. Needs the extra ``tracing``."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


def find_tracer() -> Any | None:
    """The tracer of this process, None while nobody has set tracing up: what was never imported was not set up either."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider.get_tracer(TRACER_NAME) if isinstance(provider, TracerProvider) else None


def current_trace_parent() -> str:
    """The span that is current here, as the W3C header ``traceparent``; empty without one.

    Call it only where `find_tracer` found something: it imports OpenTelemetry.
    """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_TRACE_PARENT, "")


class RequestSpan:
    """One request in a lane. Its rounds are events: a span of its own for each would cost more than what it tells."""

    def __init__(self, tracer: Any, request: GenerateRequest):
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # An empty context, not the current one, where the request brings none: the lane's own tasks belong to nobody.
        parent = TraceContextTextMapPropagator().extract({_TRACE_PARENT: request.trace_parent})
        attributes = {
            "outrider.request_id": request.log_id or request.request_id,
            "outrider.choice_id": request.request_id,
            "outrider.prompt_tokens": len(request.prompt_ids),
            "outrider.resumed_tokens": len(request.output_ids),
            "outrider.rule": request.params.acceptance_rule,
        }
        self._span = tracer.start_span(SPAN_NAME, context=parent, kind=SpanKind.SERVER, attributes=attributes)
        self._num_events = 0
        self._num_accepted = 0

    @property
    def is_recorded(self) -> bool:
        """Whether the request was sampled: if not, no round needs to be told."""
        return bool(self._span.is_recording())

    def round_done(self, delta: Delta, report: StepReport) -> None:
        """Tell one round. What was waited for, hits and misses are those of the whole batch, which shares its rounds."""
        accepted, self._num_accepted = delta.num_accepted - self._num_accepted, delta.num_accepted
        if self._num_events >= MAX_ROUND_EVENTS:
            return
        self._num_events += 1
        told = {
            "round_id": report.round_id,
            "depth": delta.depth,
            "accepted": accepted,
            "committed": len(delta.token_ids),
            "batch": report.batch_size,
            "round_ms": 1e3 * report.round_time_s,
            "verify_ms": 1e3 * report.verify_time_s,
            "waited_ms": 1e3 * report.exposed_time_s,
            "batch_hits": sum(report.hits.values()),
            "batch_misses": sum(report.misses.values()),
            "batch_asked": report.num_asked,
        }
        self._span.add_event(ROUND_EVENT, told)

    def end(self, reason: str, last: Delta | None, *, failed: bool) -> None:
        """Close the span with the request's totals; ``last`` None: it never got a token."""
        from opentelemetry.trace.status import Status, StatusCode

        totals = {} if last is None else _totals(last)
        unrecorded = totals.get("outrider.rounds", 0) - self._num_events
        self._span.set_attributes({"outrider.finish_reason": reason, **totals, "outrider.rounds_not_told": max(unrecorded, 0)})
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, reason))
        self._span.end()


def _totals(last: Delta) -> dict[str, int]:
    return {
        "outrider.output_tokens": last.num_output_tokens,
        "outrider.rounds": last.num_rounds,
        "outrider.drafted": last.num_drafted,
        "outrider.accepted": last.num_accepted,
    }

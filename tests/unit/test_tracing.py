"""Spans of requests, with an exporter that keeps them in memory."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.journal import Journal
from deployments.tracing import MAX_ROUND_EVENTS, SPAN_NAME, RequestSpan, current_trace_parent
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams, StepReport

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed (it comes with ray[serve])")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced() -> Iterator[tuple[Any, Any]]:
    """A tracer of a provider that samples everything but for unsampled parents, and what it exports."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test"), exporter
    provider.shutdown()


def request(trace_parent: str = "") -> GenerateRequest:
    return GenerateRequest(
        request_id="cmpl-1-0", prompt_ids=(1, 2, 3), params=SamplingParams(), log_id="http-1", trace_parent=trace_parent
    )


def delta(num_rounds: int, reason: FinishReason | None = None) -> Delta:
    return Delta(
        request_id="cmpl-1-0",
        token_ids=(5, 6, 7),
        num_output_tokens=3 * num_rounds,
        num_rounds=num_rounds,
        num_drafted=4 * num_rounds,
        num_accepted=2 * num_rounds,
        depth=4,
        finish_reason=reason,
    )


REPORT = StepReport(
    round_id=9,
    batch_size=2,
    num_waiting=0,
    num_target_tokens=10,
    num_prefill_tokens=0,
    num_committed=6,
    num_drafted=8,
    num_accepted=4,
    exposed_time_s=0.005,
    verify_time_s=0.02,
    round_time_s=0.03,
    hits={"recovery": 1},
    misses={"late": 1},
    num_asked=1,
)


def play(journal: Journal, num_rounds: int, trace_parent: str = "") -> None:
    with journal.open(request(trace_parent)) as entry:
        for number in range(1, num_rounds + 1):
            entry.saw(delta(number, FinishReason.LENGTH if number == num_rounds else None))
            journal.round_done(REPORT)


def test_a_span_holds_the_rounds_and_belongs_to_the_apis(traced: tuple[Any, Any]) -> None:
    """Bug guarded: spans that nobody can join with the HTTP request, or rounds whose figures add up the rounds before."""
    tracer, exporter = traced
    play(Journal(tracer), 2, f"00-{TRACE}-{PARENT}-01")
    (span,) = exporter.get_finished_spans()
    assert span.name == SPAN_NAME
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.attributes["outrider.request_id"] == "http-1"
    assert span.attributes["outrider.finish_reason"] == "length"
    assert span.attributes["outrider.accepted"] == 4
    told = [dict(event.attributes) for event in span.events]
    assert [(event["depth"], event["accepted"], event["committed"]) for event in told] == [(4, 2, 3), (4, 2, 3)]
    assert (told[0]["waited_ms"], told[0]["batch_hits"], told[0]["batch_misses"], told[0]["batch"]) == (5.0, 1, 1, 2)


def test_long_answers_have_a_bounded_span(traced: tuple[Any, Any]) -> None:
    """Bug guarded: a span that grows with the answer, or silently loses its first rounds."""
    tracer, exporter = traced
    play(Journal(tracer), MAX_ROUND_EVENTS + 7)
    (span,) = exporter.get_finished_spans()
    assert len(span.events) == MAX_ROUND_EVENTS
    assert span.attributes["outrider.rounds_not_told"] == 7
    assert span.parent is None


def test_what_is_not_sampled_is_not_told(traced: tuple[Any, Any]) -> None:
    """Bug guarded: work for every round of requests that the sampler left out."""
    tracer, exporter = traced
    journal = Journal(tracer)
    with journal.open(request(f"00-{TRACE}-{PARENT}-00")) as entry:
        assert entry.span is None
    assert exporter.get_finished_spans() == ()


def test_a_failed_request_is_an_error(traced: tuple[Any, Any]) -> None:
    """Bug guarded: failures that look like answers, and a span that is never closed."""
    tracer, exporter = traced
    with pytest.raises(RuntimeError), Journal(tracer).open(request()):
        raise RuntimeError("no")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"
    assert span.attributes["outrider.finish_reason"] == "RuntimeError"


def test_the_current_span_travels_as_a_header(traced: tuple[Any, Any]) -> None:
    """Bug guarded: a router's span that starts a trace of its own."""
    tracer, exporter = traced
    assert current_trace_parent() == ""
    with tracer.start_as_current_span("http") as parent:
        carried = current_trace_parent()
    span = RequestSpan(tracer, request(carried))
    span.end("stop", None, failed=False)
    assert exporter.get_finished_spans()[-1].parent.span_id == parent.get_span_context().span_id


def test_nothing_is_imported_while_tracing_is_off() -> None:
    """Bug guarded: OpenTelemetry loaded, or needed, by processes that do not trace."""
    code = (
        "import sys\nfrom deployments.journal import Journal\nfrom deployments.tracing import find_tracer\n"
        "assert find_tracer() is None\nJournal(find_tracer())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_tracing_is_found_once_it_was_set_up() -> None:
    """Bug guarded: Serve's hook sets up tracing and the lane does not see it."""
    code = (
        "from opentelemetry import trace\nfrom opentelemetry.sdk.trace import TracerProvider\n"
        "from deployments.tracing import find_tracer\nassert find_tracer() is None\n"
        "trace.set_tracer_provider(TracerProvider())\nassert find_tracer() is not None"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)

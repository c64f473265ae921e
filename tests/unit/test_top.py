"""`outrider top`: what a frame shows, and what is read from the metrics."""

import io

import pytest
from rich.console import Console
from routes import LANE, lane, routes

from deployments import top
from deployments.cli import main
from deployments.scrape import Scrape, five_numbers
from deployments.top import frame
from engine.errors import OutriderError


def shown(said: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(frame(said))  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_frame_shows_load_depth_price_and_the_reason() -> None:
    """Bug guarded: a figure under the name of another, or a view that needs a metric which is not exported yet."""
    text = shown(routes())
    for words in ("ready", "http://host:8000", "requests/s", "1.50", "3.50", "0.20", "85%", "depth 4: 4 requests running"):
        assert words in text
    for words in ("TTFT", "200 ms", "ITL now", "33 ms", "tokens per draft", "4.00", "break-even", "64 per lane", "def"):
        assert words in text


def test_what_is_not_known_is_not_a_number() -> None:
    """Bug guarded: a crash, or a zero that looks measured, on a server that has served nothing."""
    idle = lane(running=0, tokens_per_s=0.0, why={"depth": 0, "reason": "no request has decoded yet"})
    said = routes(lane_details=[idle], price=None, break_even_batch=None, draft_details=[], drafts=[], wanted_drafts=1)
    empty = type(said)(said.url, said.health, said.controller, "")
    text = shown(empty)
    assert "no request has decoded yet" in text
    assert "0 of 1" in text
    assert "ms" not in text.replace("ITL", "").replace("TTFT", "")


def test_a_lane_that_is_not_well_says_so() -> None:
    """Bug guarded: a view that looks healthy while drafts are missing or nothing is ready."""
    health = {"ready": False, "reason": "no lane is ready yet", "degraded": ["lane a: no draft is running"]}
    text = shown(routes(health=health, lane_details=[lane(draft_state="no draft is running", leaving=True)]))
    assert "not ready: no lane is ready yet" in text
    assert "degraded: lane a: no draft is running" in text
    assert "abc (leaving)" in text


def test_histograms_are_used_where_they_are_exported() -> None:
    """Bug guarded: the mean of a histogram taken from the wrong series, or counters that a later release does not have."""
    text = "\n".join(
        [
            f'outrider_time_to_first_token_seconds_bucket{{lane="{LANE}",le="+Inf"}} 4',
            f'outrider_time_to_first_token_seconds_sum{{lane="{LANE}"}} 2.0',
            f'outrider_time_to_first_token_seconds_count{{lane="{LANE}"}} 4',
            f'outrider_inter_token_latency_seconds_sum{{lane="{LANE}"}} 1.0',
            f'outrider_inter_token_latency_seconds_count{{lane="{LANE}"}} 50',
            "outrider_tokens_per_second 12.0",
            "",
        ]
    )
    five = five_numbers(Scrape(text))
    assert (five.ttft_s, five.itl_s, five.tokens_per_s) == (0.5, 0.02, 12.0)
    assert five.accepted_length is None
    assert five.break_even_batch is None


def test_sums_and_labels() -> None:
    """Bug guarded: lanes that are not added up, or a label's filter that lets others through."""
    scrape = Scrape('x_total{lane="a",peer="t"} 1\nx_total{lane="b",peer="t"} 2\nx_total{lane="a",peer="d"} 4\n')
    assert scrape.total("x") == 7
    assert scrape.total("x", peer="t") == 3
    assert scrape.by_label("x", "peer") == {"t": 3, "d": 4}
    assert scrape.total("y") is None
    assert scrape.ratio("x", "y") is None


def test_the_live_view_waits_for_a_server_that_went_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a view that ends with an update of the application, or with an error code when somebody leaves it."""
    answers = iter([routes(), OutriderError("cannot be reached"), routes(qps=77.0)])

    def answer(url: str, headers: dict[str, str]) -> object:
        said = next(answers)
        if isinstance(said, OutriderError):
            raise said
        return said

    pauses = iter([None, None, KeyboardInterrupt()])

    def pause(seconds: float) -> None:
        if (leave := next(pauses)) is not None:
            raise leave

    monkeypatch.setattr(top, "read_routes", answer)
    monkeypatch.setattr(top.time, "sleep", pause)
    assert main(["top", "--url", "http://host:8000"]) == 0
    shown = capsys.readouterr().out
    assert "cannot be reached; waiting" in shown
    assert "77.00" in shown
    assert next(answers, None) is None


@pytest.mark.parametrize("command", [["top", "--once"], ["top"], ["doctor"]])
def test_a_server_that_is_not_there_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a traceback, or a live view of nothing, when the address is wrong."""
    assert main([*command, "--url", "http://127.0.0.1:9"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "http://127.0.0.1:9" in printed.err


def test_wrong_usage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a configuration that is ignored beside a URL, or an address without a scheme."""
    assert main(["doctor", "--url", "http://x", "--set", "draft.source=none"]) == 2
    assert main(["top", "--url", "localhost:8000"]) == 2
    assert "--config" in capsys.readouterr().err

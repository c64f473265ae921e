"""`outrider bench load` without a model: one answer, the loops, the figures, the options, a foreign server."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.bench.load import run_bench_load
from deployments.bench.load_client import PATHS, Answer, ask, find_endpoint
from deployments.bench.load_loops import Played, Span, play_closed, play_open, poisson_arrivals
from deployments.bench.load_plan import LoadOptions, LoadPlan, check_place, read_prompts
from deployments.bench.load_report import ADAPTIVE, AS_SERVED, OFF, Cell, Results, break_even, draw_points, summary
from deployments.endpoint import read_headers
from engine.config import OutriderConfig
from engine.errors import ConfigError, OutriderError

KEYS = {"points", "break_even_concurrency", "worst_adaptive_vs_best", "adaptive_vs_k4_at_top", "ttft_vs_off"}
POINT_KEYS = {"arm", "concurrency", "tokens_per_s", "ttft_p50_s", "itl_p50_s", "accepted_length"}


def chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def usage(tokens: int, accepted: int | None = None) -> dict[str, Any]:
    details = None if accepted is None else {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 1}
    return {"choices": [], "usage": {"completion_tokens": tokens, "completion_tokens_details": details}}


def events(*bodies: dict[str, Any]) -> bytes:
    lines = [f"data: {json.dumps(body, ensure_ascii=False)}\n\n" for body in bodies]
    return "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode()


def answered(*, intended_s: float = 0.0, texts_s: tuple[float, ...] = (1.0, 2.0), tokens: int = 4, **more: Any) -> Answer:
    return Answer(intended_s, list(texts_s), texts_s[-1], tokens, has_usage=True, is_finished=True, **more)


# --- one answer -------------------------------------------------------------------------------------------------------------


def test_time_between_tokens_counts_tokens_and_not_chunks() -> None:
    """Bug guarded: the time between chunks is that of a round, so speculation would look slower the more it accepts."""
    answer = Answer(intended_s=9.5)
    for at_s, event in [(10.0, chunk("")), (10.1, chunk("a")), (10.4, chunk("bcd")), (10.7, chunk("efg", "length"))]:
        answer.feed(event, at_s)
    answer.feed(usage(7, accepted=4), 10.7)
    answer.end(10.8)
    assert answer.error is None
    assert answer.ttft_s == pytest.approx(0.6)
    assert answer.itl_s == pytest.approx(0.6 / 6)
    assert answer.num_accepted == 4


@pytest.mark.parametrize(("tokens", "texts_s"), [(1, (1.0, 2.0)), (8, (1.0,))])
def test_no_time_between_tokens_where_there_is_none(tokens: int, texts_s: tuple[float, ...]) -> None:
    """Bug guarded: an answer in one piece counted with 0 s per token, which no server can beat."""
    assert answered(tokens=tokens, texts_s=texts_s).itl_s is None


def test_without_usage_chunks_are_counted_and_it_is_told() -> None:
    """Bug guarded: a server without usage measured at 0 tokens per second, or its chunks passed off as tokens."""
    answer = Answer(0.0)
    answer.feed({"choices": [{"text": "a"}]}, 1.0)
    answer.feed({"choices": [{"text": "b", "finish_reason": "stop"}]}, 2.0)
    answer.end(2.0)
    assert (answer.num_tokens, answer.has_usage, answer.num_accepted) == (2, False, None)


def test_tokens_are_counted_when_they_come() -> None:
    """Bug guarded: all tokens of a request counted in the window in which it ended, whatever came before."""
    assert answered(texts_s=(1.0, 2.0, 3.0, 4.0), tokens=8).tokens_within(1.5, 3.5) == pytest.approx(4.0)


async def ask_once(response: httpx.Response | Exception) -> Answer:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handle)) as client:
        return await ask(client, PATHS["chat"], {}, time.monotonic(), lambda: None)


class Pieces(httpx.AsyncByteStream):
    """Bytes that arrive a few at a time."""

    def __init__(self, content: bytes, size: int):
        self._content, self._size = content, size

    async def __aiter__(self):
        for start in range(0, len(self._content), self._size):
            yield self._content[start : start + self._size]


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_events_end_at_newlines_only(size: int) -> None:
    """Bug guarded: httpx's lines end at U+2028 and U+0085 too, which are characters of texts: half an event is no JSON."""
    content = events(chunk("a\u2028b\u0085c"), chunk("d", "stop"), usage(5))
    answer = await ask_once(httpx.Response(200, stream=Pieces(content, size)))
    assert (answer.error, answer.num_tokens, len(answer.texts_s)) == (None, 5, 2)


@pytest.mark.parametrize(
    ("response", "error", "detail"),
    [
        (httpx.Response(500, text="it broke"), "500", "it broke"),
        (httpx.Response(200, content=events(chunk("a"))), "cut off", "finish_reason"),
        (httpx.Response(200, content=events(chunk("a"), {"error": {"message": "no GPU"}})), "error in the stream", "no GPU"),
        (httpx.Response(200, content=b"data: {nonsense\n\n"), "not an OpenAI stream", "JSON"),
        (
            httpx.Response(200, content=b'data: {"choices": [], "usage": {"tokens": 3}}\n\n'),
            "not an OpenAI stream",
            "completion_tokens",
        ),
        (httpx.ConnectError("refused"), "connection", "refused"),
        (httpx.ReadTimeout("slow"), "timeout", "slow"),
    ],
)
async def test_failures_are_noted_and_not_raised(response: httpx.Response | Exception, error: str, detail: str) -> None:
    """Bug guarded: one failed request that ends a sweep of an hour, or that counts as an answer."""
    answer = await ask_once(response)
    assert answer.error == error
    assert detail in answer.detail
    assert (answer.ttft_s, answer.itl_s) == (None, None)


# --- loops ------------------------------------------------------------------------------------------------------------------


class Server:
    """Answers after a few turns of the event loop; ``fail`` says with what error a request by number does, once."""

    def __init__(self, fail: dict[int, str] | None = None):
        self.fail = dict(fail or {})
        self.in_flight = self.most_in_flight = 0
        self.asked: Counter[int] = Counter()

    async def send(self, number: int, intended_s: float, on_text: Callable[[], None]) -> Answer:
        self.asked[number] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for _ in range(1 + number % 3):
            await asyncio.sleep(0)
        on_text()
        self.in_flight -= 1
        now_s = time.monotonic()
        error = self.fail.pop(number, None)
        return Answer(intended_s, [now_s], now_s, 1, is_finished=error is None, error=error, retry_after_s=0.0)


async def test_a_closed_loop_keeps_as_many_in_flight_as_it_says() -> None:
    """Bug guarded: a concurrency that is reported and not kept, or a sweep that one failure ends."""
    server = Server(fail={5: "500"})
    played = await play_closed(server.send, 4, Span(warm_up_s=0.0, duration_s=0.0, num_requests=20))
    inside = [answer for answer in played.answers if answer.intended_s >= played.begin_s]
    assert server.most_in_flight == 4
    assert server.in_flight == 0
    assert len(inside) >= 20 - 4
    assert [answer.error for answer in played.answers if answer.error] == ["500"]


async def test_a_closed_loop_waits_out_429() -> None:
    """Bug guarded: a full server bombarded, or the rejected request forgotten and its wait left out of the latency."""
    server = Server(fail={1: "429"})
    played = await play_closed(server.send, 2, Span(0.0, 0.0, 6))
    assert server.asked[1] == 2
    assert [answer.num_rejections for answer in played.answers if answer.num_rejections] == [1]
    assert all(answer.error is None for answer in played.answers)


async def test_an_open_loop_waits_for_nobody_and_times_from_the_intended_moment() -> None:
    """Bug guarded: coordinated omission. Here no request is answered before all have been sent."""
    all_sent = asyncio.Barrier(3)

    async def send(number: int, intended_s: float, on_text: Callable[[], None]) -> Answer:
        await all_sent.wait()
        return answered(intended_s=intended_s)

    arrivals_s = [0.0, 0.001, 0.0035]
    async with asyncio.timeout(30):
        played = await play_open(send, arrivals_s, Span(0.0, 1.0))
    begun_s = played.begin_s
    assert [answer.intended_s - begun_s for answer in played.answers] == pytest.approx(arrivals_s, abs=1e-6)


def test_arrivals_are_a_seeded_poisson_process() -> None:
    """Bug guarded: evenly spaced arrivals, which queue far less than random ones, or another load for every arm."""
    span = Span(warm_up_s=10.0, duration_s=490.0)
    times_s = poisson_arrivals(8.0, span, seed=1)
    gaps_s = [after - before for before, after in pairwise([0.0, *times_s])]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(1 / 8, rel=0.1)
    # The standard deviation of an exponential distribution is its mean.
    assert sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s) == pytest.approx(mean_s**2, rel=0.2)
    assert min(gaps_s) > 0
    assert times_s[-1] < 500.0
    assert times_s == poisson_arrivals(8.0, span, seed=1) != poisson_arrivals(8.0, span, seed=2)


def test_a_number_of_arrivals_is_counted_after_the_warm_up() -> None:
    """Bug guarded: requests of the warm-up that use up the number that was to be measured."""
    times_s = poisson_arrivals(5.0, Span(2.0, 1.0, num_requests=40), seed=3)
    assert sum(at_s >= 2.0 for at_s in times_s) == 40
    assert times_s[0] < 2.0


# --- figures ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "level"),
    [
        ({1: 1.9, 2: 1.4, 4: 0.9, 8: 0.7}, 4),
        ({1: 1.9, 2: 0.9, 4: 1.1, 8: 0.7}, 8),  # a dip that does not last is none
        ({1: 0.9, 2: 0.8}, 1),
        ({1: 0.9, 2: 1.0}, None),
        ({1: 1.5, 2: None, 4: 0.5}, 4),
        ({}, None),
    ],
)
def test_break_even_is_where_speculation_stays_slower(ratios: dict[float, float | None], level: int | None) -> None:
    """Bug guarded: the first noisy dip taken for the break-even, or a service that loses everywhere said never to."""
    assert break_even(ratios) == level


def test_a_cell_holds_the_window_only() -> None:
    """Bug guarded: warm-up and drain in the figures, or latencies of requests that failed."""
    played = Played(
        answers=[
            answered(intended_s=5.0, texts_s=(6.0, 11.0), tokens=2, num_accepted=0),  # one of its two tokens
            answered(intended_s=10.0, texts_s=(10.5, 11.0, 12.0), tokens=7, num_accepted=4),
            answered(intended_s=19.0, texts_s=(19.5, 21.0, 22.0), tokens=6, num_accepted=3),  # two of its six
            answered(intended_s=12.0, tokens=0, texts_s=(12.0,), error="500"),
            answered(intended_s=25.0, texts_s=(26.0, 27.0)),
        ],
        begin_s=10.0,
        end_s=20.0,
        client_cpu_share=0.1,
    )
    cell = Cell.of("K=4", 2, played, counts_drafts=True)
    assert cell.tokens_per_s == pytest.approx((1 + 7 + 2) / 10)
    assert cell.ttft_p50_s == pytest.approx(0.5)
    assert cell.itl_p50_s == pytest.approx(0.5)  # of 5, 1.5 / 6 and 2.5 / 5
    assert cell.accepted_length == pytest.approx((2 + 7 + 6) / (2 + 3 + 3))
    assert cell.errors == {"500": 1}
    assert cell.num_requests == 3
    assert Cell.of("K=4", 2, played, counts_drafts=False).accepted_length is None


def results_of(rates: dict[str, list[list[float]]], levels: tuple[int, ...]) -> Results:
    """``rates``: per arm and level, tokens per second of each repetition; TTFT is 1 / rate."""
    results = Results()
    for arm, by_level in rates.items():
        for level, repetitions in zip(levels, by_level, strict=True):
            for rate in repetitions:
                results.add(Cell(arm, level, rate, 1 / rate, 0.1, 2.0, level, 5, 0, 0.1, True))
    return results


RATES = {
    OFF: [[10.0, 20.0], [40.0, 80.0]],
    "K=1": [[15.0, 30.0], [39.0, 78.0]],
    "K=4": [[20.0, 40.0], [20.0, 40.0]],
    ADAPTIVE: [[19.0, 42.0], [38.0, 76.0]],
}


def test_figures_of_a_sweep() -> None:
    """Bug guarded: arms compared across repetitions (here the machine doubles its speed), or with the wrong rival."""
    result = summary(results_of(RATES, (1, 8)), is_open=False)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() >= KEYS
    assert all(point.keys() >= POINT_KEYS for point in result["points"])
    assert [(point["arm"], point["concurrency"]) for point in result["points"]][:2] == [(OFF, 1), ("K=1", 1)]
    assert result["break_even_concurrency"] == 8
    assert result["break_even_by_arm"] == {"K=1": 8, "K=4": 8, ADAPTIVE: 8}
    assert result["worst_adaptive_vs_best"] == pytest.approx(0.95)
    assert result["worst_adaptive_vs_best_spread"] == [0.95, 0.95]
    assert result["adaptive_vs_k4_at_top"] == pytest.approx(1.9)
    assert result["ttft_vs_off"] == pytest.approx(1 / 0.95, abs=0.001)


def test_speculation_loses_only_where_every_depth_does() -> None:
    """Bug guarded: the break-even of the worst depth reported for speculation as a whole."""
    result = summary(results_of({**RATES, "K=2": [[15.0, 30.0], [41.0, 82.0]]}, (1, 8)), is_open=False)
    assert result["break_even_by_arm"]["K=1"] == 8
    assert result["break_even_by_arm"]["K=2"] is None
    assert result["break_even_concurrency"] is None


def test_an_open_loop_has_no_ratio_of_throughput() -> None:
    """Bug guarded: every arm looks the same where tokens per second are just what arrives."""
    result = summary(results_of(RATES, (1, 8)), is_open=True)
    assert (result["worst_adaptive_vs_best"], result["break_even_concurrency"]) == (None, None)
    assert {point["vs_off"] for point in result["points"]} == {None}
    assert result["points"][0]["rate"] == 1
    assert result["ttft_vs_off"] is not None


def test_a_single_arm_has_figures_and_no_ratios() -> None:
    """Bug guarded: a foreign server, of which only one arm exists, ends the report in an exception."""
    result = summary(results_of({AS_SERVED: RATES[OFF]}, (1, 8)), is_open=False)
    assert result.keys() >= KEYS
    assert [point["tokens_per_s"] for point in result["points"]] == [15.0, 60.0]
    assert {result[key] for key in KEYS - {"points"}} == {None}


def test_a_plot_shows_all_arms(tmp_path: Path) -> None:
    """Bug guarded: a load without answers (no latency) that ends the plot in an exception after everything was measured."""
    points = summary(results_of(RATES, (1, 8)), is_open=False)["points"]
    points[0]["ttft_p50_s"] = None
    draw_points(tmp_path / "load.svg", points, "all arms")
    drawn = (tmp_path / "load.svg").read_text()
    assert all(f"<!-- {arm} -->" in drawn for arm in RATES)


# --- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sweep": "1,x"}, ["--sweep '1,x'", "1,2,4,8"]),
        ({"sweep": "0,1"}, ["--sweep", "above 0"]),
        ({"sweep": "5000"}, ["--sweep", "at most"]),
        ({"sweep": ""}, ["--sweep"]),
        ({"rate": "nan"}, ["--rate"]),
        ({"rate": "-1"}, ["--rate", "above 0"]),
        ({"rate": "1", "sweep": "1"}, ["--sweep", "--rate", "one of them"]),
        ({"duration": 1.0, "requests": 5}, ["--duration", "--requests", "one of them"]),
        ({"duration": float("nan")}, ["--duration"]),
        ({"duration": 0.0}, ["--duration", "above 0"]),
        ({"requests": 0}, ["--requests", "at least 1"]),
        ({"repeats": 0}, ["--repeats", "at least 1"]),
        ({"max_tokens": 1}, ["--max-tokens", "at least 2"]),
        ({"temperature": 2.5}, ["--temperature", "2"]),
        ({"seed": -1}, ["--seed"]),
        ({"prompts": Path("/nowhere/prompts.jsonl")}, ["--prompts", "/nowhere/prompts.jsonl"]),
    ],
)
def test_options_that_cannot_be_measured_are_named(options: dict[str, Any], words: list[str]) -> None:
    """Bug guarded: a traceback, or an hour's sweep with a value that was not meant."""
    with pytest.raises(ConfigError) as error:
        LoadPlan.of(LoadOptions(**options))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "has_config", "words"),
    [
        ({"url": "localhost:8000"}, False, ["--url", "http://"]),
        ({"url": "http://a", "paced": ""}, False, ["--url", "--paced"]),
        ({"url": "http://a"}, True, ["--url", "--config"]),
        ({"model": "x"}, True, ["--model", "target.model"]),
        ({"paced": "70b-h100"}, True, ["--paced", "emulated:"]),
        ({"paced": "emulated:70b-h10"}, True, ["--paced", "70b-h100"]),
    ],
)
def test_contradictions_about_what_is_measured_are_named(options: dict[str, Any], has_config: bool, words: list[str]) -> None:
    """Bug guarded: an option that is accepted and ignored, so that another thing is measured than was asked for."""
    with pytest.raises(ConfigError) as error:
        check_place(LoadOptions(**options), has_config=has_config)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("line", ["{nonsense", '{"text": "a"}', '{"prompt": ""}', "5"])
def test_a_wrong_line_of_prompts_is_named(tmp_path: Path, line: str) -> None:
    """Bug guarded: a prompt of another format, sent as its Python form."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "good\u2028one"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        read_prompts(file)


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    """Bug guarded: lines split inside a text, at one of the characters that only Python takes for a line's end."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028line"}\r\n"two"\n', encoding="utf-8")
    assert read_prompts(file) == ("one\u2028line", "two")


def test_requests_are_the_same_for_all_arms_but_unknown_to_the_server() -> None:
    """Bug guarded: arms that are given different work, or an arm whose prompts the one before left in the prefix cache."""
    plan = LoadPlan.of(LoadOptions(max_tokens=64))
    first, second = (list(islice(plan.requests(8, repeat=1), 60)) for _ in range(2))
    assert [(r.prompt.partition("] ")[2], r.max_tokens, r.seed) for r in first] == [
        (r.prompt.partition("] ")[2], r.max_tokens, r.seed) for r in second
    ]
    marks = [request.prompt.partition("] ")[0] for request in first + second]
    assert len(set(marks)) == len(marks)
    assert len({request.prompt.partition("] ")[2] for request in first}) == len(plan.texts)
    assert all(32 <= request.max_tokens <= 64 for request in first[8:])
    assert len({request.max_tokens for request in first[8:]}) > 5
    assert first[0].max_tokens <= 8


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an empty key sent as one (answered 401 by each request), or a key that must stand on the command line."""
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsecret-1\nsecret-2\n")
    assert read_headers(None, file) == {"Authorization": "Bearer secret-1"}
    monkeypatch.setenv("A_KEY", " secret-3 ")
    assert read_headers("A_KEY", None) == {"Authorization": "Bearer secret-3"}
    assert read_headers(None, None) == {}
    for options in (("NO_KEY", None), ("A_KEY", file)):
        with pytest.raises(ConfigError, match="--api-key-env"):
            read_headers(*options)


# --- a foreign server -------------------------------------------------------------------------------------------------------


class Foreign(ThreadingHTTPServer):
    """An OpenAI server of somebody else: lists ``models`` by owner, and answers with ``status``."""

    daemon_threads = True
    models: dict[str, str]
    status = 200
    bodies: list[dict[str, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class ForeignHandler(BaseHTTPRequestHandler):
    server: Foreign

    def do_GET(self) -> None:
        if self.server.status == 401:
            self._answer(401, b"")
            return
        cards = [{"id": name, "owned_by": owner} for name, owner in self.server.models.items()]
        self._answer(200, json.dumps({"object": "list", "data": cards}).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        details = {"accepted_prediction_tokens": 0}  # what servers without predictions say
        total = {"choices": [], "usage": {"completion_tokens": 4, "completion_tokens_details": details}}
        self._answer(self.server.status, events(chunk("a"), chunk("bcd", "stop"), total))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    server = Foreign(("127.0.0.1", 0), ForeignHandler)
    server.models, server.bodies = {"their-model": "vllm"}, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_foreign_server_is_measured_as_it_is_served(foreign: Foreign, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: fields of our own sent to others, or an accepted length made up for a server that tells none."""
    options = LoadOptions(url=f"{foreign.url}/v1/", sweep="2", requests=5, repeats=1, quick=True)
    assert run_bench_load(options, None, as_json=True, plot=None) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (point,) = result["points"]
    assert result["arms"] == [AS_SERVED]
    assert (point["arm"], point["concurrency"], point["accepted_length"]) == (AS_SERVED, 2, None)
    assert point["tokens_per_s"] > 0
    assert point["errors"] == {}
    ours = {"speculation", "ignore_eos"}
    assert all(body["model"] == "their-model" and not ours & body.keys() for body in foreign.bodies)


def test_a_refused_first_request_is_told_before_the_sweep(foreign: Foreign) -> None:
    """Bug guarded: a sweep of an hour in which every request is answered 400."""
    foreign.status = 400
    with pytest.raises(OutriderError, match="the first request failed: 400"):
        run_bench_load(LoadOptions(url=foreign.url, sweep="1", quick=True), None, as_json=False, plot=None)
    assert len(foreign.bodies) == 1


def test_models_are_found_or_asked_for(foreign: Foreign) -> None:
    """Bug guarded: the first of several models measured, or our own server not recognised."""
    assert find_endpoint(foreign.url).model == "their-model"
    assert not find_endpoint(foreign.url).is_outrider
    foreign.models = {"ours": "outrider", "other": "vllm"}
    assert find_endpoint(foreign.url, model="ours").is_outrider
    with pytest.raises(ConfigError, match="ours, other; name one by --model"):
        find_endpoint(foreign.url)
    with pytest.raises(ConfigError, match="--model nobody"):
        find_endpoint(foreign.url, model="nobody")


def test_a_missing_key_and_a_missing_server_are_told(foreign: Foreign) -> None:
    """Bug guarded: a traceback of the HTTP library instead of one line."""
    foreign.status = 401
    with pytest.raises(OutriderError, match="--api-key-env"):
        find_endpoint(foreign.url)
    with pytest.raises(OutriderError, match="cannot be reached"):
        find_endpoint("http://127.0.0.1:1")


def test_without_a_url_other_options_are_checked_first(tmp_path: Path) -> None:
    """Bug guarded: a cluster started, and models loaded, for a plot that cannot be written."""
    with pytest.raises(ConfigError, match="--plot"):
        run_bench_load(LoadOptions(), OutriderConfig(), as_json=False, plot=tmp_path / "load.pdf")

"""Made-up and recorded traffic."""

import statistics
from pathlib import Path

import pytest

from autoscale.simulator import Arrival, Lengths, parse_traffic, read_trace
from engine.errors import ConfigError

LENGTHS = Lengths(100.0, 50.0)
OPEN = ("poisson:rate=5", "bursts:rate=1,peak=30", "diurnal:rate=5", "step:rate=1,to=20")


@pytest.mark.parametrize("name", OPEN)
def test_traffic_is_a_function_of_its_seed(name: str) -> None:
    """Bug guarded: two arms that are compared on different requests, or a seed that changes nothing."""
    first, again, other = (parse_traffic(name, 200, LENGTHS, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.arrivals != other.arrivals
    times = [arrival.at_s for arrival in first.arrivals]
    assert len(times) == 200
    assert times == sorted(times)


def test_rates_follow_their_laws() -> None:
    """Bug guarded: a thinning that forgets the peak gives every kind the same flat rate. Bounds: 5 standard deviations."""
    poisson = parse_traffic("poisson:rate=5", 10_000, LENGTHS, 0)
    assert poisson.rate == pytest.approx(5, rel=0.05)
    step = parse_traffic("step:rate=2,to=20,at_s=500", 6000, LENGTHS, 0)
    assert sum(arrival.at_s < 500 for arrival in step.arrivals) == pytest.approx(1000, abs=160)
    bursts = parse_traffic("bursts:rate=1,peak=21,period_s=10,burst_s=5", 5500, LENGTHS, 0)
    assert sum(arrival.at_s % 10 >= 5 for arrival in bursts.arrivals) / 5500 == pytest.approx(21 / 22, abs=0.02)
    diurnal = parse_traffic("diurnal:rate=10,swing=1,period_s=100", 10_000, LENGTHS, 0)
    middle = sum(25 <= arrival.at_s % 100 < 75 for arrival in diurnal.arrivals) / 10_000
    assert middle == pytest.approx(0.5 + 1 / 3.14159, abs=0.03)


def test_lengths_have_their_mean_and_spread() -> None:
    """Bug guarded: shape and scale of the gamma distribution exchanged. Bounds: 5 standard deviations."""
    traffic = parse_traffic("poisson:rate=1", 10_000, Lengths(400.0, 100.0, 0.5), 0)
    prompts = [arrival.prompt_tokens for arrival in traffic.arrivals]
    assert statistics.fmean(prompts) == pytest.approx(400, rel=0.03)
    assert statistics.stdev(prompts) == pytest.approx(200, rel=0.06)
    alike = parse_traffic("poisson:rate=1", 5, Lengths(400.0, 100.0, 0.0), 0)
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in alike.arrivals} == {(400, 100)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("poison:rate=4", "did you mean 'poisson'"),
        ("zzz", "there are: poisson, bursts"),
        ("poisson", "rate is missing"),
        ("poisson:rate=0", "rate must be a number of requests per second above 0"),
        ("poisson:rate=nan", "rate must be"),
        ("poisson:rate=", "rate must be"),
        ("poisson:rat=4", "unknown parameter 'rat'; there are: rate"),
        ("poisson:rate=4,rate=5", "given twice"),
        ("bursts:rate=1,peak=2,period_s=1,burst_s=5", "burst_s (5) must not exceed period_s (1)"),
        ("diurnal:rate=1,swing=2", "swing must be a number from 0 to 1"),
        ("users:count=1.5", "count must be an integer"),
        ("file:/no/such/file.csv", "cannot read '/no/such/file.csv'"),
    ],
)
def test_bad_traffic_is_refused(text: str, told: str) -> None:
    """Bug guarded: a typing error that simulates something else, or ends in a traceback."""
    with pytest.raises(ConfigError) as error:
        parse_traffic(text, 10, LENGTHS, 0)
    assert told in str(error.value)


def test_recorded_traces_are_read(tmp_path: Path) -> None:
    """Bug guarded: times that count from the epoch leave the cluster idle for 50 years before the first request."""
    rows = ((1_700_000_000.5, 10, 5), (1_700_000_001.5, 20, 6))
    csv_file, json_file = tmp_path / "trace.csv", tmp_path / "trace.jsonl"
    csv_file.write_text("prompt_tokens,at_s,output_tokens,user\n" + "".join(f"{p},{t},{o},x\n" for t, p, o in rows))
    json_file.write_text("".join(f'{{"at_s": {t}, "prompt_tokens": {p}, "output_tokens": {o}}}\n\n' for t, p, o in rows))
    expected = (Arrival(0.0, 10, 5), Arrival(1.0, 20, 6))
    assert read_trace(csv_file).arrivals == read_trace(json_file).arrivals == expected
    assert parse_traffic(f"file:{csv_file}", 1, LENGTHS, 0).arrivals == expected[:1]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("t.csv", "at_s,prompt_tokens,output_tokens\n0,10,5\n1,-3,5\n", "line 3: prompt_tokens must be a number of tokens"),
        ("t.csv", "at_s,prompt_tokens,output_tokens\n0,10\n", "line 2: output_tokens must be"),
        ("t.csv", "at_s,prompt_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3: at_s (4) is before the line above"),
        ("t.csv", "time,prompt_tokens,output_tokens\n", "line 1: the header lacks at_s"),
        ("t.csv", "at_s,prompt_tokens,output_tokens\n", "holds no request"),
        ("t.jsonl", '{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"at_s": 1,\n', "line 2: not a JSON object"),
        ("t.jsonl", '{"at_s": "x", "prompt_tokens": 1, "output_tokens": 1}\n', "line 1: at_s must be a time"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, told: str) -> None:
    """Bug guarded: a trace of a million lines is refused, or half used, and nobody knows which line is wrong."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert told in str(error.value)

"""Made-up and recorded traffic: when requests come, and how long their prompts and outputs are.

A name says which: ``poisson:rate=4``, ``bursts:rate=1,peak=20``, ``diurnal:rate=4``, ``step:rate=1,to=20``, ``users:count=64``,
``users:count=1,to=64``, ``file:trace.csv``. Rates are requests per second. Everything is a pure function of the seed.
"""

import csv
import difflib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from engine.config import checked_number
from engine.errors import ConfigError

MAX_TOKENS = 10_000_000
"""Of one prompt or output."""
FIELDS = ("at_s", "prompt_tokens", "output_tokens")
"""Columns of a CSV file, keys of a JSON line."""


class Arrival(msgspec.Struct, frozen=True):
    """One request. ``at_s`` counts from the beginning of the trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of prompts and outputs: gamma distributions with these means."""

    prompt_tokens: float = 512.0
    output_tokens: float = 128.0
    spread: float = 0.5
    """Standard deviation over mean; 0 = all alike."""

    def draw(self, random: Random) -> tuple[int, int]:
        """(prompt tokens, output tokens) of one request, at least 1 each."""
        return self._one(self.prompt_tokens, random), self._one(self.output_tokens, random)

    def _one(self, mean: float, random: Random) -> int:
        if self.spread == 0:
            return max(round(mean), 1)
        shape = self.spread**-2
        return max(round(random.gammavariate(shape, mean / shape)), 1)


class Users(msgspec.Struct, frozen=True):
    """Each of ``count`` users sends a request when the answer to the one before is complete; ``to`` users from ``at_s`` on."""

    count: int
    to: int
    at_s: float

    def at(self, now_s: float) -> int:
        """How many there are at a time."""
        return self.count if now_s < self.at_s else self.to


class Traffic(msgspec.Struct, frozen=True):
    """Arrivals in the order of their times, or users that make them."""

    name: str
    arrivals: tuple[Arrival, ...] = ()
    users: Users | None = None
    lengths: Lengths = Lengths()
    """Of what users send."""
    num_requests: int = 0

    @property
    def rate(self) -> float:
        """Mean arrivals per second; 0 for users, who have none of their own."""
        return len(self.arrivals) / max(self.arrivals[-1].at_s, 1e-9) if self.arrivals else 0.0

    def thinned(self, share: float, most: int, seed: int) -> "Traffic":
        """Every request kept with the probability ``share``, ``most`` at most: what a part of a cluster sees of it."""
        if self.users is not None:
            count, to = (max(round(share * users), 1) for users in (self.users.count, self.users.to))
            scaled = msgspec.structs.replace(self.users, count=count, to=to)
            return msgspec.structs.replace(self, users=scaled, num_requests=min(self.num_requests, most))
        random = Random(seed)
        kept = [arrival for arrival in self.arrivals if share >= 1 or random.random() < share][:most]
        return msgspec.structs.replace(self, arrivals=tuple(kept), num_requests=len(kept))


def parse_traffic(text: str, num_requests: int, lengths: Lengths, seed: int) -> Traffic:
    """Make the traffic that ``text`` names. Raises `ConfigError` that names what is wrong, in a file its line, and the fix."""
    kind, _, rest = text.partition(":")
    if kind == "file":
        return read_trace(Path(rest), num_requests)
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, [*KINDS, "file"], n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join([*KINDS, 'file'])}"
        raise ConfigError(f"--traffic: unknown kind '{kind}'; {hint}")
    given = _parameters(kind, rest)
    if kind == "users":
        return Traffic(text, users=_users(given), lengths=lengths, num_requests=num_requests)
    rate, peak = _rate_law(kind, given)
    random = Random(seed)
    times = _thinned_times(rate, peak, random)
    arrivals = tuple(Arrival(next(times), *lengths.draw(random)) for _ in range(num_requests))
    return Traffic(text, arrivals, lengths=lengths, num_requests=num_requests)


# --- arrival times ----------------------------------------------------------------------------------------------------------


def _thinned_times(rate: Callable[[float], float], peak: float, random: Random) -> Iterator[float]:
    """A Poisson process of varying rate, by thinning one of rate ``peak`` (Lewis, Shedler 1979)."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(peak)
        if random.random() * peak <= rate(now_s):
            yield now_s


def _rate_law(kind: str, given: Mapping[str, float]) -> tuple[Callable[[float], float], float]:
    """Rate over time, and a bound on it."""
    rate = given["rate"]
    if kind == "bursts":
        period_s, burst_s, peak = given["period_s"], given["burst_s"], given["peak"]
        return lambda now_s: peak if now_s % period_s >= period_s - burst_s else rate, max(rate, peak)
    if kind == "diurnal":
        swing, turn = given["swing"], 2 * math.pi / given["period_s"]
        return lambda now_s: rate * (1 - swing * math.cos(turn * now_s)), rate * (1 + swing)
    if kind == "step":
        to, at_s = given["to"], given["at_s"]
        return lambda now_s: rate if now_s < at_s else to, max(rate, to)
    return lambda now_s: rate, rate


def _users(given: Mapping[str, float]) -> Users:
    return Users(int(given["count"]), int(given.get("to", given["count"])), given["at_s"])


_Check = tuple[Callable[[float], bool], str]
_RATE: _Check = (lambda v: 0 < v <= 1e6, "a number of requests per second above 0 and at most 1000000")
_TIME: _Check = (lambda v: 0 < v <= 1e7, "a number of seconds above 0 and at most 10000000")
_COUNT: _Check = (lambda v: v == int(v) and 1 <= v <= 100_000, "an integer from 1 to 100000")
_SHARE: _Check = (lambda v: 0 <= v <= 1, "a number from 0 to 1")
KINDS: Mapping[str, Mapping[str, tuple[_Check, float | None]]] = {
    "poisson": {"rate": (_RATE, None)},
    "bursts": {"rate": (_RATE, None), "peak": (_RATE, None), "period_s": (_TIME, 30.0), "burst_s": (_TIME, 5.0)},
    "diurnal": {"rate": (_RATE, None), "swing": (_SHARE, 0.8), "period_s": (_TIME, 600.0)},
    "step": {"rate": (_RATE, None), "to": (_RATE, None), "at_s": (_TIME, 30.0)},
    "users": {"count": (_COUNT, None), "to": (_COUNT, math.nan), "at_s": (_TIME, 30.0)},
}
"""Parameters of every kind: what is allowed, and the default; None = must be given, NaN = may be left out."""


def _parameters(kind: str, text: str) -> dict[str, float]:
    known = KINDS[kind]
    given: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"--traffic {kind}: unknown parameter '{name}'; there are: {', '.join(known)}")
        if name in given:
            raise ConfigError(f"--traffic {kind}: '{name}' is given twice; keep one of them")
        given[name] = checked_number(f"--traffic {kind}: {name}", value, *known[name][0])
    for name, (_, default) in known.items():
        if name not in given and default is None:
            raise ConfigError(f"--traffic {kind}: {name} is missing; write for example {kind}:{name}=4")
        if name not in given and default is not None and not math.isnan(default):
            given[name] = default
    if kind == "bursts" and given["burst_s"] > given["period_s"]:
        raise ConfigError(f"--traffic bursts: burst_s ({given['burst_s']:g}) must not exceed period_s ({given['period_s']:g})")
    return given


# --- recorded traces --------------------------------------------------------------------------------------------------------


def read_trace(path: Path, num_requests: int | None = None) -> Traffic:
    """Read a CSV file with a header, or JSON lines (``.jsonl``), holding `FIELDS`; the first ``num_requests`` of them.

    Raises `ConfigError` with the number of the line that cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--traffic file: cannot read '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--traffic file: cannot read '{path}': it is not UTF-8 text") from None
    rows = _json_rows if path.suffix == ".jsonl" else _csv_rows
    arrivals: list[Arrival] = []
    for number, row in rows(path, text):
        if num_requests is not None and len(arrivals) >= num_requests:
            break
        arrival = _arrival(f"{path}, line {number}", row)
        if arrivals and arrival.at_s < arrivals[-1].at_s:
            raise ConfigError(
                f"{path}, line {number}: at_s ({arrival.at_s:g}) is before the line above it; sort the file by at_s"
            )
        arrivals.append(arrival)
    if not arrivals:
        raise ConfigError(f"{path} holds no request; it needs lines with {', '.join(FIELDS)}")
    first_s = arrivals[0].at_s
    shifted = tuple(msgspec.structs.replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals)
    return Traffic(f"file:{path}", shifted, num_requests=len(shifted))


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in FIELDS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}, line 1: the header lacks {', '.join(missing)}; it must name {', '.join(FIELDS)}")
    for row in reader:
        yield reader.line_num, row


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: not a JSON object with {', '.join(FIELDS)}")
        yield number, row


def _arrival(where: str, row: Mapping[str, Any]) -> Arrival:
    def read(name: str, inside: Callable[[float], bool], meaning: str) -> float:
        return checked_number(f"{where}: {name}", str(row.get(name)), inside, meaning)

    counts = [read(name, lambda v: v == int(v) and 1 <= v <= MAX_TOKENS, "a number of tokens from 1") for name in FIELDS[1:]]
    at_s = read("at_s", lambda v: abs(v) <= 1e12, "a time in seconds")
    return Arrival(at_s, int(counts[0]), int(counts[1]))

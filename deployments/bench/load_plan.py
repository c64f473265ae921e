"""What `outrider bench load` is asked to do, checked before anything is sent."""

import itertools
import json
import math
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.bench.load_loops import Span
from deployments.bench.prompts import PROMPTS
from engine.errors import ConfigError
from engine.testing.profiles import is_emulated, parse_emulation

SWEEP, PACED_SWEEP, QUICK_SWEEP, QUICK_PACED_SWEEP = (
    (1, 2, 4, 8, 16, 32, 64),
    (1, 2, 4, 8, 16, 32, 64, 128, 256),
    (1, 4),
    (1, 64),
)
MAX_CONCURRENCY = 4096
ARRIVALS = 10
"""Expected within the window of an open loop whose duration was not chosen."""
DEFAULT_EMULATION = "emulated:free?step_ms=30&c=0.1&alpha=0.8&recovery=0.7&bonus=0.9&knee=256"
"""That of `outrider bench rounds`: steps of 30 ms up to 256 tokens, proportional to the tokens from there on."""


@dataclass(frozen=True)
class LoadOptions:
    """The options of the command as they were given; None = not given."""

    url: str | None = None
    paced: str | None = None
    """Name of an emulated pair; empty for `DEFAULT_EMULATION`."""
    model: str | None = None
    api: str = "chat"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    sweep: str | None = None
    rate: str | None = None
    duration: float | None = None
    requests: int | None = None
    repeats: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    prompts: Path | None = None
    quick: bool = False

    @property
    def emulation(self) -> str | None:
        """Name of the emulated pair, if it is to be one."""
        return DEFAULT_EMULATION if self.paced == "" else self.paced


@dataclass(frozen=True)
class Request:
    """One request of a load, whatever the arm."""

    prompt: str
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class LoadPlan:
    """What is measured. ``levels`` are concurrencies, in an open loop requests per second."""

    levels: tuple[float, ...]
    is_open: bool
    warm_up_s: float
    duration_s: float | None
    num_requests: int | None
    repeats: int
    max_tokens: int
    temperature: float
    seed: int
    texts: tuple[str, ...]

    @classmethod
    def of(cls, options: LoadOptions) -> "LoadPlan":
        """Check the options and fill in what was not given; raises `ConfigError` that names the option and the fix."""
        if options.sweep is not None and options.rate is not None:
            raise ConfigError("--sweep is a closed loop and --rate an open one: give one of them")
        if options.duration is not None and options.requests is not None:
            raise ConfigError("--duration and --requests both say how long a load is measured: give one of them")
        _at_least("--requests", options.requests, 1)
        _at_least("--repeats", options.repeats, 1)
        _at_least("--max-tokens", options.max_tokens, 2, "the time between tokens needs two of them")
        if options.duration is not None and not 0 < options.duration < math.inf:
            raise ConfigError(f"--duration {options.duration:g}: a number of seconds above 0 is needed")
        if not 0 <= options.temperature <= 2:
            raise ConfigError(f"--temperature {options.temperature:g}: must lie between 0 and 2")
        if not 0 <= options.seed < 1 << 32:
            raise ConfigError(f"--seed {options.seed}: must lie between 0 and {(1 << 32) - 1}")
        quick = options.quick
        duration_s = options.duration
        if duration_s is None and options.requests is None and options.rate is None:
            duration_s = 2.0 if quick else 10.0
        return cls(
            levels=_levels(options),
            is_open=options.rate is not None,
            warm_up_s=0.5 if quick else 2.0,
            duration_s=duration_s,
            num_requests=options.requests,
            repeats=options.repeats or (2 if quick else 3),
            max_tokens=options.max_tokens or (48 if quick else 128),
            temperature=options.temperature,
            seed=options.seed,
            texts=_built_in_texts() if options.prompts is None else read_prompts(options.prompts),
        )

    def span(self, level: float) -> Span:
        """How long a load of this level is measured. A rate without a duration is watched for `ARRIVALS` arrivals at least."""
        duration_s = self.duration_s
        if duration_s is None:
            duration_s = max(10.0, ARRIVALS / level)
        return Span(self.warm_up_s, duration_s, self.num_requests)

    def requests(self, level: float, repeat: int) -> Iterator[Request]:
        """The requests of a load in order, without end: the same for all arms but for the mark at the start of each prompt.

        The mark has never been sent before, so that no prefix cache of the server knows the prompt (or the TTFT would be that
        of the cache). Lengths are drawn between half of ``max_tokens`` and all of it: answers of one length would end together,
        and so would the next ones. The first requests of a closed loop are shorter, as if they had been under way for a while.
        """
        draw = random.Random(f"{self.seed} {level} {repeat}")
        mark = secrets.token_hex(6)
        texts: list[str] = []
        for number in itertools.count():
            if not texts:
                texts = draw.sample(self.texts, len(self.texts))
            length = draw.randint(max(2, self.max_tokens // 2), self.max_tokens)
            if not self.is_open and number < level:
                length = max(2, math.ceil(length * (number + 1) / level))
            yield Request(f"[{mark}-{number:06}] {texts.pop()}", length, draw.getrandbits(31))


def _at_least(name: str, value: int | None, least: int, reason: str = "") -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} {value}: must be at least {least}" + (f"; {reason}" if reason else ""))


def _levels(options: LoadOptions) -> tuple[float, ...]:
    if options.rate is not None:
        return _numbers("--rate", options.rate, "requests per second such as 2 or 0.5,1,2", float, 1e4)
    if options.sweep is not None:
        return _numbers("--sweep", options.sweep, "numbers of requests such as 1,2,4,8", int, MAX_CONCURRENCY)
    if options.paced is not None:
        return QUICK_PACED_SWEEP if options.quick else PACED_SWEEP
    return QUICK_SWEEP if options.quick else SWEEP


def _numbers(name: str, given: str, meaning: str, read: type[int] | type[float], most: float) -> tuple[float, ...]:
    try:
        values = [read(text) for text in given.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= most for value in values):
        raise ConfigError(f"{name} '{given}': expected {meaning}, each above 0 and at most {most:g}")
    return tuple(sorted(set(values)))


def _built_in_texts() -> tuple[str, ...]:
    return tuple(text for texts in PROMPTS.values() for text in texts)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a JSONL file, one ``{"prompt": "..."}`` or string per line; raises `ConfigError` that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028, inside a prompt
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from None
    texts = tuple(_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not texts:
        raise ConfigError(f'--prompts {path}: holds no prompt; write one {{"prompt": "..."}} per line')
    return texts


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        value = None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'--prompts {path}, line {number}: expected {{"prompt": "..."}}, got {line[:60]}')
    return text


def check_place(options: LoadOptions, *, has_config: bool) -> None:
    """Raise `ConfigError` for options that contradict each other about what is measured."""
    if options.url is not None and (options.paced is not None or has_config):
        raise ConfigError("--url measures a server that runs already: leave out --paced, --config and --set")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {options.url}: expected an address such as http://127.0.0.1:8000")
    if options.url is None and options.model is not None:
        raise ConfigError("--model names what a server at --url serves: without --url set target.model")
    if options.emulation is not None:
        if not is_emulated(options.emulation):
            raise ConfigError(f"--paced {options.emulation}: expected the name of an emulated pair such as {DEFAULT_EMULATION}")
        parse_emulation(options.emulation, "--paced")

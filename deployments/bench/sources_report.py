"""`outrider bench sources`: its options, and its figures as tables for a terminal and for a document."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.config import MODEL_SOURCES, OutriderConfig
from engine.errors import ConfigError
from engine.testing.profiles import is_emulated

SOURCES = (*MODEL_SOURCES, "heads", "ngram", "suffix")
ALL_KINDS = "all"
BEGIN, END = "<!-- outrider bench sources: begin -->", "<!-- outrider bench sources: end -->"
"""What stands between them in a document is replaced."""
HEADER = ("source", "c", "prompts", "α (tested)", "tokens per forward", "expected", "measured", "by load")
LEAST_TOKENS = 8
"""Of an answer: fewer hold hardly a draft."""
NOTE = (
    "α: accepted per drafted token whose predecessors were all accepted (how many there were); tokens per forward: of the "
    "target, the first of an answer included; c: draft step over target step, first quartiles of the rounds' own times; "
    "expected: the speed-up that the autoscaler's cost model makes of these three; measured: tokens per second over those "
    "without speculation, prompt by prompt in turns, reading the prompts included, median (quartiles), at a fixed depth "
    "and with the depth that follows the load. Draft and target ran one after the other on the same device. On a machine that "
    "does other work beside it only α and tokens per forward are to be trusted."
)


@dataclass(frozen=True)
class SourcesOptions:
    """The options of the command as they were given; None = not given."""

    config: Path | None = None
    settings: Sequence[str] = ()
    sources: str | None = None
    temperatures: str = "0,1"
    tokens: int | None = None
    quick: bool = False
    markdown: Path | None = None

    def chosen(self, config: OutriderConfig) -> list[str]:
        """Sources to measure, by default all but those that need a model which is not configured. Raises `ConfigError`."""
        own = config.draft.source
        if self.sources is None:
            return [name for name in SOURCES if name not in ("model", "heads") or name == own]
        names = list(dict.fromkeys(name.strip() for name in self.sources.split(",")))
        unknown = next((name for name in names if name not in SOURCES), None)
        if unknown is not None:
            raise ConfigError(f"--sources: unknown source '{unknown}'; a list of {', '.join(SOURCES)}")
        missing = next((name for name in names if name in ("model", "heads") and name != own), None)
        if missing is not None:
            raise ConfigError(f"--sources {missing} is measured as it is configured: set draft.source to {missing}")
        return names

    def values(self) -> list[float]:
        """Temperatures. Raises `ConfigError`."""
        try:
            values = list(dict.fromkeys(float(text) for text in self.temperatures.split(",")))
        except ValueError:
            values = [math.nan]
        if not all(0 <= value <= 2 for value in values):
            raise ConfigError(f"--temperatures must be numbers from 0 to 2, such as 0,1; got '{self.temperatures}'")
        return values

    def num_tokens(self) -> int:
        """Per answer. Raises `ConfigError`."""
        if self.tokens is None:
            return 32 if self.quick else 128
        if self.tokens < LEAST_TOKENS:
            raise ConfigError(f"--tokens must be at least {LEAST_TOKENS}, got {self.tokens}")
        return self.tokens

    def command(self) -> str:
        """What was typed, but for where the results go and where the configuration lies."""
        words = ["outrider", "bench", "sources"]
        words += ["--config", self.config.name] if self.config is not None else []
        words += [word for setting in self.settings for word in ("--set", setting)]
        words += ["--sources", self.sources] if self.sources is not None else []
        words += ["--temperatures", self.temperatures] if self.temperatures != SourcesOptions.temperatures else []
        words += ["--tokens", str(self.tokens)] if self.tokens is not None else []
        return shlex.join([*words, "--quick"] if self.quick else words)


def check_sources(config: OutriderConfig) -> None:
    """Raise `ConfigError` for a configuration in which nothing can be drafted."""
    if is_emulated(config.target.model):
        raise ConfigError(f"target.model '{config.target.model}' is emulated: it has no logits that a draft could agree with")
    if config.speculation.max_depth == 0:
        raise ConfigError("speculation.max_depth is 0, which switches drafts off: set it to 1 or more")


# --- a document -------------------------------------------------------------------------------------------------------------


def check_document(path: Path) -> None:
    """Raise `ConfigError` when the tables could not be written there, before anything is measured."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--markdown {path}: the folder {path.absolute().parent} does not exist")
    if path.exists():
        _split_document(path)


def write_document(path: Path, result: dict[str, Any]) -> None:
    """Put the tables between the markers of a document, or make one that holds nothing else. Raises `ConfigError`."""
    before, after = _split_document(path) if path.exists() else ("", "\n")
    path.write_text(f"{before}{BEGIN}\n{markdown(result)}\n{END}{after}", encoding="utf-8")


def _split_document(path: Path) -> tuple[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--markdown {path}: it cannot be read as text ({error})") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"--markdown {path}: the document has no lines '{BEGIN}' and '{END}' to write between: add them")
    return before, after


def markdown(result: dict[str, Any]) -> str:
    """The tables, one per temperature, with what they were measured by and on."""
    parts = [
        f"`{result['command']}` on {result['date']}: {result['model']} in {result['dtype']}, {result['machine']}; one request "
        f"at a time, {result['num_tokens']} tokens per answer, depth {result['depth']} unless it follows the load."
    ]
    for temperature in _temperatures(result):
        rows = [row for row in result["rows"] if row["temperature"] == temperature]
        lines = [_line(HEADER), _line(["---"] * len(HEADER)), *(_line(columns(row)) for row in rows)]
        rule = "greedy" if temperature == 0 else result["rule"]
        parts.append(f"Temperature {temperature:g} (`{rule}`):\n\n" + "\n".join(lines))
    if result["is_interrupted"]:
        parts.append("The run was interrupted: what is missing was not measured.")
    parts += [f"Not measured: `{name}` ({reason})." for name, reason in result["refused"].items()]
    return "\n\n".join([*parts, NOTE])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# --- a terminal -------------------------------------------------------------------------------------------------------------


def print_sources(result: dict[str, Any], console: Console) -> None:
    """The same for people at a terminal."""
    for temperature in _temperatures(result):
        table = Table(*HEADER, title=f"temperature {temperature:g}")
        table.columns[0].no_wrap = True
        for row in result["rows"]:
            if row["temperature"] == temperature:
                table.add_row(*columns(row), end_section=row["kind"] == ALL_KINDS)
        console.print(table)
    for name, reason in result["refused"].items():
        console.print(f"{name} is left out: {reason}", markup=False)
    if result["is_interrupted"]:
        console.print("interrupted: only prompts that every source had answered are counted")
    console.print(f"{result['model']}, {result['machine']}; {NOTE}", markup=False)


def columns(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one row, as `HEADER`."""
    alpha = "no drafts" if row["alpha"] is None else f"{row['alpha']:.0%} ({row['num_tested']})"
    return (
        row["source"],
        "-" if row["c"] is None else f"{row['c']:.2f}",
        row["kind"],
        alpha,
        f"{row['accepted_length']:.2f}",
        f"{row['expected_speedup']:.2f}",
        _spread(row["speedup"]),
        _spread(row["speedup_by_load"]),
    )


def _spread(values: Sequence[float]) -> str:
    low, median, high = values
    return f"{median:.2f}" if low == high else f"{median:.2f} ({low:.2f}–{high:.2f})"


def _temperatures(result: dict[str, Any]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in result["rows"]))

"""Devices that are not here: how long their steps take, and how well an emulated draft foresees its emulated target.

A profile is a pair: a target and a draft, each on GPUs of its own. The times are *rooflines*, not measurements. Matrix products
take the larger of reading the weights at 85 % of the memory's bandwidth and of computing at 65 % of the dense bf16 peak;
attention, whose kernels run in between and hardly compute, adds reading the KV cache. Communication between GPUs, kernel
launches and attention's own arithmetic are left out, so real devices are slower, the draft more so.
"""

import contextlib
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from engine.config import checked_number
from engine.errors import ConfigError

PREFIX = "emulated:"
FILE_PREFIX = f"{PREFIX}@"
"""Followed by a path: the file holds another emulated name, and may change while the models run."""
BANDWIDTH_SHARE, FLOPS_SHARE = 0.85, 0.65
"""Of the peak, as good kernels reach them."""
MEMORY_SHARE = 0.9
"""Of the GPU's memory, for weights and KV cache."""
BYTES_PER_PARAMETER = 2
PROFILE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens in one forward at which a worker announces its step times."""
PROFILE_CONTEXT = 64
GUESSES = 3
"""``recovery`` and ``bonus`` are given for this many guesses per position."""


class Timed(Protocol):
    """Something with step times."""

    @property
    def device(self) -> str:
        """What is emulated, in words."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV cache."""

    def step_s(self, num_tokens: int, context_tokens: int) -> float:
        """Seconds of one forward of ``num_tokens`` that reads the KV of ``context_tokens``."""


@dataclass(frozen=True)
class Gpu:
    """Data sheet of an SXM board: dense bf16 TFLOPS, TB/s of memory bandwidth, GB of memory."""

    name: str
    tflops: float
    tb_per_s: float
    memory_gb: float


@dataclass(frozen=True)
class Size:
    """A model: parameters, and bytes of K and V per token in bf16 (2 · layers · KV heads · head dimension · 2)."""

    name: str
    parameters: float
    kv_bytes: int


@dataclass(frozen=True)
class Roofline:
    """A model in bf16, split evenly over GPUs."""

    size: Size
    gpu: Gpu
    num_gpus: int = 1

    @property
    def device(self) -> str:
        """As `Timed.device`."""
        count = f"{self.num_gpus}x " if self.num_gpus > 1 else ""
        return f"emulated {count}{self.gpu.name} ({self.size.name})"

    @property
    def kv_capacity_tokens(self) -> int:
        """What the weights leave of the memory."""
        free = self.num_gpus * self.gpu.memory_gb * 1e9 * MEMORY_SHARE - self.size.parameters * BYTES_PER_PARAMETER
        return int(free / self.size.kv_bytes)

    def step_s(self, num_tokens: int, context_tokens: int) -> float:
        """As `Timed.step_s`: max(weights / bandwidth, 2 · parameters · tokens / FLOPS) + KV / bandwidth."""
        bytes_per_s = self.num_gpus * self.gpu.tb_per_s * 1e12 * BANDWIDTH_SHARE
        weights_s = self.size.parameters * BYTES_PER_PARAMETER / bytes_per_s
        compute_s = 2 * self.size.parameters * num_tokens / (self.num_gpus * self.gpu.tflops * 1e12 * FLOPS_SHARE)
        return max(weights_s, compute_s) + context_tokens * self.size.kv_bytes / bytes_per_s


@dataclass(frozen=True)
class Flat:
    """Steps of a chosen time up to ``knee`` tokens, proportional to the tokens from there on; contexts cost nothing."""

    seconds: float
    knee: float

    @property
    def device(self) -> str:
        """As `Timed.device`."""
        return f"emulated device with steps of {self.seconds * 1e3:g} ms"

    @property
    def kv_capacity_tokens(self) -> int:
        """More than any benchmark here needs."""
        return 1 << 20

    def step_s(self, num_tokens: int, context_tokens: int) -> float:
        """As `Timed.step_s`."""
        return self.seconds * max(1.0, num_tokens / self.knee)


# NVIDIA's data sheets of the SXM boards.
_H100 = Gpu("H100", 989, 3.35, 80)
_H200 = Gpu("H200", 989, 4.8, 141)
# Parameters and shapes from the models' cards and config.json on Hugging Face.
_LLAMA_70B = Size("Llama-3.1-70B", 70.6e9, 2 * 80 * 8 * 128 * 2)
_LLAMA_8B = Size("Llama-3.1-8B", 8.03e9, 2 * 32 * 8 * 128 * 2)
_LLAMA_1B = Size("Llama-3.2-1B", 1.24e9, 2 * 16 * 8 * 64 * 2)
_QWEN_72B = Size("Qwen2.5-72B", 72.7e9, 2 * 80 * 8 * 128 * 2)
_QWEN_1_5B = Size("Qwen2.5-1.5B", 1.54e9, 2 * 28 * 2 * 128 * 2)

PAIRS: dict[str, tuple[Roofline, Roofline]] = {
    "70b-h100": (Roofline(_LLAMA_70B, _H100, 4), Roofline(_LLAMA_1B, _H100)),
    "70b-h200": (Roofline(_LLAMA_70B, _H200, 4), Roofline(_LLAMA_1B, _H200)),
    "72b-h200": (Roofline(_QWEN_72B, _H200, 4), Roofline(_QWEN_1_5B, _H200)),
    "8b-h100": (Roofline(_LLAMA_8B, _H100), Roofline(_LLAMA_1B, _H100)),
}
"""Target and draft by name."""
FREE = "free"
"""The profile whose times the name itself gives."""


@dataclass(frozen=True)
class Emulation:
    """A pair of emulated models, and a script of what they say."""

    name: str
    """As the user wrote it."""
    target: Timed
    draft: Timed
    alpha: float = 0.8
    """Probability that the draft's token at a position is the target's."""
    recovery: float = 0.7
    """Where it is not: probability that the target's is among the draft's next `GUESSES` guesses."""
    bonus: float | None = None
    """Probability that the target's token is among the draft's first `GUESSES` guesses; None = by alpha and recovery."""
    hop_s: float = 0.0
    """Added to the draft's answer twice, there and back."""
    seed: int = 0

    def recovered(self, num_guesses: int) -> float:
        """Probability that a wrong draft's next ``num_guesses`` guesses hold the target's token.

        ``1 - (1 - recovery)^(n / 3)``, but for n = 2 what ``bonus`` implies: three guesses after a whole draft are the draft's
        own token and two more, so ``bonus = alpha + (1 - alpha) * recovered(2)``.
        """
        of, share = GUESSES, self.recovery
        if num_guesses < GUESSES and self.bonus is not None and self.alpha < 1:
            of, share = GUESSES - 1, (self.bonus - self.alpha) / (1 - self.alpha)
        return float(1 - (1 - share) ** (num_guesses / of))


class EmulationFile:
    """An emulation that is written in a file and followed as that changes: one deployment is measured under many conditions.

    Replace the file in one step (`os.replace`). Raises `ConfigError` that names ``field`` for what cannot be used when it is
    first read; later that leaves the emulation as it was.
    """

    def __init__(self, model: str, field: str):
        self._path, self._field = Path(model.removeprefix(FILE_PREFIX)), field
        self._changed_ns = 0
        self._emulation = self._read()

    def __call__(self) -> Emulation:
        """The emulation of the moment."""
        with contextlib.suppress(OSError, ConfigError):
            if self._path.stat().st_mtime_ns != self._changed_ns:
                self._emulation = self._read()
        return self._emulation

    def _read(self) -> Emulation:
        try:
            self._changed_ns = self._path.stat().st_mtime_ns
            name = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._field}: cannot read {self._path}: {error}") from None
        if not is_emulated(name) or name.startswith(FILE_PREFIX):
            raise ConfigError(f"{self._field}: {self._path} must hold a name such as {PREFIX}{FREE}, got '{name[:80]}'")
        return parse_emulation(name, self._field)


def follow_emulation(model: str, field: str) -> Callable[[], Emulation]:
    """What gives the emulation of the moment: the file's of that time, or always the same. Raises as `parse_emulation`."""
    if model.startswith(FILE_PREFIX):
        return EmulationFile(model, field)
    emulation = parse_emulation(model, field)
    return lambda: emulation


def is_emulated(model: str | None) -> bool:
    """Whether a model's name asks for an emulated device."""
    return model is not None and model.startswith(PREFIX)


def parse_emulation(model: str, field: str) -> Emulation:
    """Read ``emulated:<profile>?<parameter>=<value>&...``, or ``emulated:@<file>`` as it is now.

    Raises `ConfigError` that names ``field`` and the fix.
    """
    if model.startswith(FILE_PREFIX):
        return EmulationFile(model, field)()
    profile, _, query = model.removeprefix(PREFIX).partition("?")
    if profile not in (*PAIRS, FREE):
        close = difflib.get_close_matches(profile, [*PAIRS, FREE], n=1)
        hint = f"did you mean '{PREFIX}{close[0]}'?" if close else f"there are: {', '.join([*PAIRS, FREE])}"
        raise ConfigError(f"{field}: unknown emulated profile '{profile}'; {hint}")
    given = _parameters(query, profile, field)
    emulation = _free(model, given) if profile == FREE else Emulation(model, *PAIRS[profile])
    emulation = replace(
        emulation,
        alpha=given.get("alpha", emulation.alpha),
        recovery=given.get("recovery", emulation.recovery),
        bonus=given.get("bonus"),
        hop_s=given.get("hop_ms", 0.0) / 1e3,
        seed=int(given.get("seed", 0)),
    )
    _check_bonus(emulation, field)
    return emulation


_Bounds = Callable[[float], bool]
_PROBABILITY: tuple[_Bounds, str] = (lambda v: 0 <= v <= 1, "a number from 0 to 1")
_BELOW_ONE: tuple[_Bounds, str] = (lambda v: 0 <= v < 1, "a number from 0 to below 1")
_TIME: tuple[_Bounds, str] = (lambda v: 0 < v <= 1e5, "a number above 0 and at most 100000")
_PARAMETERS: Mapping[str, tuple[_Bounds, str]] = {
    "alpha": _PROBABILITY,
    "recovery": _BELOW_ONE,
    "bonus": _PROBABILITY,
    "hop_ms": (lambda v: 0 <= v <= 1e4, "a number from 0 to 10000"),
    "seed": (lambda v: v == int(v) and 0 <= v < 1 << 32, "an integer of 32 bits"),
}
_FREE_PARAMETERS: Mapping[str, tuple[_Bounds, str]] = {
    "step_ms": _TIME,
    "c": (lambda v: 0 < v <= 10, "a number above 0 and at most 10"),
    "knee": (lambda v: 1 <= v <= 1e9, "a number from 1"),
}


def _parameters(query: str, profile: str, field: str) -> dict[str, float]:
    known = {**_PARAMETERS, **(_FREE_PARAMETERS if profile == FREE else {})}
    given: dict[str, float] = {}
    for part in query.split("&") if query else ():
        name, equals, text = part.partition("=")
        if name not in known:
            only = f" ('{name}' belongs to {PREFIX}{FREE})" if name in _FREE_PARAMETERS else ""
            raise ConfigError(f"{field}: unknown parameter '{name}' of {PREFIX}{profile}{only}; there are: {', '.join(known)}")
        if name in given:
            raise ConfigError(f"{field}: '{name}' is given twice; keep one of them")
        given[name] = checked_number(f"{field}: {name}", text if equals else "", *known[name])
    return given


def _free(model: str, given: Mapping[str, float]) -> Emulation:
    step_s, knee = given.get("step_ms", 30.0) / 1e3, given.get("knee", 256.0)
    return Emulation(model, Flat(step_s, knee), Flat(given.get("c", 0.1) * step_s, knee))


def _check_bonus(emulation: Emulation, field: str) -> None:
    if emulation.bonus is None:
        return
    least, most = emulation.alpha, emulation.alpha + (1 - emulation.alpha) * emulation.recovery
    if not least <= emulation.bonus <= most:
        raise ConfigError(
            f"{field}: bonus must lie between alpha and alpha + (1 - alpha) * recovery, here {least:g} and {most:g}, "
            f"got {emulation.bonus:g}: {GUESSES} guesses hold the draft's own token and {GUESSES - 1} more"
        )

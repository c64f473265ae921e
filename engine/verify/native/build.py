"""Compile the kernels with the system's compiler, once per source, compiler and processor, and load them."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from engine.config import cache_folder

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "rows.c"))
COMPILERS = ("gcc", "cc")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp")
TIMEOUT_S = 120.0


class NoKernels(Exception):
    """Why there are no compiled kernels here; torch's operations compute the same."""


@cache
def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with the reason in the log once, where there can be none."""
    try:
        return load(cache_folder() / "native")
    except NoKernels as reason:
        logger.warning("no compiled kernels, so torch's operations run, which are slower: %s", reason)
        return None


def loaded_kernels() -> ctypes.CDLL | None:
    """The compiled kernels if something in this process has asked for them (`kernels`), else None: nothing is compiled here.

    So what looks at logits runs compiled where models do, and torch's operations where the configuration wants these.
    """
    return kernels() if kernels.cache_info().currsize else None


def load(folder: Path) -> ctypes.CDLL:
    """Compile into ``folder`` unless it is there already, and load. Raises `NoKernels`."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise NoKernels("they are faster than torch's with AVX-512 only, which this processor does not have")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoKernels(f"there is no C compiler ({' or '.join(COMPILERS)} on the PATH)")
    runtime = openmp_runtime()
    path = folder / f"kernels-{_key(compiler, runtime)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    _compile(compiler, runtime, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"{path} cannot be made or loaded: {error}") from None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.workspace_floats.restype = integer
    library.workspace_floats.argtypes = [pointer, integer, ctypes.c_int]
    library.forward.restype = None
    library.forward.argtypes = [pointer, pointer, pointer, ctypes.c_int, pointer]
    library.largest.restype = None
    library.largest.argtypes = [pointer, ctypes.c_int, integer, integer, integer, ctypes.c_int, pointer, pointer]
    library.draw.restype = None
    library.draw.argtypes = [
        *(pointer, integer, integer, integer, pointer, pointer),
        *(ctypes.c_double, ctypes.c_int, pointer, pointer),
    ]
    return library


def openmp_runtime() -> Path:
    """The OpenMP library that torch's own operations call. Another one would bring threads that spin against torch's.

    A process may hold several (sentencepiece has its own), so their names do not tell. Raises `NoKernels`.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        address = ctypes.cast(ctypes.CDLL(str(torch_library)).GOMP_parallel, ctypes.c_void_p).value or 0
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except (OSError, AttributeError) as error:
        raise NoKernels(f"they share torch's OpenMP threads, which this torch does not offer: {error}") from None
    for span, *_, path in (line for line in maps if len(line) == 6):
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return Path(path)
    raise NoKernels("they share torch's OpenMP threads, whose library is not among the mapped files")


def _compile(compiler: str, runtime: Path, path: Path) -> None:
    """The runtime is linked by its path, so that the loader finds the very library that torch has loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled, linked = [Path(scratch) / f"{source.stem}.o" for source in SOURCES], Path(scratch) / path.name
        for source, to in zip(SOURCES, compiled, strict=True):
            _run([compiler, *FLAGS, "-c", str(source), "-o", str(to)])
        _run([compiler, "-shared", *map(str, compiled), str(runtime), "-lm", "-o", str(linked)])
        os.replace(linked, path)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernels(f"{command[0]} did not finish within {TIMEOUT_S:.0f} s") from None
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise NoKernels(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")
    return result.stdout


def _key(compiler: str, runtime: Path) -> str:
    """Of everything that the compiled file depends on: another processor must not load instructions that it lacks."""
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        raise NoKernels("the processor does not say in /proc/cpuinfo what it can do") from None
    sources = [source.read_text(encoding="utf-8") for source in SOURCES]
    parts = [*sources, _run([compiler, "--version"]), *FLAGS, runtime.name, processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

"""What a process says of itself and of its machine, for `outrider doctor`."""

import importlib.metadata
import os
import platform
import re
import socket
import sys
from pathlib import Path

from deployments.messages import ProcessFacts

PACKAGES = ("torch", "transformers", "ray")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def read_facts() -> ProcessFacts:
    """Of this process. torch is asked for its threads only where it is loaded already."""
    torch = sys.modules.get("torch")
    total, available = memory_bytes()
    return ProcessFacts(
        process_id=os.getpid(),
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=installed_packages(),
        num_cpus=len(os.sched_getaffinity(0)),
        num_threads=torch.get_num_threads() if torch is not None else None,
        spin_count=os.environ.get("GOMP_SPINCOUNT"),
        nice=os.nice(0),
        memory_bytes=total,
        memory_available_bytes=available,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        haproxy=os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "0") == "1",
    )


def installed_packages() -> dict[str, str]:
    """Versions by name, of those packages that both sides of a stream or handle must agree on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)}


def memory_bytes() -> tuple[int | None, int | None]:
    """(all, available) memory of the machine, or of the container where that has less; None where it cannot be read."""
    total, available = _read_meminfo()
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and total is not None and limit < total:
        left = limit - (used or 0)
        return limit, left if available is None else min(available, left)
    return total, available


def _read_meminfo() -> tuple[int | None, int | None]:
    try:
        text = _MEMINFO.read_text()
    except OSError:
        return None, None
    sizes = {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _read_number(path: Path) -> int | None:
    """The number in a file; None for a file that is not there or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

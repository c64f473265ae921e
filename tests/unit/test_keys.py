"""API keys from a file, while it changes under a running server."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from deployments.keys import LOOK_EVERY_S, KeyFile, KeySet
from engine.errors import ConfigError
from engine.testing import FakeClock

GOOD, OTHER = "sk-" + "a" * 40, "sk-" + "b" * 40


def hashed(key: str) -> str:
    """A line of the file, made as the guide says: `printf %s "$KEY" | sha256sum`."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Secret:
    """A mounted Kubernetes Secret: keys -> ..data/keys, ..data -> ..1; an update swaps the link `..data`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = 0
        self.path = folder / "keys"
        self.path.symlink_to("..data/keys")

    def write(self, text: str) -> None:
        self._number += 1
        version = self._folder / f"..{self._number}"
        version.mkdir()
        (version / "keys").write_text(text)
        new = self._folder / "..data_tmp"
        new.symlink_to(version.name)
        os.rename(new, self._folder / "..data")


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    made = Secret(tmp_path)
    made.write(hashed(GOOD))
    return made


def test_hashed_and_clear_lines_let_in_their_keys_only() -> None:
    """Bug guarded: a hash in the file that is itself taken for a key, so that whoever reads the file gets in."""
    keys = KeySet.parse(f"# ops\n\n  {hashed(GOOD)}  \n{OTHER}\n")
    assert keys.accepts(GOOD)
    assert keys.accepts(OTHER)
    for wrong in ("", "sk-", GOOD[:-1], GOOD + "a", hashed(GOOD), hashed(GOOD).removeprefix("sha256:"), "# ops", "gööd"):
        assert not keys.accepts(wrong), wrong
    assert KeySet.parse(hashed(GOOD).upper().replace("SHA256", "sha256")).accepts(GOOD)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a comparison that ends at the first key that fits, so that the time tells which one it was."""
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    keys = KeySet.of("one", "two", "three")
    for key in ("one", "two", "three", "a much longer one", ""):
        compared.clear()
        keys.accepts(key)
        assert compared == [(32, 32)] * 3, key


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# only a comment\n\n", "holds no key"),
        (f"{OTHER}\nsha256:abc", "line 2 is no SHA-256"),
        (f"sha256:{'g' * 64}", "line 1 is no SHA-256"),
        (f"{hashed(GOOD)} alice", "line 1 is no SHA-256"),
        (f"{OTHER} alice", "line 1 is no key"),
        ("schlüssel", "line 1 is no key"),
        ("a\x00b", "line 1 is no key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_and_not_shown(tmp_path: Path, text: str, said: str) -> None:
    """Bug guarded: a line that can never match and is taken all the same; a key that appears in the log."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        KeyFile(path)
    assert str(error.value).startswith(f"api.keys_file {path}: ")
    assert said in str(error.value)
    assert OTHER not in str(error.value)
    assert "alice" not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Bug guarded: a server that starts open, or with a traceback, because its keys are not there."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, said in (("missing", "No such file"), (".", "Is a directory"), ("binary", "not UTF-8")):
        with pytest.raises(ConfigError, match=said):
            KeyFile(tmp_path / name)


def test_a_rotated_secret_is_taken_up(secret: Secret) -> None:
    """Bug guarded: keys that are read once, so that a key that was taken away works until the next restart."""
    clock = FakeClock()
    keys = KeyFile(secret.path, clock=clock)
    secret.write(f"{hashed(GOOD)}\n{hashed(OTHER)}\n")
    clock.advance(LOOK_EVERY_S)
    assert keys.accepts(OTHER)
    assert keys.accepts(GOOD)
    secret.write(hashed(OTHER))
    clock.advance(LOOK_EVERY_S)
    assert not keys.accepts(GOOD)
    assert keys.accepts(OTHER)


def test_a_file_written_in_place_is_taken_up(tmp_path: Path) -> None:
    """Bug guarded: only new inodes are seen, so that an editor or `>>` changes nothing."""
    path = tmp_path / "keys"
    path.write_text(hashed(GOOD))
    clock = FakeClock()
    keys = KeyFile(path, clock=clock)
    with path.open("a") as file:
        file.write(f"\n{hashed(OTHER)}")
    clock.advance(LOOK_EVERY_S)
    assert keys.accepts(OTHER)


def test_the_file_is_looked_at_once_a_second(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a look at the file system in front of every request, which a slow volume makes a stall of all."""
    clock = FakeClock()
    keys = KeyFile(secret.path, clock=clock)
    looks = []
    look = KeyFile._look
    monkeypatch.setattr(KeyFile, "_look", lambda self: looks.append(1) or look(self))
    for _ in range(10):
        keys.accepts(GOOD)
    assert looks == []
    clock.advance(LOOK_EVERY_S)
    for _ in range(10):
        keys.accepts(GOOD)
    assert looks == [1]


def test_a_broken_file_keeps_the_last_keys(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: everybody shut out, or let in, by a slip in the Secret; a log that is flooded with it."""
    clock = FakeClock()
    keys = KeyFile(secret.path, clock=clock)
    for break_it in (lambda: secret.write(""), lambda: secret.write("sha256:0"), secret.path.unlink):
        break_it()
        caplog.clear()
        with caplog.at_level(logging.ERROR, "ray.serve"):
            for _ in range(3):
                clock.advance(LOOK_EVERY_S)
                assert keys.accepts(GOOD)
                assert not keys.accepts(OTHER)
        assert len(caplog.records) == 1
        assert "going on with the keys from before" in caplog.text
    secret.path.symlink_to("..data/keys")
    secret.write(hashed(OTHER))
    clock.advance(LOOK_EVERY_S)
    assert keys.accepts(OTHER)

"""API keys: which bearer tokens are let in, from a file that may change while requests run."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from engine.drivers import Clock
from engine.errors import ConfigError

logger = logging.getLogger("ray.serve")
LOOK_EVERY_S = 1.0
"""How often the file is looked at: a key that was taken out still works for at most this long."""
_HASH = "sha256:"
# (device, inode, size, time of the last change in ns): another one after every write, rename or symlink swap.
_Version = tuple[int, int, int, int]


class Keys(Protocol):
    """Who is let in."""

    def accepts(self, key: str) -> bool:
        """Whether ``key`` is one of the keys; takes the same time for every key of one length."""


class KeySet:
    """A fixed set of keys, kept as SHA-256 digests of 32 bytes.

    One plain SHA-256 and no slow password hash: those protect secrets that can be guessed, by making each guess expensive. API
    keys are random with 128 bits and more, which nobody finds by trying; and a slow hash in front of every request would be a
    way to overload the server.
    """

    def __init__(self, digests: Iterable[bytes]):
        self._digests = tuple(frozenset(digests))

    @classmethod
    def of(cls, *keys: str) -> "KeySet":
        """The set of these keys, given in clear."""
        return cls(_digest(key) for key in keys)

    @classmethod
    def parse(cls, text: str) -> "KeySet":
        """One key per line: ``sha256:`` and 64 hex digits, or the key itself. Empty lines and ``#`` comments do not count.

        Raises `ValueError` for a hash that is none, for a key with a space in it, and without any key.
        """
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
        digests = [_parse_line(number, line) for number, line in lines if line and not line.startswith("#")]
        if not digests:
            raise ValueError("it holds no key: with an empty file nobody could be let in")
        return cls(digests)

    def accepts(self, key: str) -> bool:
        """Compares with every key to the last byte, so that the time says nothing about them."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class KeyFile:
    """The keys of a file, read again when it changes; a file that cannot be used changes nothing and is logged once.

    A Kubernetes Secret changes by a swap of the symlink that its path leads through, and an editor by a new file under the same
    name: both are seen, because the file behind the path is looked at.
    """

    def __init__(self, path: Path, *, clock: Clock = time.monotonic):
        """Raises `ConfigError` when the file cannot be used: the first time there are no keys to go on with."""
        self._path = path
        self._clock = clock
        self._version = self._look()
        try:
            self._keys = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"api.keys_file {path}: {_reason(error)}") from None
        self._look_at_s = clock() + LOOK_EVERY_S

    def accepts(self, key: str) -> bool:
        """By the file as it was at most `LOOK_EVERY_S` ago."""
        self._follow()
        return self._keys.accepts(key)

    def _follow(self) -> None:
        now_s = self._clock()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        # Looked at before it is read: what is written in between has another version and is read the next time.
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = self._read()
            logger.info("api.keys_file %s was read again", self._path)
        except (OSError, ValueError) as error:
            logger.error("api.keys_file %s: %s; going on with the keys from before", self._path, _reason(error))

    def _look(self) -> _Version | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> KeySet:
        return KeySet.parse(self._path.read_text(encoding="utf-8"))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _parse_line(number: int, line: str) -> bytes:
    """The digest; errors name the line and never show it."""
    if line.startswith(_HASH):
        digits = line.removeprefix(_HASH)
        if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
            raise ValueError(f"line {number} is no SHA-256: after '{_HASH}' come 64 hex digits, as `sha256sum` prints them")
        return bytes.fromhex(digits)
    if not (line.isascii() and line.isprintable()) or " " in line:
        raise ValueError(f"line {number} is no key: one per line, of ASCII letters, digits and signs, and nothing behind it")
    return _digest(line)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)

"""The secret of the streams, from a file."""

from pathlib import Path

import pytest

from deployments.wire import read_secret
from engine.config import StreamsConfig
from engine.errors import ConfigError


def test_old_and_new_processes_have_the_secret_of_the_file(tmp_path: Path) -> None:
    """Bug guarded: a secret per deployment although there is a file; an old Api cannot go on in a new lane then."""
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    streams = StreamsConfig(secret_file=path)
    assert read_secret(streams, "of the old deployment") == read_secret(streams, "of the new one") == "0123456789abcdef"


def test_without_a_file_the_generated_secret_counts() -> None:
    """Bug guarded: an empty secret, which everybody knows."""
    assert read_secret(StreamsConfig(), "generated") == "generated"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "at least 16 characters"),
        (b"short\n", "at least 16 characters"),
        (b"two lines of text\nwhich no header holds", "one line"),
        ("ein schöner Schlüssel".encode(), "not ASCII"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """Bug guarded: a secret that can be guessed, or that gRPC refuses to send as a header, minutes after the start."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_secret(StreamsConfig(secret_file=path), "generated")
    assert str(error.value).startswith("streams.secret_file: ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Bug guarded: a process that goes on with a secret of its own, and that nobody understands."""
    with pytest.raises(ConfigError, match=r"streams\.secret_file: cannot read .*No such file"):
        read_secret(StreamsConfig(secret_file=tmp_path / "missing"), "generated")

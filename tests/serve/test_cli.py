"""Mistakes on the command line: one clear line, the right exit code, no traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import write_random_draft


def outrider(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "deployments.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--config", "/nowhere/outrider.yaml"], 2, ["/nowhere/outrider.yaml", "No such file"]),
        (["serve", "--set", "target.modle=x"], 2, ["target.modle", "did you mean 'target.model'"]),
        (["serve", "--set", "draft"], 2, ["section.key=value"]),
        (["serve", "--set", "target.model=/nowhere/model.gguf"], 1, ["target.model", "/nowhere/model.gguf"]),
        (["generate", "hello", "--set", "draft.source=model"], 2, ["draft.model"]),
        (["generate", "hello", "--set", "target.model=/nowhere/model"], 1, ["target.model", "/nowhere/model"]),
        (["generate", "hello", "--max-tokens", "0"], 1, ["max_tokens"]),
        (["generate", "hello", "--temperature", "nan"], 1, ["temperature"]),
        (["fetch", "gpt5"], 2, ["gpt5", "smollm2"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], code: int, words: list[str]) -> None:
    """Guards against tracebacks, and against models that are loaded before the configuration was read."""
    assert_one_line(outrider(*arguments), code, *words)


def test_a_taken_port_is_named() -> None:
    """Guards against a start that fails minutes later, after the models were loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_one_line(outrider("serve", "--set", f"api.port={port}"), 2, str(port), "api.port")


def test_swapped_draft_and_target_are_refused(tmp_path: Path) -> None:
    """Guards against a draft that is slower than the model it is to speed up."""
    small = write_random_draft(tmp_path / "small", "smollm2")
    arguments = ["serve", "--set", f"target.model={small}", "--set", "draft.source=model", "--set", "draft.model=smollm2"]
    # Both mistakes in one: `source` must come first for the configuration to be valid at all.
    assert_one_line(outrider(*arguments), 1, "swapped")


def test_generate_prints_an_answer() -> None:
    """Guards the way without Ray: the answer on stdout, the figures on stderr."""
    result = outrider("generate", "Count: one two one two one two", "--max-tokens", "24", "--set", "speculation.depth=2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "tokens in" in result.stderr
    assert "draft tokens accepted" in result.stderr

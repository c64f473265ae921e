"""The README's own way, as somebody would type it: serve, ask, look, measure, stop."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import free_port
from helpers import wait_until
from test_cli import outrider

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0


@pytest.fixture(scope="module")
def served(serve_cluster: None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`outrider serve` in a process of its own: (address, process).

    Beside the cluster of this process, whose HAProxy it once fought for ports that it had inherited with the environment.
    """
    port = free_port()
    command = [sys.executable, "-m", "deployments.cli", "serve", "--set", f"api.port={port}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "RAY_AUTH_MODE": "token"}
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        return False

    wait_until(answers, bool, START_S, "outrider serve answers")
    yield url, process
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_the_readmes_python_answers(served: tuple[str, subprocess.Popen[str]]) -> None:
    """Bug guarded: the first example that anybody copies does not run against the server that the line above it starts."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "from openai import OpenAI" in block]
    assert "    ...\n" in example
    told = example.replace("http://127.0.0.1:8000", served[0]).replace("    ...\n", "    print(chunk)\n")
    result = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "accepted_prediction_tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "codes", "told"),
    [
        (["top", "--once"], (0,), "ready"),
        (["doctor", "--json"], (0, 1), '"findings"'),
        (
            ["bench", "load", "--sweep", "1", "--requests", "2", "--repeats", "1", "--max-tokens", "8", "--json"],
            (0,),
            '"points"',
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_commands_for_a_running_server(
    served: tuple[str, subprocess.Popen[str]], arguments: list[str], codes: tuple[int, ...], told: str
) -> None:
    """Bug guarded: a command that works in the process of a test and not as a user runs it, beside a server of its own."""
    result = outrider(*arguments, "--url", served[0])
    assert result.returncode in codes, result.stderr
    assert told in result.stdout
    if "--json" in arguments:
        json.loads(result.stdout.splitlines()[-1])


def test_ctrl_c_ends_it(served: tuple[str, subprocess.Popen[str]]) -> None:
    """Bug guarded: a server that goes on, or a traceback, after the key that the README names."""
    url, process = served
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/livez", timeout=5)

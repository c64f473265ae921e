"""The README's own way, as somebody would type it: serve, ask, look, measure, stop."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import free_port
from helpers import wait_until
from test_cli import outrider

from deployments.cli import main

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXPORTER = """
def to_files():
    import os
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    file = open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.spans"), "a")
    return [SimpleSpanProcessor(ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\\n"))]
"""


def exported() -> dict[str, str]:
    """The variables of the deployment guide, as its commands set them."""
    guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    lines = re.findall(r"^export ((?:\w+=\S+ *)+)", guide, re.MULTILINE)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the served application's spans are written to, a file for each of its processes."""
    folder = tmp_path_factory.mktemp("spans")
    (folder / "spans_to_files.py").write_text(EXPORTER)
    return folder


@pytest.fixture(scope="module")
def served(serve_cluster: None, spans: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`outrider serve --config FILE` in a process of its own, with the guide's variables: (address, process).

    Spans go to files instead of a collector, and all of them do. Beside the cluster of this process, whose HAProxy it once
    fought for ports that it had inherited with the environment.
    """
    port = free_port()
    file = spans / "outrider.yaml"
    # The README's example names no limit, and what a small model says at temperature 1 may fill its context.
    file.write_text(f"api: {{port: {port}, default_max_tokens: 64}}\n")
    guide = exported()
    assert {"RAY_SERVE_ENABLE_HA_PROXY", "RAY_AUTH_MODE", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= guide.keys()
    environment = {
        **os.environ,
        **guide,
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "spans_to_files:to_files",
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
        "PYTHONPATH": os.pathsep.join([str(spans), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "deployments.cli", "serve", "--config", str(file), "--set", "speculation.depth=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
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


def test_the_demo_asks_and_shows_what_speculation_did(
    served: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: the first command of the README ends in a traceback after the models were loaded.

    On the server that runs here already, in place of one of its own; `make demo` is `outrider fetch smollm2` before it.
    """
    monkeypatch.setattr("deployments.launch.running", lambda config, address: contextlib.nullcontext())
    assert main(["fetch", "smollm2"]) == 0
    assert Path(capsys.readouterr().out.strip()).exists()
    port = served[0].rpartition(":")[2]
    assert main(["demo", "--prompt", "Say yes and nothing else.", "--set", f"api.port={port}"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    for words in ("tokens/s", "draft source: self-int8", "Go on with"):
        assert words in printed.err


def test_a_token_is_made_as_the_guide_says(tmp_path: Path) -> None:
    """Bug guarded: variables with which no cluster starts, since nobody has made the token that they ask for."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment = {**own, "HOME": str(tmp_path), "RAY_AUTH_MODE": exported()["RAY_AUTH_MODE"]}
    ray = [str(Path(sys.executable).parent / "ray"), "get-auth-token", "--generate"]
    subprocess.run(ray, env=environment, capture_output=True, timeout=120, check=True)
    assert (tmp_path / ".ray" / "auth_token").read_text().strip()


def test_the_curl_commands_answer(served: tuple[str, subprocess.Popen[str]]) -> None:
    """Bug guarded: the line that is copied to see whether the service is up is refused."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    guide = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ *(curl .*)$", guide, re.MULTILINE)
    told = line.replace("http://127.0.0.1:8000", served[0])
    result = subprocess.run(["bash", "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["data"][0]["id"] == "smollm2"


def test_a_request_is_traced_from_http_to_its_rounds(served: tuple[str, subprocess.Popen[str]], spans: Path) -> None:
    """Bug guarded: Serve's hook is set as the guide says, and a request's rounds are in no trace, or in one of their own."""
    headers = {"x-request-id": "traced-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "smollm2", "prompt": "One two three", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{served[0]}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text

    def told() -> dict[str, dict[str, Any]]:
        """The spans of this trace by their ids."""
        lines = [line for file in spans.glob("*.spans") for line in file.read_text().splitlines() if TRACE in line]
        return {span["context"]["span_id"]: span for span in map(json.loads, lines)}

    def names(found: dict[str, dict[str, Any]]) -> set[str]:
        return {span["name"].partition(" ")[0] for span in found.values()}

    found = wait_until(told, lambda seen: {"outrider.request", "replica_handle_request"} <= names(seen), 30, "both spans")
    (request,) = [span for span in found.values() if span["name"] == "outrider.request"]
    above = request
    while above["parent_id"] in found:  # FastAPI may have spans between Serve's and ours
        above = found[above["parent_id"]]
    assert above is not request
    assert above["parent_id"] == f"0x{PARENT}"
    assert request["attributes"]["outrider.request_id"] == "traced-1"
    assert request["attributes"]["outrider.output_tokens"] == 8
    assert [event["name"] for event in request["events"]] == ["round"] * request["attributes"]["outrider.rounds"]


def test_ctrl_c_ends_it(served: tuple[str, subprocess.Popen[str]]) -> None:
    """Bug guarded: a server that goes on, or a traceback, after the key that the README names."""
    url, process = served
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/livez", timeout=5)

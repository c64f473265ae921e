"""`outrider top`, `outrider doctor` and the logs, on a real application."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_until

from deployments.cli import main

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Zanzibar one two three one two three"


@pytest.fixture(scope="module")
def app(pair: Any) -> Any:
    return pair


def log_lines(name: str) -> list[dict[str, Any]]:
    """The JSON lines of every Serve log, or of every worker's standard error, of this cluster that speak of a request."""
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    found = []
    for file in (*folder.glob("serve/*.log"), *folder.glob("worker-*.err")):
        for line in file.read_text(errors="replace").splitlines():
            if name in line and line.startswith("{"):
                found.append(json.loads(line))
    return found


def test_the_id_of_an_answer_is_in_the_logs_of_every_process(app: Any) -> None:
    """Bug guarded: an answer with two ids, or with one that none of the processes knows; text of users in the logs."""
    reply = app.client.post("/v1/completions", json=app.body(PROMPT), headers={"x-request-id": "find-me.1"})
    assert reply.headers.get_list("x-request-id") == ["find-me.1"]
    choice = reply.json()["choices"][0]["text"]

    def events() -> dict[str, Any]:
        return {line.get("event") or line["filename"]: line for line in log_lines("find-me.1")}

    seen = wait_until(events, lambda found: {"request started", "request ended"} <= found.keys(), 20, "the lane's lines")
    started, ended = seen["request started"], seen["request ended"]
    assert started["request_id"] == ended["request_id"] == "find-me.1"
    usage = reply.json()["usage"]
    assert (ended["reason"], ended["tokens"]) == ("length", usage["completion_tokens"])
    assert ended["accepted"] == usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert ended["rounds"] >= 1
    processes = {line["process"] for line in log_lines("find-me.1")}
    details = app.controller()
    drafts = {draft["process_id"] for draft in details["draft_details"]}
    lane = details["lane_details"][0]
    expected = {details["api_process"]["process_id"], lane["processes"]["router"]["process_id"], lane["target_pid"], *drafts}
    assert expected <= processes
    assert "Zanzibar" not in json.dumps(log_lines("find-me.1"))
    assert choice.strip()[:20] not in json.dumps(log_lines("find-me.1"))


def test_an_answer_without_a_given_id_has_one(app: Any) -> None:
    """Bug guarded: Serve's id in the header and another of ours in the log."""
    reply = app.client.post("/v1/completions", json=app.body(PROMPT))
    (name,) = reply.headers.get_list("x-request-id")
    wait_until(lambda: [line.get("event") for line in log_lines(name)], lambda found: "request ended" in found, 20, name)


def test_the_readmes_python_on_the_cluster_answers(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: the README's second example names an application, a method or a parameter that there is not."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "get_app_handle" in block]
    exec(compile(example, "README.md", "exec"), {})
    whole, _, streamed = capsys.readouterr().out.partition("\n")
    assert whole.strip()
    assert streamed.strip()


def test_top_prints_a_frame(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a view of made-up facts that a real server does not tell."""
    app.complete(PROMPT)
    assert main(["top", "--once", "--url", app.url]) == 0
    shown = capsys.readouterr().out
    for words in ("ready", "depth 8: fixed by speculation.depth", "self-int8", "cpu", "tokens per draft"):
        assert words in shown


def test_doctor_examines_the_server(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: rules that find nothing to look at in what a real server tells."""
    app.complete(PROMPT)
    code = main(["doctor", "--json", "--url", app.url])
    report = json.loads(capsys.readouterr().out)
    assert code == int(report["verdict"] == "problem")
    seen = {finding["check"]: finding["seen"] for finding in report["findings"]}
    expected = {"ready", "versions", "devices", "row invariance", "vocabularies", "hops", "step times", "depth", "threads"}
    assert expected | {"expected gain", "memory", "ingress"} <= seen.keys()
    assert "c = " in seen["step times"]


def test_doctor_examines_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bug guarded: a configuration that would not start, found out minutes later by an actor."""
    file = tmp_path / "outrider.yaml"
    file.write_text("speculation: {depth: 3}\n")
    assert main(["doctor", "--json", "--config", str(file)]) in (0, 1)
    checks = {finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert {"configuration", "versions", "devices", "memory", "threads", "kernels", "ingress"} <= checks
    assert main(["doctor", "--json", "--set", "target.model=/nowhere/model"]) == 1
    bad = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "problem"]
    assert [finding["check"] for finding in bad] == ["configuration"]
    assert "/nowhere/model" in bad[0]["seen"]

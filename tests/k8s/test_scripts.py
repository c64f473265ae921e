"""The scripts of the manifests, run as the pods and the operator run them, with stand-ins for what downloads."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import K8S, ROOT, of_kind, render

from deployments.keys import KeyFile
from deployments.wire import read_secret
from engine.config import StreamsConfig

BASE = K8S / "base"


@pytest.fixture
def fetch(tmp_path: Path):
    """Runs a script with an `outrider` and `hf` that write down how they are called and fail when told to, and no patience."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("outrider", "hf", "sleep"):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\ncase "sleep $FAILS" in *{name}*) exit 1;; esac\nset -f\necho {name} "$@" >>"$CALLS"\n')
        tool.chmod(0o755)
    models = tmp_path / "models.txt"

    def run(script: str, text: str, fails: str = "") -> subprocess.CompletedProcess[str]:
        models.write_text(text)
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "OUTRIDER_CACHE": str(tmp_path / "cache"),
            "CALLS": str(tmp_path / "calls"),
            "FAILS": fails,
        }
        command = ["bash", str(BASE / script), str(models)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=20, check=False)

    return run


def calls(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def assert_waits(result: subprocess.CompletedProcess[str]) -> None:
    """It looked once, said so, and came to the stand-in of `sleep`, which fails."""
    assert result.returncode == 1
    assert result.stdout.count("waiting for the job outrider-fetch") == 1


def test_every_model_is_fetched_by_its_tool_and_then_found(fetch, tmp_path: Path) -> None:
    """Bug guarded: a last line without a line end that is skipped; an alias that is looked for at a hub."""
    assert fetch("fetch.sh", "# models\nsmollm2\n\nQwen/Qwen3-0.6B").returncode == 0
    assert [call[:3] for call in calls(tmp_path)] == [["outrider", "fetch", "smollm2"], ["hf", "download", "Qwen/Qwen3-0.6B"]]
    assert fetch("wait.sh", "# models\nsmollm2\n\nQwen/Qwen3-0.6B").returncode == 0


def test_the_job_gets_what_the_engine_reads(fetch, tmp_path: Path) -> None:
    """Bug guarded: a pattern that the engine asks for and the job left out: offline it is then missing."""
    fetch("fetch.sh", "Qwen/Qwen3-0.6B")
    (call,) = calls(tmp_path)
    options = list(zip(call[3::2], call[4::2], strict=True))
    source = ast.parse((ROOT / "engine" / "models.py").read_text(encoding="utf-8"))
    (text_files,) = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TEXT_FILES"
    ]
    assert {value for name, value in options if name == "--include"} == {*text_files, "*.safetensors"}
    (download,) = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "_download"]
    ignored = {value for name, value in options if name == "--exclude"}
    assert ignored == {"*/*", "consolidated*"}
    assert all(repr(pattern)[1:-1] in ast.unparse(download) for pattern in ignored)


def test_a_download_that_fails_leaves_no_mark(fetch) -> None:
    """Bug guarded: pods that start on truncated weights after a cut download."""
    assert fetch("fetch.sh", "smollm2\nQwen/Qwen3-0.6B", fails="hf").returncode != 0
    assert_waits(fetch("wait.sh", "smollm2\nQwen/Qwen3-0.6B"))


def test_another_list_waits_for_its_own_models(fetch) -> None:
    """Bug guarded: a mark for all lists, so that an upgrade to another model starts before its weights are there."""
    assert fetch("fetch.sh", "smollm2").returncode == 0
    assert fetch("wait.sh", "smollm2").returncode == 0
    assert_waits(fetch("wait.sh", "smollm2\nother/model"))


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A copy of k8s/secrets without what somebody made there."""
    copy = tmp_path / "secrets"
    copy.mkdir()
    for name in ("kustomization.yaml", "new-key.sh"):
        shutil.copy(K8S / "secrets" / name, copy)
    return copy


def new_key(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([folder / "new-key.sh", *arguments], capture_output=True, text=True, timeout=20, check=False)


def test_a_new_key_is_let_in_and_not_kept(secrets: Path) -> None:
    """Bug guarded: a file that the Api refuses or that holds the key itself; a second call that drops the first one's key."""
    keys = [new_key(secrets, name).stdout.strip() for name in ("alice", "bob")]
    text = (secrets / "keys").read_text()
    file = KeyFile(secrets / "keys")
    for key in (*keys, (secrets / "metrics-key").read_text()):
        assert file.accepts(key)
        assert key not in text
    assert len(set(keys)) == 2
    assert text.count("sha256:") == 3
    assert read_secret(StreamsConfig(secret_file=secrets / "stream-secret"), "") == (secrets / "stream-secret").read_text()
    made = ("keys", "metrics-key", "stream-secret", "redis-password")
    assert {oct((secrets / name).stat().st_mode & 0o777) for name in made} == {"0o600"}


def test_a_key_needs_a_name(secrets: Path) -> None:
    """Bug guarded: keys that nobody knows the owner of, and so nobody dares to take out."""
    result = new_key(secrets)
    assert result.returncode != 0
    assert "name whom the key is for" in result.stderr
    assert not (secrets / "keys").exists()


def test_secrets_have_the_names_that_pods_mount(secrets: Path) -> None:
    """Bug guarded: secrets under other names or with hashes in them: they are optional in the pods."""
    new_key(secrets, "alice")
    found = {item["metadata"]["name"]: set(item["data"]) for item in of_kind(render(secrets), "Secret")}
    assert found == {
        "outrider-keys": {"keys"},
        "outrider-metrics-key": {"key"},
        "outrider-streams": {"secret"},
        "outrider-redis": {"password"},
    }


def test_what_is_secret_is_ignored_by_git() -> None:
    """Bug guarded: a key that is committed with the next `git add`."""
    ignored = set((K8S / "secrets" / ".gitignore").read_text().split())
    generated = yaml.safe_load((K8S / "secrets" / "kustomization.yaml").read_text())["secretGenerator"]
    assert {file.rpartition("=")[2] for item in generated for file in item["files"]} == ignored

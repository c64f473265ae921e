"""What KubeRay does with a RayService, on a local cluster: the demo's Serve file, and secrets from files."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from conftest import App, Texts
from helpers import drafted, wait_until, write_random_draft

K8S = Path(__file__).resolve().parents[2] / "k8s"
GOOD, OTHER = "sk-" + "a" * 40, "sk-" + "b" * 40


def state(name: str, since_s: float, url: str) -> str:
    """Of the application deployed after ``since_s``, not of one before it; `ready` when it runs and its `/health` says so."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None or application.last_deployed_time_s < since_s:
        return "not deployed"
    if application.status != "RUNNING":
        return f"{application.status} {application.message}"
    with contextlib.suppress(httpx.TransportError):
        if httpx.get(f"{url}/health", timeout=10).status_code == 200:
            return "ready"
    return "not ready"


def test_the_demo_of_the_manifests_answers(serve_cluster: None, port: int) -> None:
    """Bug guarded: a Serve file that every schema accepts and that does not start, or starts and does not answer."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    serve_file = yaml.safe_load((K8S / "overlays" / "cpu-demo" / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = serve_file["applications"]
    url, started_s = f"http://127.0.0.1:{port}", time.time()
    # Behind `serve deploy` and what KubeRay sends. Its `http_options` are for a Serve that does not run yet.
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(serve_file))
    wait_until(lambda: state(application["name"], started_s, url), lambda now: now == "ready", 120, "the application is ready")
    body = {"model": application["args"]["target"]["model"], "prompt": "One two three", "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_keys_and_the_streams_secret_come_from_files(deploy_app: Callable[..., App], texts: Texts, tmp_path: Path) -> None:
    """Bug guarded: a secret that one of the processes does not read (no lane, target or draft is reached); keys read once.

    The draft is a sibling that knows nothing, and may not change a text either.
    """
    keys = tmp_path / "keys"
    keys.write_text(GOOD)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    app = deploy_app(
        draft={"source": "model", "model": str(write_random_draft(tmp_path / "random", "smollm2"))},
        streams={"secret_file": str(secret)},
        api={"keys_file": str(keys)},
        speculation={"depth": 2},
    )

    def answer(key: str, prompt: str = "One two three", **params: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return app.client.post("/v1/completions", json=app.body(prompt, **params), headers=headers)

    wait_until(lambda: drafted(answer(GOOD).json()), lambda num: num > 0, 60, "the draft is reached")
    for prompt in texts.PROMPTS[:2]:
        result = answer(GOOD, prompt, **texts.SAMPLED).json()
        assert drafted(result) > 0
        texts.check(prompt, result["choices"][0]["text"], is_sampled=True, by="random draft")
    refused = answer(OTHER)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    (tmp_path / "new").write_text(OTHER)
    os.replace(tmp_path / "new", keys)
    wait_until(lambda: answer(OTHER).status_code, lambda code: code == 200, 30, "the new key is let in")
    assert answer(GOOD).status_code == 401

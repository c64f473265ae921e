"""One Ray cluster for all tests of this tier; applications are deployed on it one after the other."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from engine.config import OutriderConfig, parse_config

# Nothing outside this machine can reach the test cluster, and other clusters on it must not need its token.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def make_config(port: int) -> Callable[..., OutriderConfig]:
    """The default configuration with sections changed: ``make_config(speculation={"depth": 8})``."""

    def make(**sections: dict[str, Any]) -> OutriderConfig:
        # On a busy machine a draft may miss its deadline; tests of what drafts do must not depend on that.
        sections["draft"] = {"timeout_s": 20.0, **sections.get("draft", {})}
        sections["api"] = {"port": port, **sections.get("api", {})}
        return parse_config(sections)

    return make


@pytest.fixture(scope="session")
def serve_cluster(make_config: Callable[..., OutriderConfig]) -> Iterator[None]:
    from deployments.launch import cluster

    # Two GPUs that nobody computes on: whoever asks for none has none, and what is placed on GPUs is tested on any machine.
    with cluster(make_config(), None, num_gpus=2):
        yield


class App:
    """A deployed application and how to reach it."""

    def __init__(self, config: OutriderConfig):
        self.config = config
        self.url = f"http://{config.api.host}:{config.api.port}"
        self.model = config.served_model_name
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def body(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 20, **params}

    def complete(self, prompt: str | list[int], **params: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json=self.body(prompt, **params))
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    def text(self, prompt: str | list[int], **params: Any) -> str:
        text: str = self.complete(prompt, **params)["choices"][0]["text"]
        return text

    def controller(self) -> dict[str, Any]:
        result: dict[str, Any] = self.client.get("/controller").json()
        return result


@pytest.fixture(scope="module")
def deploy_app(serve_cluster: None, make_config: Callable[..., OutriderConfig]) -> Callable[..., App]:
    """Deploy (or replace) the application and wait until it answers."""
    from deployments.launch import deploy

    def start(**sections: dict[str, Any]) -> App:
        config = make_config(**sections)
        deploy(config)
        return App(config)

    return start

"""One Ray cluster for all tests of this tier; applications are deployed on it one after the other."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from helpers import wait_until, write_emulation

from engine.config import OutriderConfig, parse_config

# Nothing outside this machine can reach the test cluster, and other clusters on it must not need its token.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
PAIR_MODULES = ("test_lossless", "test_distribution", "test_observe", "test_faults")
"""In their order: the last one kills processes."""


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


@pytest.fixture(scope="session")
def deploy_app(serve_cluster: None, make_config: Callable[..., OutriderConfig]) -> Callable[..., App]:
    """Deploy (or replace) the application and wait until it answers."""
    from deployments.launch import deploy

    def start(**sections: dict[str, Any]) -> App:
        config = make_config(**sections)
        deploy(config)
        return App(config)

    return start


@pytest.fixture(scope="session")
def pair(deploy_app: Callable[..., App]) -> App:
    """The default pair with the depth fixed, so that each request's own bound is the depth it gets."""
    app = deploy_app(speculation={"depth": 8, "max_depth": 8}, logging={"format": "json", "level": "DEBUG"})
    wait_for_draft(app)
    return app


@pytest.fixture(scope="session")
def emulated(deploy_app: Callable[..., App], tmp_path_factory: pytest.TempPathFactory) -> tuple[App, Path]:
    """An emulated pair, all of whose draft tokens are accepted at first, and the file that says so.

    The depth is fixed, so that "adaptive", which is the server as it is configured, speculates from the first request on.
    """
    from deployments.bench.rounds import MAX_DEPTH
    from engine.testing.profiles import FILE_PREFIX

    file = tmp_path_factory.mktemp("emulation") / "emulation"
    write_emulation(file, "alpha=1")
    name = f"{FILE_PREFIX}{file}"
    app = deploy_app(
        target={"model": name, "name": "emulated"},
        draft={"source": "model", "model": name},
        speculation={"depth": 4, "max_depth": MAX_DEPTH},
        controller={"report_interval_s": 0.1},
    )
    return app, file


class Texts:
    """What the target says to a prompt, whichever application says it first: all others have to say the same."""

    PROMPTS = (
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "one two three one two three one two three one two",
        "Q: Name three fruits.\nA:",
    )
    SAMPLED: ClassVar[dict[str, Any]] = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}

    def __init__(self) -> None:
        self._said: dict[tuple[str, bool], str] = {}

    def check(self, prompt: str, text: str, *, is_sampled: bool, by: str) -> None:
        """``text``: 20 tokens, greedy or with `SAMPLED`; ``by``: what may not matter."""
        assert self._said.setdefault((prompt, is_sampled), text) == text, f"{by}, prompt {prompt!r}"


@pytest.fixture(scope="session")
def texts() -> Texts:
    return Texts()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """To start an application takes longer than most of its tests: those that share `pair` come last, one after the other."""
    items.sort(key=lambda item: PAIR_MODULES.index(item.path.stem) if item.path.stem in PAIR_MODULES else -1)


def wait_for_draft(app: App) -> None:
    wait_until(
        app.controller,
        lambda state: bool(state["lane_details"]) and all(lane["draft_state"] == "ok" for lane in state["lane_details"]),
        120,
        "the lane found its draft",
    )

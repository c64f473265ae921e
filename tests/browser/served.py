"""Outrider with its default pair on a cluster of its own, and somebody else's traffic."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from engine.config import parse_config

# Nothing outside this machine can reach the test cluster, and other clusters on it must not need its token.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@contextlib.contextmanager
def served(**sections: dict[str, Any]) -> Iterator[str]:
    """The address of a running server, configured by ``sections``."""
    from deployments.launch import cluster, deploy

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # On a busy machine a draft may miss its deadline; what the page shows of drafts must not depend on that.
    config = parse_config({"draft": {"timeout_s": 20.0}, **sections, "api": {"port": port, **sections.get("api", {})}})
    with cluster(config, None):
        deploy(config)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def others(url: str, prompt: str, *, num_clients: int, **params: Any) -> Iterator[None]:
    """``num_clients`` that ask for one answer after the other."""
    stopped = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not stopped.is_set():
                body = {"model": "smollm2", "prompt": prompt, "max_tokens": 40, "temperature": 0, **params}
                client.post("/v1/completions", json=body).raise_for_status()

    clients = [threading.Thread(target=ask) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stopped.set()
        for client in clients:
            client.join()

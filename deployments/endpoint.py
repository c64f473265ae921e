"""Reading a running server's own routes, with its API key where it asks for one: `outrider top`, `doctor`, `bench load`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, OutriderError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Routes:
    """What the server said, all at about the same moment."""

    url: str
    health: dict[str, Any]
    controller: dict[str, Any]
    metrics: str
    """Prometheus text."""


def read_routes(url: str, headers: dict[str, str]) -> Routes:
    """Ask ``/health``, ``/controller`` and ``/metrics``.

    Raises `ConfigError` for what is no URL, `OutriderError` for a server that cannot be reached, wants a key or is another one.
    """
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: expected an address such as {DEFAULT_URL}")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S) as client:
            health, controller, metrics = (client.get(path) for path in ("/health", "/controller", "/metrics"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OutriderError(f"--url {url}: cannot be reached ({str(error) or type(error).__name__})") from None
    for answer in (controller, metrics):
        if answer.status_code in (401, 403):
            raise OutriderError(f"--url {url}: answered {answer.status_code}; give a key by --api-key-env or --api-key-file")
    try:
        told, seen = health.json(), controller.json()
        if controller.status_code != 200 or "lane_details" not in seen or "ready" not in told:
            raise ValueError
    except (ValueError, TypeError):
        raise OutriderError(f"--url {url}: no Outrider server answers there ({controller.status_code})") from None
    return Routes(base, told, seen, metrics.text if metrics.status_code == 200 else "")


def read_headers(api_key_env: str | None, api_key_file: Path | None) -> dict[str, str]:
    """The key that requests carry, from where the options say it is; raises `ConfigError`. It is never an argument itself."""
    if api_key_env is not None and api_key_file is not None:
        raise ConfigError("--api-key-env and --api-key-file both name a key: give one of them")
    if api_key_env is not None:
        key = os.environ.get(api_key_env, "").strip()
        source = f"--api-key-env {api_key_env}: this variable"
    elif api_key_file is not None:
        key, source = _first_line(api_key_file), f"--api-key-file {api_key_file}: this file"
    else:
        return {}
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{source} holds no key")
    return {"Authorization": f"Bearer {key}"}


def _first_line(path: Path) -> str:
    """Empty lines and lines that begin with # do not count, as in the server's own ``api.keys_file``."""
    try:
        lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}") from None
    return next((line.strip() for line in lines if line.strip() and not line.strip().startswith("#")), "")

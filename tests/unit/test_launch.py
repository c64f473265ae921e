"""What a cluster of our own is started with."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.launch import _cluster_environment, cluster
from engine.config import parse_config

SHARED_BY_DEFAULT = {
    "RAY_SERVE_HAPROXY_STATS_PORT": "8404",
    "RAY_SERVE_HAPROXY_METRICS_PORT": "9101",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": "8500",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": "9500",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One of its own, without anything of Ray."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", own)
    return own


def started_with(folder: Path) -> dict[str, str]:
    """The environment while Ray starts."""
    with _cluster_environment(str(folder)):
        return dict(os.environ)


def test_two_clusters_of_one_machine_share_no_port_and_no_file(tmp_path: Path) -> None:
    """Bug guarded: requests answered by another cluster. Serve's proxies, to which HAProxy turns while no Api answers, listen
    on port 8500 in every cluster of a machine, and share it.
    """
    first, second = (started_with(tmp_path / name) for name in ("a", "b"))
    for name, default in SHARED_BY_DEFAULT.items():
        assert first[name] != default
    assert len({first[name] for name in SHARED_BY_DEFAULT}) == len(SHARED_BY_DEFAULT)
    files = {name for name, value in first.items() if str(tmp_path) in value}
    assert len(files) >= 3
    assert not [name for name in files if first[name] == second[name]]
    assert not {*SHARED_BY_DEFAULT, *files} & os.environ.keys()


def test_what_the_user_has_set_stays(tmp_path: Path, environment: dict[str, str]) -> None:
    """Bug guarded: a port that somebody opened in a firewall, replaced by another or taken out of the environment."""
    environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = "8501"
    assert started_with(tmp_path)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] == "8501"
    assert environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] == "8501"


@pytest.mark.parametrize(("address", "asked"), [(None, "local"), ("auto", "auto"), ("head:6379", "head:6379")])
def test_a_cluster_of_our_own_is_no_other(address: str | None, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: `outrider serve` joins the cluster that somebody started on this machine by `ray start`, or RAY_ADDRESS, as
    Ray does where no address is given, and takes it down at its end.
    """
    given: dict[str, Any] = {}
    serve = SimpleNamespace(start=lambda **_: None, delete=lambda _: None)
    ray = SimpleNamespace(init=lambda **options: given.update(options), shutdown=lambda: None, serve=serve)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    monkeypatch.setattr("deployments.launch._end_on_sigterm", lambda: None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with cluster(parse_config({"api": {"port": port}}), address):
        assert given["address"] == asked

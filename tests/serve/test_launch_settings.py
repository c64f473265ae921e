"""What a cluster of our own is started with."""

from pathlib import Path
from typing import Any

import pytest
from conftest import free_port

from deployments import launch
from engine.config import parse_config


def test_the_settings_are_those_that_serve_reads(tmp_path: Path) -> None:
    """Bug guarded: a new version of Ray with other names, so that nothing is set and clusters share ports again."""
    from ray.serve._private import constants

    source = Path(constants.__file__).read_text(encoding="utf-8")
    for name in (*launch.PORTS_OF_A_CLUSTER, *launch.files_of_a_cluster(str(tmp_path))):
        assert f'"{name}"' in source, name


class Started(Exception):
    """Ray would start now."""


def test_a_cluster_of_our_own_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: `outrider serve` without an address joined a cluster that `ray start` had left on the machine, or that
    ``RAY_ADDRESS`` names, took it for its own, and left its application there at the end."""
    given: dict[str, Any] = {}

    def init(**options: Any) -> None:
        given.update(options)
        raise Started

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(Started), launch.cluster(parse_config({"api": {"port": free_port()}}), None):
        pass
    assert given["address"] == "local"

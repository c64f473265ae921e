"""What a cluster of one's own takes from the machine."""

import os
from pathlib import Path

import pytest

from deployments import launch


def settings_of_a_cluster(folder: Path) -> dict[str, str]:
    """What is in the environment while Ray starts, and not before."""
    before = dict(os.environ)
    with launch._cluster_environment(str(folder)):
        return {name: value for name, value in os.environ.items() if before.get(name) != value}


def test_two_clusters_share_nothing_of_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: requests to one cluster answered by another one on the machine, whose fallback proxy had the same port; a
    second cluster of this process, or of a child, that got the first one's HAProxy, and did not start."""
    for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
        monkeypatch.delenv(name)
    first, second = settings_of_a_cluster(tmp_path / "first"), settings_of_a_cluster(tmp_path / "second")
    own = {name for name in first if name != "RAY_SERVE_ENABLE_HA_PROXY" and name.startswith("RAY_SERVE_")}
    assert len(own) == 9
    assert all(first[name] != second[name] for name in own)
    assert not own & os.environ.keys()


def test_the_settings_are_those_that_serve_reads(tmp_path: Path) -> None:
    """Bug guarded: a new version of Ray with other names, for which nothing would be set."""
    from ray.serve._private import constants

    source = Path(constants.__file__).read_text(encoding="utf-8")
    for name in settings_of_a_cluster(tmp_path):
        if name.startswith("RAY_SERVE_"):
            assert f'"{name}"' in source, name


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a port of the user's that is replaced, or forgotten once the cluster runs."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "8404")
    assert "RAY_SERVE_HAPROXY_STATS_PORT" not in settings_of_a_cluster(tmp_path)
    assert os.environ["RAY_SERVE_HAPROXY_STATS_PORT"] == "8404"

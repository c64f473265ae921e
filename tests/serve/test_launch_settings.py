"""What a cluster of our own is started with."""

from pathlib import Path

from deployments import launch


def test_the_settings_are_those_that_serve_reads(tmp_path: Path) -> None:
    """Bug guarded: a new version of Ray with other names, so that nothing is set and clusters share ports again."""
    from ray.serve._private import constants

    source = Path(constants.__file__).read_text(encoding="utf-8")
    for name in (*launch.PORTS_OF_A_CLUSTER, *launch.files_of_a_cluster(str(tmp_path))):
        assert f'"{name}"' in source, name

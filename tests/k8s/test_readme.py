"""What the guide says against what is there."""

import re

from manifests import K8S, ROOT
from test_agreement import constant

GUIDE = (K8S / "README.md").read_text(encoding="utf-8")
MADE_BY_THE_READER = {"k8s/overlays/mine", "k8s/overlays/mine/kustomization.yaml"}


def test_every_path_of_the_guide_exists() -> None:
    """Bug guarded: a command that fails because a folder was renamed."""
    paths = set(re.findall(r"\bk8s/[\w./-]*\w", GUIDE))
    assert len(paths) > 8
    assert paths > MADE_BY_THE_READER
    assert [path for path in paths - MADE_BY_THE_READER if not (ROOT / path).exists()] == []
    for folder in ("components", "overlays"):
        named = set(re.findall(rf"(?<![\w/]){folder}/[\w./-]*\w", GUIDE))
        assert [path for path in named if not (K8S / path).exists()] == []


def test_build_arguments_of_the_guide_exist() -> None:
    """Bug guarded: a build argument that Docker ignores with a warning."""
    dockerfile = (K8S / "image" / "Dockerfile").read_text(encoding="utf-8")
    named = set(re.findall(r"--build-arg (\w+)", GUIDE))
    assert {"VARIANT", "PIP_INDEX_URL", "BASE_IMAGE", "BASE_DIGEST"} <= named
    assert named <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_times_of_the_guide_are_those_of_the_files() -> None:
    """Bug guarded: a delay that was changed in one place only."""
    (delay, longest) = re.search(
        r"kept for (\d+) s \(`rayClusterDeletionDelaySeconds`\).*?\((\d+) s\)", GUIDE, re.DOTALL
    ).groups()
    assert f"rayClusterDeletionDelaySeconds: {delay}\n" in (K8S / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    assert float(longest) == constant("deployments/app.py", "LONGEST_STREAM_S")

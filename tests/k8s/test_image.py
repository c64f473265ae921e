"""The image's recipe: what can be known of it without building it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manifests import K8S, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGE = K8S / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    lines = (IMAGE / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_hadolint_finds_nothing() -> None:
    """Bug guarded: the usual slips of a Dockerfile, such as a pipe that hides a failure."""
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install .[dev])")
    result = subprocess.run([hadolint, IMAGE / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_every_dependency_is_pinned_within_its_range() -> None:
    """Bug guarded: an image with versions that nobody tested, or a pin that pip cannot reconcile with pyproject.toml."""
    found = {canonicalize_name(name): version for name, version in pins().items()}
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == "torch":  # the variant's, in the Dockerfile
            versions = re.findall(r"^ARG TORCH=torch==([\d.]+)", DOCKERFILE, re.MULTILINE)
            assert len(versions) == 2
        else:
            versions = [found[canonicalize_name(requirement.name)]]
        assert all(requirement.specifier.contains(version) for version in versions), text


def test_python_of_the_image_is_one_that_the_project_takes() -> None:
    """Bug guarded: a base image that is moved to a Python for which pip refuses the project."""
    (version,) = re.findall(r"^ARG BASE_IMAGE=python:(\d+\.\d+\.\d+)-", DOCKERFILE, re.MULTILINE)
    assert Requirement(f"outrider{PROJECT['project']['requires-python']}").specifier.contains(version)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    """Bug guarded: a build that fails at COPY because the ignore file, or a move of files, took its source away."""
    allowed = {line[1:] for line in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [source for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    assert set(sources) == allowed
    assert all((ROOT / source).exists() for source in sources)
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(sources)


def test_the_image_is_not_root_and_has_a_health_check() -> None:
    """Bug guarded: a `USER` that comes before something that needs root again; a health check of a route that needs a key."""
    from deployments.api import OPEN_PATHS

    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    (path,) = re.findall(r"^\s+CMD \[.*http://127\.0\.0\.1:8000(/\w+)", last, re.MULTILINE)
    assert path in OPEN_PATHS
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in last


def test_no_registry_is_named() -> None:
    """Bug guarded: a build that works in one company's network only; indexes and registries are arguments."""
    hosts = re.findall(r"https?://([\w.-]+)", DOCKERFILE)
    assert set(hosts) == {"127.0.0.1"}
    assert "/" not in re.findall(r"^ARG BASE_IMAGE=(.*)$", DOCKERFILE, re.MULTILINE)[0]

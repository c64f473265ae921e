"""The image's recipe: what can be known of it without building it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from image_steps import copy, run, steps
from manifests import K8S, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

IMAGE = K8S / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
SKIPPED = {".pyc", ".so"}
"""What running the code leaves beside it."""
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


def test_the_steps_install_everything_that_the_code_reads(tmp_path: Path) -> None:
    """Bug guarded: a page, a style or a kernel's source that is no Python, and so is not in the image; a step that fails.

    The last stage in which packages are installed, without those of others: `python tests/k8s/image_steps.py FOLDER` does it
    with them, in a fresh environment.
    """
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip("setuptools is older than the recipe asks for")
    (tmp_path / "build").mkdir()
    (listing, package) = [step for step in steps("packages") if step.name == "RUN"]
    for step in steps("packages"):
        if step.name == "COPY":
            copy(step, tmp_path / "build")
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_TARGET": str(tmp_path / "installed")}
    run(replace(listing, text=listing.text.partition("&&")[0]), tmp_path, environment)
    assert (tmp_path / "build" / "requirements.txt").read_text().split("\n")[:-1] == PROJECT["project"]["dependencies"]
    run(replace(package, text=package.text.partition("&&")[0]), tmp_path, environment)
    for folder in ("engine", "autoscale", "deployments"):
        needed = {
            path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in SKIPPED
        }
        assert {path for path in needed if not (tmp_path / "installed" / path).is_file()} == set(), folder


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

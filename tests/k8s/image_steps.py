"""The steps of the image's recipe without Docker: `python tests/k8s/image_steps.py FOLDER` runs them in a fresh environment.

Minutes, and a package index as pip finds it by itself. ``TORCH`` in the environment is the build argument of this name.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "k8s" / "image" / "Dockerfile"
ENVIRONMENT, BUILD = "/opt/outrider", "/build"
STAGES = ("build", "torch-cpu", "packages")
"""Those in which packages are installed, in their order; the stage after them copies the result and adds a user."""


@dataclass(frozen=True)
class Step:
    """One instruction of the recipe."""

    name: str
    text: str


def steps(stage: str) -> list[Step]:
    """The instructions of a stage, without comments and with continued lines joined."""
    lines = [line for line in RECIPE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[Step]] = {}
    current: list[Step] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, text = line.partition(" ")
        if name == "FROM":
            current = found.setdefault(text.partition(" AS ")[2], [])
        elif name:
            current.append(Step(name, re.sub(r"\s+", " ", text)))
    return found[stage]


def copy(step: Step, build: Path) -> None:
    """A ``COPY`` from the repository into the build folder."""
    *sources, target = step.text.split()
    for source in sources:
        into = build / Path(target).relative_to(BUILD) if target.startswith(BUILD) else build / target
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, into)


def run(step: Step, folder: Path, environment: Mapping[str, str]) -> None:
    """A ``RUN``, with the image's paths below ``folder``; raises `subprocess.CalledProcessError` where it fails."""
    command = step.text.replace(f"{ENVIRONMENT}/", f"{folder}/venv/").replace(f"{ENVIRONMENT} ", f"{folder}/venv ")
    command = re.sub(rf"{ENVIRONMENT}$", f"{folder}/venv", command).replace(f"{BUILD}/", f"{folder}/build/")
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder / "build", env={**environment}, check=True)


def main(folder: Path) -> None:
    """Run the stages, then the command that the image starts with, as far as its help."""
    build = folder / "build"
    build.mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{folder}/venv/bin:{os.environ['PATH']}"}
    for stage in STAGES:
        for step in steps(stage):
            print(f"{stage}: {step.name} {step.text}", flush=True)
            if step.name == "ARG" and "=" in step.text:
                name, _, default = step.text.partition("=")
                environment.setdefault(name, default)
            elif step.name == "COPY":
                copy(step, build)
            elif step.name == "RUN":
                run(step, folder, environment)
    subprocess.run([folder / "venv" / "bin" / "outrider", "serve", "--help"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    print("installed, and `outrider serve` starts")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

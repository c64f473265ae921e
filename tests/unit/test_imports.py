"""What may be imported from where, checked in fresh interpreters."""

import pkgutil
import subprocess
import sys

import pytest

import autoscale

LIGHT = (
    "engine.types",
    "engine.config",
    "engine.request",
    "engine.scheduler",
    "engine.round",
    "engine.drivers",
    "engine.text",
    "engine.drafting",
    "engine.propose.ngram",
    "engine.propose.suffix",
    "engine.propose.outcomes",
    "engine.propose.vocabulary",
    *(f"autoscale.{module.name}" for module in pkgutil.iter_modules(autoscale.__path__) if module.name != "serve_adapter"),
)
IMPORT_EVERYTHING = (
    "import engine, pkgutil, importlib\n"
    "for module in pkgutil.walk_packages(engine.__path__, 'engine.'):\n"
    "    importlib.import_module(module.name)\n"
)


def _loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of ``names`` a new interpreter has loaded after running ``code``."""
    script = f"{code}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_planning_imports_neither_torch_nor_ray_nor_transformers() -> None:
    """Bug guarded: one import of torch at the top of a planning module makes the controller and every unit test load it."""
    code = "\n".join(f"import {module}" for module in LIGHT)
    assert _loaded_after(code, ("torch", "ray", "transformers", "numpy")) == []


def test_engine_imports_no_ray() -> None:
    """Bug guarded: the engine must run without Ray (`outrider generate`), so none of its modules may import it."""
    assert _loaded_after(IMPORT_EVERYTHING, ("ray",)) == []


@pytest.mark.parametrize("name", ["json", "engine.types"])
def test_the_probe_sees_what_is_loaded(name: str) -> None:
    """Bug guarded: a probe that never reports anything would let the two tests above pass whatever is imported."""
    assert _loaded_after("import json\nimport engine.types", (name,)) == [name]

import shutil
from pathlib import Path

import pytest
import yaml
from manifests import K8S, OVERLAYS, Object, render

COMBINED = "gpu with ha, tls and monitoring"
_cache: dict[str, list[Object]] = {}


@pytest.fixture(params=["base", *OVERLAYS, COMBINED])
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The objects of every kustomization in turn, and of one that a user would write: an overlay with all components."""
    name = request.param
    if name not in _cache:
        if name == COMBINED:
            folder = _combined(tmp_path_factory.mktemp("combined"))
        else:
            folder = K8S / "base" if name == "base" else K8S / "overlays" / name
        _cache[name] = render(folder)
    return _cache[name]


def _combined(scratch: Path) -> Path:
    """Kustomize takes relative paths only: a copy of k8s with one more overlay."""
    copy = scratch / "k8s"
    shutil.copytree(K8S, copy)
    overlay = copy / "overlays" / "mine"
    overlay.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../gpu"],
        "components": ["../../components/ha", "../../components/tls", "../../monitoring"],
        "images": [{"name": "outrider", "newName": "images.internal/outrider", "newTag": "0.1.0-cuda"}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return overlay

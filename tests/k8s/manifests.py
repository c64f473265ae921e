"""Reading what `kubectl apply -k` would send."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "crds"
OVERLAYS = tuple(sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml")))
Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization; skips the test where nothing can render one."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("neither kubectl nor kustomize is on the PATH")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def the(objects: list[Object], kind: str, name: str = "outrider") -> Object:
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def ray_service(objects: list[Object]) -> Object:
    return the(objects, "RayService")


def groups(service: Object) -> dict[str, Object]:
    """Head and worker groups by name."""
    cluster = service["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"], **{group["groupName"]: group for group in cluster["workerGroupSpecs"]}}


def ray_container(group: Object) -> Object:
    container: Object = group["template"]["spec"]["containers"][0]
    return container


def serve_file(service: Object) -> Object:
    parsed: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    return parsed


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(where, labels, spec) of every pod template, Ray's included."""
    for item in objects:
        if item["kind"] == "RayService":
            for name, group in groups(item).items():
                yield f"RayService/{name}", group["template"]["metadata"]["labels"], group["template"]["spec"]
        elif "template" in item.get("spec", {}):
            template = item["spec"]["template"]
            yield f"{item['kind']}/{item['metadata']['name']}", template["metadata"]["labels"], template["spec"]


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def in_bytes(quantity: str | int) -> int:
    """A Kubernetes quantity of memory."""
    for unit, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)):
        if str(quantity).endswith(unit):
            return int(str(quantity).removesuffix(unit)) * factor
    return int(quantity)

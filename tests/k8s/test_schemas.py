"""Every object against the schema of its kind, with unknown fields refused, as a strict API server would."""

import copy
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from manifests import CRDS, Object, ray_container, ray_service

CORE = {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
ELSEWHERE = {"ray.io/v1", "cert-manager.io/v1", "monitoring.coreos.com/v1"}


def closed(schema: Any) -> Any:
    """A CRD's schema as a JSON schema that refuses fields it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if "properties" in result and result.get("type") == "object":
        result.setdefault("additionalProperties", False)
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


@cache
def ray_service_schema() -> Any:
    path = CRDS / "ray.io_rayservices.yaml"
    if not path.is_file():
        pytest.skip(f"KubeRay's schemas are not here ({CRDS})")
    versions = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["spec"]["versions"]
    (version,) = [item for item in versions if item["name"] == "v1"]
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def test_the_ray_service_fits_kuberays_schema(objects: list[Object]) -> None:
    """Bug guarded: a field that is misspelt or in the wrong place, which the API server drops in silence."""
    errors = [f"{error.json_path}: {error.message[:200]}" for error in ray_service_schema().iter_errors(ray_service(objects))]
    assert errors == []


def test_the_schema_refuses_a_misspelt_field(objects: list[Object]) -> None:
    """Bug guarded: a schema left open, by which every manifest is right."""
    service = copy.deepcopy(ray_service(objects))
    ray_container(service["spec"]["rayClusterConfig"]["headGroupSpec"])["readynessProbe"] = {}
    (error,) = ray_service_schema().iter_errors(service)
    assert "readynessProbe" in error.message


def test_core_objects_fit_kubernetes_schemas(objects: list[Object]) -> None:
    """Bug guarded: as above, for what Kubernetes itself defines."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (pip install .[dev])")
    core = [item for item in objects if item["apiVersion"] in CORE]
    assert {item["apiVersion"] for item in objects} <= CORE | ELSEWHERE
    assert core
    for item in core:
        validate.validate(item, validate.latest_version(), strict=True)
    broken = {**core[0], "speck": {}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)

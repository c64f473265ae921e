"""serveConfigV2 against Ray's schema and against the code that it starts."""

import importlib
import inspect
from typing import Any

import yaml
from manifests import K8S, Object, groups, of_kind, ray_container, ray_service, render, serve_file

from engine.config import OutriderConfig, parse_config

TINY = 1e-9


def application(objects: list[Object]) -> Any:
    (found,) = serve_file(ray_service(objects))["applications"]
    return found


def config_of(objects: list[Object]) -> OutriderConfig:
    return parse_config(application(objects)["args"])


def deployments(objects: list[Object]) -> dict[str, Any]:
    return {item["name"]: item for item in application(objects).get("deployments", [])}


def test_ray_accepts_the_file(objects: list[Object]) -> None:
    """Bug guarded: a Serve file that the operator sends and Ray answers with 400, so that nothing is ever started."""
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(serve_file(ray_service(objects)))


def test_each_overlay_has_a_file_of_its_own() -> None:
    """Bug guarded: a replacement that leaves the base's file where an overlay has another one."""
    for path in K8S.glob("overlays/*/serve.yaml"):
        rendered = serve_file(ray_service(render(path.parent)))
        assert rendered == yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_the_import_path_is_a_builder_of_this_configuration(objects: list[Object]) -> None:
    """Bug guarded: an import path or argument that is not there; Ray finds out after the image was pulled."""
    module, _, name = application(objects)["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), name)
    (parameter,) = inspect.signature(builder).parameters.values()
    assert parameter.annotation is OutriderConfig
    assert config_of(objects).target.model


def test_overridden_deployments_exist_and_fit_their_arguments() -> None:
    """Bug guarded: sizes in `deployments` that differ from those in `args`, so that a target gets no GPU, or waits for ever."""
    from deployments.app import SMALL_ACTOR_CPUS, _router_options

    objects = render(K8S / "overlays" / "gpu")
    config, overrides = config_of(objects), deployments(objects)
    assert set(overrides) == {"Api", "Controller", "Router", "Draft"}
    router = _router_options(config)
    assert overrides["Router"]["placement_group_bundles"] == router["placement_group_bundles"]
    assert overrides["Router"]["placement_group_strategy"] == router["placement_group_strategy"]
    assert len(overrides["Router"]["placement_group_bundle_label_selector"]) == len(router["placement_group_bundles"])
    draft = overrides["Draft"]["ray_actor_options"]
    assert (draft["num_cpus"], draft["num_gpus"]) == (config.drafts.num_cpus, config.drafts.num_gpus)
    for name in ("Api", "Controller"):
        assert overrides[name]["ray_actor_options"]["num_cpus"] == SMALL_ACTOR_CPUS


def wanted(objects: list[Object]) -> list[tuple[dict[str, str], float, float]]:
    """(labels, CPUs, GPUs) of every place that the application asks for, for the fewest lanes."""
    from deployments.app import SMALL_ACTOR_CPUS

    config, overrides = config_of(objects), deployments(objects)

    def selector(name: str) -> dict[str, str]:
        labels: dict[str, str] = overrides.get(name, {}).get("ray_actor_options", {}).get("label_selector", {})
        return labels

    (labels, *_) = overrides.get("Router", {}).get("placement_group_bundle_label_selector", [{}])
    target = (labels, config.target.num_cpus + SMALL_ACTOR_CPUS, config.target.num_gpus)
    draft = (selector("Draft"), config.drafts.num_cpus, config.drafts.num_gpus)
    small = [(selector("Controller"), SMALL_ACTOR_CPUS, 0.0)]
    small += [(selector("Api"), SMALL_ACTOR_CPUS, 0.0)] * config.api.replicas
    return [*[target] * config.lanes.min, *[draft] * config.drafts.max, *small]


def places(objects: list[Object]) -> list[list[Any]]:
    """[labels, free CPUs, free GPUs] of every node that the cluster may have."""
    found = []
    cluster = ray_service(objects)["spec"]["rayClusterConfig"]
    for name, group in groups(ray_service(objects)).items():
        limits = ray_container(group)["resources"]["limits"]
        cpus = float(group["rayStartParams"].get("num-cpus", limits["cpu"]))
        gpus = float(limits.get("nvidia.com/gpu", 0))
        num = 1 if name == "head" else group["maxReplicas" if cluster.get("enableInTreeAutoscaling") else "replicas"]
        found += [[group.get("labels", {}), cpus, gpus] for _ in range(num)]
    return found


def test_everything_finds_a_place(objects: list[Object]) -> None:
    """Bug guarded: an application that waits for CPUs, GPUs or labels that no group of the cluster has."""
    nodes = places(objects)
    for labels, cpus, gpus in wanted(objects):
        for node in nodes:
            if labels.items() <= node[0].items() and node[1] + TINY >= cpus and node[2] + TINY >= gpus:
                node[1:] = [node[1] - cpus, node[2] - gpus]
                break
        else:
            raise AssertionError(f"no node of {places(objects)} has room for {labels}, {cpus} CPUs and {gpus} GPUs")


def test_models_are_on_the_list_of_the_job(objects: list[Object]) -> None:
    """Bug guarded: a model that the fetch job does not get; the pods are offline and fail after their start."""
    config = config_of(objects)
    (models,) = [item for item in of_kind(objects, "ConfigMap") if "models.txt" in item["data"]]
    listed = models["data"]["models.txt"].split()
    assert {config.target.model, config.draft.model} - {None} <= set(listed)


def test_models_with_a_gpu_group_ask_for_a_gpu(objects: list[Object]) -> None:
    """Bug guarded: a GPU node on which everything runs on the CPU, because the configuration does not reserve the GPU."""
    config = config_of(objects)
    has_gpus = any(
        "nvidia.com/gpu" in ray_container(group)["resources"]["limits"] for group in groups(ray_service(objects)).values()
    )
    assert (config.target.num_gpus > 0) == (config.drafts.num_gpus > 0) == has_gpus

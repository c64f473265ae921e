"""What KubeRay 1.7 refuses although the schema allows it; the operator only logs it, the API server takes the object."""

import re
from collections.abc import Iterator

from manifests import Object, groups, ray_container

MAX_NAME = 47
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
FIRST_RAY_WITH_TOKENS = (2, 52)
_LABEL_NAME = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_REDIS_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")


def problems(service: Object) -> Iterator[str]:
    """One line per rule that ``service`` breaks."""
    name, spec = service["metadata"]["name"], service["spec"]
    if len(name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"the name {name} is no DNS-1035 label of at most {MAX_NAME} characters"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"
    if spec["rayClusterConfig"]["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "headService has a name"
    yield from _upgrade(spec)
    yield from _cluster(spec["rayClusterConfig"])
    for group_name, group in groups(service).items():
        yield from (f"{group_name}: {problem}" for problem in _group(group))


def _upgrade(spec: Object) -> Iterator[str]:
    kind = spec.get("upgradeStrategy", {}).get("type")
    if kind is not None and kind not in UPGRADES:
        yield f"unknown upgrade strategy {kind}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    options = spec["upgradeStrategy"].get("clusterUpgradeOptions", {})
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    if not options.get("gatewayClassName") or options.get("intervalSeconds", 0) <= 0:
        yield "an incremental upgrade needs gatewayClassName and intervalSeconds"
    if not 0 <= options.get("stepSizePercent", -1) <= options.get("maxSurgePercent", 100) <= 100:
        yield "stepSizePercent must lie between 0 and maxSurgePercent"


def _cluster(cluster: Object) -> Iterator[str]:
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    if len(set(names)) < len(names):
        yield "two worker groups have one name"
    version = tuple(int(part) for part in re.findall(r"\d+", cluster.get("rayVersion", "0"))[:2])
    if cluster.get("authOptions", {}).get("mode") == "token" and version < FIRST_RAY_WITH_TOKENS:
        yield "token authentication needs rayVersion, 2.52 or later"
    templates = [group["template"]["spec"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
    if cluster.get("enableInTreeAutoscaling") and any(spec.get("restartPolicy", "Never") != "Never" for spec in templates):
        yield "under the autoscaler restartPolicy must be Never or unset"
    head = cluster["headGroupSpec"]
    variables = {item["name"] for item in ray_container(head).get("env", [])}
    if variables & set(_REDIS_VARIABLES) or {"redis-password", "redis-username"} & set(head.get("rayStartParams", {})):
        yield "Redis is set by environment or rayStartParams: use gcsFaultToleranceOptions"
    fault_tolerance = cluster.get("gcsFaultToleranceOptions")
    if fault_tolerance and fault_tolerance.get("backend", "redis") == "redis" and not fault_tolerance.get("redisAddress"):
        yield "gcsFaultToleranceOptions has no redisAddress"


def _group(group: Object) -> Iterator[str]:
    params = group.get("rayStartParams", {})
    if "labels" in params:
        yield "labels belong into the group, not into rayStartParams"
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(params):
        yield "resources are set both in rayStartParams and in the group"
    if any(not isinstance(value, str) for value in params.values()):
        yield "rayStartParams must be strings"
    if not group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 2**31 - 1):
        yield "replicas lie outside minReplicas and maxReplicas"
    for key, value in group.get("labels", {}).items():
        if not (re.fullmatch(rf"({_SUBDOMAIN}/)?{_LABEL_NAME}", key) and re.fullmatch(rf"({_LABEL_NAME})?", value)):
            yield f"{key}={value} is no label"

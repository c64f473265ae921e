"""KubeRay's own checks, on what we ship and on manifests that break one each."""

import copy
from collections.abc import Callable

import pytest
from kuberay_rules import problems
from manifests import Object, groups, ray_container, ray_service


def test_kuberay_accepts_it(objects: list[Object]) -> None:
    """Bug guarded: a manifest that the API server takes and the operator then ignores, with a line in its log only."""
    assert list(problems(ray_service(objects))) == []


def first_group(service: Object) -> Object:
    return list(groups(service).values())[1]


BREAKS: dict[str, Callable[[Object], object]] = {
    "DNS-1035": lambda service: service["metadata"].update(name="o" * 48),
    "is negative": lambda service: service["spec"].update(rayClusterDeletionDelaySeconds=-1),
    "headService has a name": lambda service: groups(service)["head"].update(headService={"metadata": {"name": "x"}}),
    "unknown upgrade strategy": lambda service: service["spec"].update(upgradeStrategy={"type": "Recreate"}),
    "needs gatewayClassName": lambda service: service["spec"].update(
        upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": {"stepSizePercent": 5}}
    ),
    "stepSizePercent must lie": lambda service: service["spec"].update(
        upgradeStrategy={
            "type": "NewClusterWithIncrementalUpgrade",
            "clusterUpgradeOptions": {
                "stepSizePercent": 50,
                "maxSurgePercent": 10,
                "gatewayClassName": "x",
                "intervalSeconds": 5,
            },
        }
    ),
    "token authentication needs": lambda service: service["spec"]["rayClusterConfig"].update(rayVersion="2.51.9"),
    "restartPolicy must be": lambda service: (
        service["spec"]["rayClusterConfig"].update(enableInTreeAutoscaling=True),
        first_group(service)["template"]["spec"].update(restartPolicy="Always"),
    ),
    "use gcsFaultToleranceOptions": lambda service: ray_container(groups(service)["head"]).update(
        env=[{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]
    ),
    "has no redisAddress": lambda service: service["spec"]["rayClusterConfig"].update(
        gcsFaultToleranceOptions={"backend": "redis"}
    ),
    "labels belong into the group": lambda service: first_group(service)["rayStartParams"].update(labels="a=b"),
    "resources are set both": lambda service: (
        first_group(service)["rayStartParams"].update({"num-cpus": "1"}),
        first_group(service).update(resources={"CPU": "1"}),
    ),
    "must be strings": lambda service: first_group(service)["rayStartParams"].update({"num-cpus": 1}),
    "outside minReplicas": lambda service: first_group(service).update(maxReplicas=0, replicas=1),
    "is no label": lambda service: first_group(service).update(labels={"Outrider/role": "x"}),
}


@pytest.mark.parametrize("said", BREAKS)
def test_the_rules_see_what_is_wrong(objects: list[Object], said: str) -> None:
    """Bug guarded: a rule that never fires, so that the test above passes whatever the manifests say."""
    service = copy.deepcopy(ray_service(objects))
    BREAKS[said](service)
    assert any(said in problem for problem in problems(service)), list(problems(service))

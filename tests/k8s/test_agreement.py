"""Numbers and names that the manifests share with the code, with each other, and with Kubernetes' rules of safe pods."""

import ast
import re
from pathlib import Path
from typing import Any

from manifests import (
    K8S,
    ROOT,
    Object,
    containers,
    groups,
    in_bytes,
    of_kind,
    pod_specs,
    ray_container,
    ray_service,
    serve_file,
    the,
)

from deployments.api import OPEN_PATHS, STATUS_TIMEOUT_S
from deployments.wire import TLS_NAME

PART_OF = {"app.kubernetes.io/part-of": "outrider"}
CONFIGURED_FILES = {
    ("streams", "secret_file"): "outrider-streams",
    ("streams", "tls_cert"): "outrider-streams-tls",
    ("streams", "tls_key"): "outrider-streams-tls",
    ("streams", "tls_ca"): "outrider-streams-tls",
    ("api", "keys_file"): "outrider-keys",
}


def constant(path: str, name: str) -> Any:
    """The value of a constant of a module that is too heavy to import."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no constant {name}")


def ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


def test_all_objects_are_in_one_namespace(objects: list[Object]) -> None:
    """Bug guarded: an object of a component that lands in the namespace of whoever applies it."""
    namespaces = {item["metadata"].get("namespace") for item in objects if item["kind"] != "Namespace"}
    assert namespaces == {"outrider"}


def test_every_ray_container_has_the_same_environment(objects: list[Object]) -> None:
    """Bug guarded: Serve's switches on the head only (HAProxy then sends requests to nobody), or a worker that goes online."""
    (environment,) = [item for item in of_kind(objects, "ConfigMap") if "RAY_SERVE_ENABLE_HA_PROXY" in item["data"]]
    for name, group in groups(ray_service(objects)).items():
        references = [item["configMapRef"]["name"] for item in ray_container(group)["envFrom"]]
        assert references == [environment["metadata"]["name"]], name
    assert environment["data"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["data"]["HF_HUB_OFFLINE"] == "1"


def test_names_of_generated_objects_are_followed(objects: list[Object]) -> None:
    """Bug guarded: a RayService that names a ConfigMap or claim that does not exist, as kustomize hashes names."""
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for where, _, spec in pod_specs(objects):
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, where
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names, where


def test_every_mount_has_its_volume(objects: list[Object]) -> None:
    """Bug guarded: a pod that is refused because a mount names no volume of its."""
    claims = [claim for item in of_kind(objects, "StatefulSet") for claim in item["spec"]["volumeClaimTemplates"]]
    for where, _, spec in pod_specs(objects):
        volumes = spec.get("volumes", []) + [claim["metadata"] for claim in claims if where.startswith("StatefulSet")]
        for container in containers(spec):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in volumes}, where


def test_probes_ask_what_the_api_answers_without_a_key(objects: list[Object]) -> None:
    """Bug guarded: a probe of a path that needs a key or is not there, or that gives up before the answer can come."""
    for name, group in groups(ray_service(objects)).items():
        container = ray_container(group)
        assert "livenessProbe" not in container, "liveness is Ray's own: it must not depend on the model"
        if name == "head":
            continue
        probe = container["readinessProbe"]
        assert probe["httpGet"]["path"] == "/health"
        assert probe["httpGet"]["path"] in OPEN_PATHS
        assert ports(container)[probe["httpGet"]["port"]] == serve_file(ray_service(objects))["http_options"]["port"]
        assert probe["timeoutSeconds"] > STATUS_TIMEOUT_S


def test_a_long_load_is_not_taken_for_a_failure(objects: list[Object]) -> None:
    """Bug guarded: a limit that recreates the cluster again and again while a model loads."""
    service = ray_service(objects)
    assert "ray.io/initializing-timeout" not in service["metadata"].get("annotations", {})
    assert not {"serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"} & set(service["spec"])
    for _, group in groups(service).items():
        assert "startupProbe" not in ray_container(group)


def test_the_old_cluster_outlives_its_longest_stream(objects: list[Object]) -> None:
    """Bug guarded: answers cut in the middle by every upgrade."""
    longest_s = constant("deployments/app.py", "LONGEST_STREAM_S")
    assert ray_service(objects)["spec"]["rayClusterDeletionDelaySeconds"] > longest_s


def test_an_upgrade_never_waits_for_gpus_that_are_not_there(objects: list[Object]) -> None:
    """Bug guarded: a second cluster that is started beside the first and pends for ever, as all GPUs are taken."""
    service = ray_service(objects)
    with_gpus = any("nvidia.com/gpu" in ray_container(group)["resources"]["limits"] for group in groups(service).values())
    assert service["spec"]["upgradeStrategy"]["type"] == ("None" if with_gpus else "NewCluster")


def test_the_service_has_the_port_that_kuberay_looks_for(objects: list[Object]) -> None:
    """Bug guarded: a service without ports: KubeRay takes them from the head's container, by this name."""
    service = ray_service(objects)
    port = serve_file(service)["http_options"]["port"]
    assert serve_file(service)["http_options"]["host"] == "0.0.0.0"
    for name, group in groups(service).items():
        assert ports(ray_container(group))["serve"] == port, name
    assert service["spec"]["serveService"]["metadata"]["name"] == "outrider"
    for ingress in of_kind(objects, "Ingress"):
        backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend == {"name": "outrider", "port": {"name": "serve"}}


def test_ray_versions_agree(objects: list[Object]) -> None:
    """Bug guarded: KubeRay, which chooses probes and autoscaler by `rayVersion`, thinks of another Ray than the image has."""
    pins = (K8S / "image" / "constraints.txt").read_text(encoding="utf-8")
    version = ray_service(objects)["spec"]["rayClusterConfig"]["rayVersion"]
    assert re.search(rf"^ray=={re.escape(version)}$", pins, re.MULTILINE)


def test_shared_memory_is_there_and_counted(objects: list[Object]) -> None:
    """Bug guarded: 64 MB of /dev/shm, with which Ray moves its store to a disk and NCCL fails; or more of it than memory."""
    for name, group in groups(ray_service(objects)).items():
        spec, container = group["template"]["spec"], ray_container(group)
        (mount,) = [item for item in container["volumeMounts"] if item["mountPath"] == "/dev/shm"]
        (volume,) = [item["emptyDir"] for item in spec["volumes"] if item["name"] == mount["name"]]
        assert volume["medium"] == "Memory", name
        store_bytes = int(group["rayStartParams"]["object-store-memory"])
        assert store_bytes < in_bytes(volume["sizeLimit"]) < in_bytes(container["resources"]["limits"]["memory"]), name


def test_pods_pass_the_restricted_standard(objects: list[Object]) -> None:
    """Bug guarded: a pod that runs as root, may gain rights, or writes into its own image."""
    for where, _, spec in pod_specs(objects):
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["runAsUser"] > 0, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), where
        for container in containers(spec):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["readOnlyRootFilesystem"] is True, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]), where


def test_images_are_named_and_pinned(objects: list[Object]) -> None:
    """Bug guarded: `latest`; or an image that an `images:` entry of a user's overlay does not reach."""
    own = set()
    for _, _, spec in pod_specs(objects):
        for container in containers(spec):
            name, _, tag = container["image"].partition(":")
            if name == "redis":
                assert re.match(r"\d+\.\d+\.\d+", tag)
            else:
                own.add(container["image"])
    assert len(own) == 1, own


def test_secret_files_are_mounted_where_the_configuration_looks(objects: list[Object]) -> None:
    """Bug guarded: a key file that lies elsewhere, or on some nodes only: Api, lanes and drafts all read them."""
    (application,) = serve_file(ray_service(objects))["applications"]
    for (section, field), secret in CONFIGURED_FILES.items():
        path = application["args"].get(section, {}).get(field)
        if path is None:
            continue
        for name, group in groups(ray_service(objects)).items():
            volumes = {item["name"]: item for item in group["template"]["spec"]["volumes"]}
            found = [
                volumes[mount["name"]]["secret"]["secretName"]
                for mount in ray_container(group)["volumeMounts"]
                if mount["mountPath"] == str(Path(path).parent)
            ]
            assert found == [secret], (name, path)


def test_all_but_the_demo_ask_for_keys(objects: list[Object]) -> None:
    """Bug guarded: an overlay whose Serve file lost its keys, or the secret that outlives an update."""
    (application,) = serve_file(ray_service(objects))["applications"]
    demo = ray_service(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"] == 1
    assert ("keys_file" in application["args"].get("api", {})) != demo
    assert ("secret_file" in application["args"].get("streams", {})) != demo


def test_our_pods_reach_each_other_on_every_port(objects: list[Object]) -> None:
    """Bug guarded: a policy that lists ports: our streams and Ray's workers listen on any free one."""
    spec = the(objects, "NetworkPolicy", "outrider-cluster")["spec"]
    assert spec["podSelector"] == {"matchLabels": PART_OF}
    assert {"from": [{"podSelector": {"matchLabels": PART_OF}}]} in spec["ingress"]
    assert {"to": [{"podSelector": {"matchLabels": PART_OF}}]} in spec["egress"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    for where, labels, _ in pod_specs(objects):
        assert labels.items() >= PART_OF.items(), where


def test_strangers_reach_the_api_only(objects: list[Object]) -> None:
    """Bug guarded: the dashboard, which runs anybody's code, open to the whole cluster."""
    allowed = set()
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if "from" not in rule:
                allowed |= {port["port"] for port in rule["ports"]}
    assert allowed == {serve_file(ray_service(objects))["http_options"]["port"]}
    head = the(objects, "NetworkPolicy", "outrider-head")["spec"]["ingress"]
    assert [port["port"] for rule in head for port in rule["ports"]] == [
        ports(ray_container(groups(ray_service(objects))["head"]))["dashboard"]
    ]


def test_budgets_hold_a_number_of_pods(objects: list[Object]) -> None:
    """Bug guarded: `maxUnavailable` or a percentage, by which Kubernetes forbids every eviction of a custom resource's pods; a
    budget that no pod matches, or that with one pod can never be met.
    """
    fewest = {"worker": 0, "head": 1}
    for name, group in groups(ray_service(objects)).items():
        fewest["worker"] += 0 if name == "head" else group["minReplicas"]
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert isinstance(budget["spec"]["minAvailable"], int)
        assert "maxUnavailable" not in budget["spec"]
        labels = budget["spec"]["selector"]["matchLabels"]
        assert labels.items() >= PART_OF.items()
        assert budget["spec"]["minAvailable"] <= fewest[labels["ray.io/node-type"]]


def test_with_a_head_that_may_be_lost_no_budget_guards_it(objects: list[Object]) -> None:
    """Bug guarded: a drain that waits for a person although the cluster survives its head."""
    survives = "gcsFaultToleranceOptions" in ray_service(objects)["spec"]["rayClusterConfig"]
    guarded = any(item["metadata"]["name"] == "outrider-head" for item in of_kind(objects, "PodDisruptionBudget"))
    assert not (survives and guarded)


def test_redis_is_where_the_head_looks(objects: list[Object]) -> None:
    """Bug guarded: an address, port or password that belongs to another Redis."""
    options = ray_service(objects)["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
    assert bool(options) == bool(of_kind(objects, "StatefulSet"))
    if not options:
        return
    name, _, port = options["redisAddress"].partition(":")
    service, redis = the(objects, "Service", name), the(objects, "StatefulSet", name)
    assert service["spec"]["ports"][0]["port"] == int(port)
    assert service["spec"]["selector"] == redis["spec"]["template"]["metadata"]["labels"]
    password = redis["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"]
    assert options["redisPassword"]["valueFrom"] == password


def test_certificates_are_for_the_name_that_streams_check(objects: list[Object]) -> None:
    """Bug guarded: certificates that every stream refuses, or of a secret that nobody mounts."""
    for certificate in of_kind(objects, "Certificate"):
        if certificate["spec"].get("isCA"):
            continue
        assert certificate["spec"]["dnsNames"] == [TLS_NAME]
        assert certificate["spec"]["secretName"] == CONFIGURED_FILES["streams", "tls_cert"]
        assert set(certificate["spec"]["usages"]) == {"server auth", "client auth"}


def test_monitors_name_ports_that_pods_have(objects: list[Object]) -> None:
    """Bug guarded: a monitor that scrapes nothing, and a dashboard that stays empty."""
    service, monitors = ray_service(objects), of_kind(objects, "PodMonitor")
    by_group = {name: set(ports(ray_container(group))) for name, group in groups(service).items()}
    for monitor in monitors:
        named = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        labels = monitor["spec"]["selector"]["matchLabels"]
        assert labels.items() >= PART_OF.items()
        assert named <= (by_group["head"] if "ray.io/node-type" in labels else set().union(*by_group.values()))
    if monitors:
        policy = the(objects, "NetworkPolicy", "outrider-metrics")["spec"]["ingress"][0]
        head = ports(ray_container(groups(service)["head"]))
        scraped = {endpoint["port"] for monitor in monitors for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert {port["port"] for port in policy["ports"]} == {head[name] for name in scraped}


def test_the_application_is_scraped_with_a_key(objects: list[Object]) -> None:
    """Bug guarded: 401 for Prometheus, since /metrics asks for a key like every route that tells something."""
    monitors = [item for item in of_kind(objects, "PodMonitor") if item["metadata"]["name"] == "outrider"]
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        assert endpoint["path"] not in OPEN_PATHS
        assert endpoint["authorization"]["credentials"] == {"name": "outrider-metrics-key", "key": "key"}

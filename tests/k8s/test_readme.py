"""What the guide says against what is there."""

import re
import shlex

import yaml
from manifests import K8S, ROOT
from test_agreement import constant

GUIDE = (K8S / "README.md").read_text(encoding="utf-8")
MADE_BY_THE_READER = {"k8s/overlays/mine", "k8s/overlays/mine/kustomization.yaml"}


def test_every_path_of_the_guide_exists() -> None:
    """Bug guarded: a command that fails because a folder was renamed."""
    paths = set(re.findall(r"(?<![\w/])k8s/[\w./-]*\w", GUIDE))
    assert len(paths) > 8
    assert paths > MADE_BY_THE_READER
    assert [path for path in paths - MADE_BY_THE_READER if not (ROOT / path).exists()] == []
    for folder in ("components", "overlays"):
        named = set(re.findall(rf"(?<![\w/]){folder}/[\w./-]*\w", GUIDE))
        assert [path for path in named if not (K8S / path).exists()] == []


def test_build_arguments_of_the_guide_exist() -> None:
    """Bug guarded: a build argument that Docker ignores with a warning."""
    dockerfile = (K8S / "image" / "Dockerfile").read_text(encoding="utf-8")
    named = set(re.findall(r"--build-arg (\w+)", GUIDE))
    assert {"VARIANT", "PIP_INDEX_URL", "BASE_IMAGE", "BASE_DIGEST"} <= named
    assert named <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_times_of_the_guide_are_those_of_the_files() -> None:
    """Bug guarded: a delay that was changed in one place only."""
    (delay, longest) = re.search(
        r"kept for (\d+) s \(`rayClusterDeletionDelaySeconds`\).*?\((\d+) s\)", GUIDE, re.DOTALL
    ).groups()
    assert f"rayClusterDeletionDelaySeconds: {delay}\n" in (K8S / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    assert float(longest) == constant("deployments/app.py", "LONGEST_STREAM_S")


def test_objects_that_commands_name_exist() -> None:
    """Bug guarded: a command for an object, a namespace, a port or a label that was renamed."""
    lines = re.findall(r"(?:^ *|`)(kubectl [^`\n#]*)", GUIDE, re.MULTILINE)
    commands = [shlex.split(line.removesuffix("&")) for line in lines]
    documents = [
        item for path in (K8S / "base").glob("*.yaml") for item in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    named = {f"{item['kind'].lower()}/{item['metadata']['name']}": item for item in documents if "metadata" in item}
    service = named["rayservice/outrider"]["spec"]["serveService"]["metadata"]["name"]
    ports = named["rayservice/outrider"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0][
        "ports"
    ]
    (optional,) = named["job/outrider-fetch"]["spec"]["template"]["spec"]["containers"][0]["envFrom"]
    assert [words[2] for words in commands if words[1] == "-n"] == ["outrider"] * sum(words[1] == "-n" for words in commands)
    told = {" ".join(words[3:] if words[1] == "-n" else words[1:]) for words in commands}
    told = {line for line in told if not line.startswith("apply -k ")}  # tests/k8s renders those
    assert told == {
        f"create {next(name for name in named if name.startswith('namespace/')).replace('/', ' ')}",
        f"create secret generic {optional['secretRef']['name']} --from-literal=HF_TOKEN=...",
        "delete job outrider-fetch",
        "delete raycluster -l ray.io/originated-from-cr-name=outrider",
        "get job,raycluster,pods",
        f"port-forward service/{service} {next(port['containerPort'] for port in ports if port['name'] == 'serve')}",
        "wait rayservice/outrider --for=condition=Ready --timeout=60m",
    }

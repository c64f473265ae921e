"""Alerts and dashboard as files: made by the code, taken along by kustomize, and the alerts played on series."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import K8S, Object, of_kind, the

from deployments.monitoring.__main__ import files
from deployments.monitoring.alerts import alerts, rules

CASES = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text(encoding="utf-8"))
LARGEST_ANNOTATION = 262_144
"""Bytes of an object that `kubectl apply` still takes."""


@pytest.mark.parametrize("name", sorted(files()))
def test_files_are_those_that_the_code_makes(name: str) -> None:
    """Bug guarded: a file that was edited by hand, or forgotten: run `python -m deployments.monitoring`."""
    assert (K8S / "monitoring" / name).read_text(encoding="utf-8") == files()[name]


def test_monitoring_takes_them_along(objects: list[Object]) -> None:
    """Bug guarded: a dashboard or alerts that stay in the repository; a label that Grafana's sidecar does not look for."""
    found = [item for item in of_kind(objects, "ConfigMap") if item["metadata"]["name"] == "outrider-dashboard"]
    assert bool(found) == bool(of_kind(objects, "PodMonitor")) == bool(of_kind(objects, "PrometheusRule"))
    for config in found:
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config["metadata"]["namespace"] == "outrider"
        (content,) = config["data"].values()
        assert json.loads(content)["uid"] == "outrider"
        assert len(json.dumps(config)) < LARGEST_ANNOTATION
        assert the(objects, "PrometheusRule")["spec"] == rules()


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """Bug guarded: an alert that nobody ever saw fire, or be silent."""
    fired: dict[bool, set[str]] = {True: set(), False: set()}
    for case in CASES["tests"]:
        for expectation in case["alert_rule_test"]:
            fired[bool(expectation["exp_alerts"])].add(expectation["alertname"])
    assert fired == {True: {alert.name for alert in alerts()}, False: {alert.name for alert in alerts()}}


def play(folder: Path, cases: Any) -> subprocess.CompletedProcess[str]:
    """Run the cases on the alerts; skips where there is no promtool."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not on the PATH (Debian: apt install prometheus)")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules()), encoding="utf-8")
    (folder / "cases.yaml").write_text(yaml.safe_dump(cases), encoding="utf-8")
    command = ["promtool", "test", "rules", "cases.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def with_annotations(cases: Any) -> Any:
    """promtool compares all annotations: those that a case does not spell out are the alert's own."""
    own = {alert.name: {"summary": alert.summary, "description": alert.todo} for alert in alerts()}
    for case in cases["tests"]:
        for expectation in case["alert_rule_test"]:
            for expected in expectation["exp_alerts"]:
                expected.setdefault("exp_annotations", own[expectation["alertname"]])
    return cases


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Bug guarded: an expression that is valid and never true: labels that do not match, a sum before a rate, NaN."""
    result = play(tmp_path, with_annotations(CASES))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_cases_find_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    """Bug guarded: cases that pass whatever the rules say."""
    broken = with_annotations(CASES)
    wrong = [{**case, "input_series": []} for case in broken["tests"] if "last_report" in str(case)]
    result = play(tmp_path, {**broken, "tests": wrong})
    assert result.returncode != 0
    assert "OutriderReportStale" in result.stdout + result.stderr


def test_the_guide_names_every_alert() -> None:
    """Bug guarded: somebody is woken by a name that the guide does not know, or looks for one that is gone."""
    guide = (K8S.parent / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)^#+ `?(Outrider[A-Z]\w+)", guide)) == {alert.name for alert in alerts()}

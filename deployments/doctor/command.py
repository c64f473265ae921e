"""`outrider doctor`: the report as lines or as one JSON object, and the exit code."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from deployments.doctor.findings import Finding, Level, worst
from deployments.doctor.rules import examine
from deployments.doctor.seen import Seen
from deployments.endpoint import read_routes
from deployments.facts import read_facts
from deployments.scrape import Scrape
from engine.config import OutriderConfig

_COLOURS: dict[Level, str] = {"ok": "green", "warning": "yellow", "problem": "red"}


def run_doctor_on_server(url: str, headers: dict[str, str], *, as_json: bool) -> int:
    """Examine a running server by its routes. Raises `OutriderError` when it cannot be reached."""
    routes = read_routes(url, headers)
    findings = examine(Seen(routes.health, routes.controller, Scrape(routes.metrics), read_facts()))
    return report(findings, routes.url, as_json=as_json)


def run_doctor_on_config(config: OutriderConfig, *, as_json: bool) -> int:
    """Examine a configuration on this machine."""
    from deployments.doctor.offline import examine_config

    return report(examine_config(config), "configuration", as_json=as_json)


def report(findings: Sequence[Finding], subject: str, *, as_json: bool) -> int:
    """Print; 1 where anything is a problem, else 0: a warning is advice, and may be what somebody chose."""
    verdict = worst(findings)
    if as_json:
        print(json.dumps({"subject": subject, "verdict": verdict, "findings": [asdict(finding) for finding in findings]}))
    else:
        console = Console(soft_wrap=True)
        for finding in findings:
            console.print(_line(finding))
        counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in _COLOURS)
        console.print(f"{subject}: {counts}", markup=False)
    return int(verdict == "problem")


def _line(finding: Finding) -> Text:
    line = Text.assemble((f"{finding.level:<8}", _COLOURS[finding.level]), (f"{finding.check}: ", "bold"), finding.seen)
    return line.append(f"\n        → {finding.advice}") if finding.advice else line

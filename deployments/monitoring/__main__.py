"""`python -m deployments.monitoring`: write dashboard and alerts as files."""

import argparse
import json
from pathlib import Path

import yaml

from deployments.monitoring.alerts import prometheus_rule, rules
from deployments.monitoring.grafana import dashboard

HEADER = "# Made by `python -m deployments.monitoring`; change deployments/monitoring instead.\n"


def files() -> dict[str, str]:
    """Name and content of the files of `k8s/monitoring` that are made here."""
    return {
        "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "alerts.yaml": HEADER + _yaml(prometheus_rule()),
    }


def _yaml(tree: object) -> str:
    return yaml.safe_dump(tree, sort_keys=False, width=1000, allow_unicode=True)


def main() -> None:
    """Write them; with ``--rules`` print a rules file for a Prometheus without the operator instead."""
    parser = argparse.ArgumentParser(prog="python -m deployments.monitoring", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("k8s/monitoring"), metavar="FOLDER", help="default: k8s/monitoring")
    parser.add_argument("--rules", action="store_true", help="print the alerts as a plain rules file and write nothing")
    options = parser.parse_args()
    if options.rules:
        print(_yaml(rules()), end="")
        return
    for name, content in files().items():
        (options.out / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()

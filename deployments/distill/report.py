"""What became of a run: as an object, as a table, and as the model card of its folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from deployments.distill.plan import DistillPlan, write_text

REPORT_FILE, CARD_FILE = "report.json", "README.md"


def make_report(
    plan: DistillPlan, *, samples: dict[str, Any], training: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The object of ``report.json`` and ``--json``."""
    best = {
        f"{rule['temperature']:g}": max(rows, key=lambda row: _speed_up(row, rule["temperature"]))["name"]
        for rule in rows[0]["rules"]
    }
    return {
        "plan": asdict(plan),
        "samples": samples,
        "training": training,
        "candidates": list(rows),
        "best_by_temperature": best,
    }


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write ``report.json`` and the model card. Raises OSError."""
    write_text(out / REPORT_FILE, json.dumps(report, indent=1) + "\n")
    write_text(out / CARD_FILE, model_card(out, report))


def model_card(out: Path, report: dict[str, Any]) -> str:
    """The folder's ``README.md``."""
    plan, training, samples = report["plan"], report["training"], report["samples"]
    last = training["curve"][-1]
    return f"""# A {plan["kind"]} for {plan["target"]}

{_what(plan)}, made by `outrider distill` to foresee that model's text. It is of no
use without it: the target checks every token, and only its own are kept.

```yaml
target: {{model: {plan["target"]}}}
draft: {{source: {_source(plan)}, model: {out.resolve()}}}
```

Trained on {samples["tokens"]:,} tokens that the target wrote at temperature {plan["temperature"]:g}
({training["tokens"]:,} with repetitions, {training["steps"]:,} steps, {training["seconds"] / 60:.1f} minutes).
On held-out texts it finds the target's likeliest token at {last["agreement"]:.1%} of the positions. Texts were at most
{plan["output_tokens"]} tokens long; over contexts that are much longer than those it is worth less.

Measured on other prompts with the engine ({_depth(report)} tokens per draft; c: a draft step in target steps; speed-up:
expected of one request at the best depth, when draft and target take turns):

| draft | c | T | accepted per drafted | by position | per token | expected speed-up |
|---|---|---|---|---|---|---|
{_card_rows(report)}

`report.json` holds everything that was measured, with the learning curve. Folders beside it are needed by
`outrider distill --resume` and `--samples` only and may be deleted.
"""


def report_table(report: dict[str, Any]) -> Table:
    """The candidates' rows for people."""
    table = Table("draft", "c", "T", "accepted per drafted", "by position", "per token", "expected speed-up")
    for cells in _cells(report):
        table.add_row(*cells)
    return table


def verdict(report: dict[str, Any], out: Path) -> str:
    """One line: how to serve the draft, and which candidate should be the fastest."""
    best = ", ".join(f"{name} at T={temperature}" for temperature, name in report["best_by_temperature"].items())
    source = _source(report["plan"])
    return f"serve it with --set draft.source={source} --set draft.model={out}; fastest by expectation: {best}"


def _what(plan: dict[str, Any]) -> str:
    if plan["kind"] == "head":
        return (
            f"An EAGLE-3 prediction head of one layer in the `speculators` format, which reads hidden states of\n"
            f"{plan['target']} and drafts its {plan['vocabulary']:,} most frequent tokens"
        )
    width = f", width {plan['hidden']}" if plan["hidden"] else ""
    return f"A Llama model of {plan['layers']} layers{width} with the tokenizer of {plan['target']}"


def _source(plan: dict[str, Any]) -> str:
    return "heads" if plan["kind"] == "head" else "model"


def _card_rows(report: dict[str, Any]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in _cells(report))


def _cells(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            f"{row['cost_ratio']:.2f}",
            f"{rule['temperature']:g}",
            f"{rule['accepted_share']:.1%}",
            "  ".join("-" if share is None else f"{share:.0%}" for share in rule["accepted_by_position"]),
            f"{rule['alpha']:.1%}",
            f"{rule['expected_speed_up']:.2f} at K={rule['best_depth']}",
        )
        for row in report["candidates"]
        for rule in row["rules"]
    ]


def _speed_up(row: dict[str, Any], temperature: float) -> float:
    return float(next(rule["expected_speed_up"] for rule in row["rules"] if rule["temperature"] == temperature))


def _depth(report: dict[str, Any]) -> int:
    return len(report["candidates"][0]["rules"][0]["accepted_by_position"])

"""`outrider verify-lossless` as a user runs it, on the default pair."""

import json
from pathlib import Path

import pytest
from test_cli import assert_one_line, outrider


def test_the_default_pair_is_lossless(tmp_path: Path) -> None:
    """Bug guarded: everything that makes a text depend on drafts, depth or batch on real weights; a command that prints more
    than its object on stdout, or whose exit code does not follow its verdict."""
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {model: smollm2}\n")
    options = ["--config", str(file), "--seeds", "150", "--tokens", "8"]
    result = outrider("verify-lossless", "--quick", "--json", *options, timeout_s=600)
    found = json.loads(result.stdout)
    assert result.returncode == 0, (found["problems"], found["matrix"]["divergences"][:5], found["statistics"])
    assert found["verdict"] == "pass"
    assert found["draft"] == "self-int8"
    assert found["can_fail"]["found"]
    assert found["target"]["row_invariant"] == found["matrix"]["exact"]
    assert found["matrix"]["num_comparisons"] > 100
    assert {test["rule"] for test in found["statistics"]["tests"]} == {"coupled", "rejection", "block"}
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "3"], ["--seeds", "100"]),
        (["--tokens", "0"], ["--tokens"]),
        (["--tolerance", "-1"], ["--tolerance"]),
        (["--config", "/nowhere/outrider.yaml"], ["/nowhere/outrider.yaml"]),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: list[str]) -> None:
    """Bug guarded: a run of minutes, or a traceback, for options that cannot mean anything."""
    assert_one_line(outrider("verify-lossless", *arguments), 2, *words)

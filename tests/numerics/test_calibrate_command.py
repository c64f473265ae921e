"""`outrider calibrate` on a random model: which settings it tries, and what it says of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import write_byte_llama

from deployments import calibrate
from deployments.calibrate import Setting
from deployments.cli import EXIT_USAGE, main
from engine.config import parse_config
from engine.verify import ragged


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ragged, "STEP_BUDGET_S", 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers whose tokens are bytes."""
    return write_byte_llama(
        tmp_path_factory.mktemp("tiny"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


def run(folder: Path, *arguments: str) -> int:
    settings = [f"target.model={folder}", "target.dtype=float32", "target.kv_cache_tokens=65536", "draft.kv_cache_tokens=65536"]
    return main(["calibrate", "--quick", *(part for setting in settings for part in ("--set", setting)), *arguments])


def test_every_setting_is_measured_and_the_best_can_be_configured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a setting that is silently left out, NaN in the JSON, lines that the configuration refuses."""
    code = run(folder, "--json", "--context", "600", "--temperature", "1")
    printed = capsys.readouterr()
    told = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert [setting["name"] for setting in told["settings"]] == [
        "self-int8",
        "self-int4",
        "layer-skip, without 1",
        "layer-skip, without 1, int8",
        "self-int8, window 256",
    ]
    for setting in told["settings"]:
        assert 0 < setting["alpha"] <= 1
        assert setting["alpha_by_position"][0] > 0
        assert setting["c"] > 0
        parse_config({"draft": setting["draft"]})
    assert code == (1 if told["best"] is None else 0)
    assert "self-int4" in printed.err


def test_the_lines_on_stdout_are_the_best_setting(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: the largest α wins over the largest speed-up; a setting that was refused or does not pay is recommended."""
    made: dict[str, Callable[[Setting], Setting]] = {
        "self-int8": lambda one: figures(one, accepted=(9, 9, 9, 9), step_s=0.9),
        "self-int4": lambda one: figures(one, accepted=(8, 6, 5, 4), step_s=0.1),
        "layer-skip": lambda one: Setting(one.draft, refused="its layers share keys and values"),
    }
    monkeypatch.setattr(
        calibrate, "_measured", lambda config, setting, *args, **options: made[setting.draft["source"]](setting)
    )
    assert run(folder) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"draft": {"source": "self-int4"}}
    made["self-int8"] = made["self-int4"] = lambda one: figures(one, accepted=(8, 6, 5, 4), step_s=0.9)
    assert run(folder) == 1
    assert capsys.readouterr().out == ""


def figures(setting: Setting, accepted: tuple[int, ...], step_s: float) -> Setting:
    return Setting(
        setting.draft,
        tested=(10, *accepted[:-1]),
        accepted=accepted,
        draft_step_s=step_s,
        target_times=((1, 1.0), (5, 1.1)),
        max_depth=8,
    )


def test_the_expected_speedup_is_that_of_the_closed_form() -> None:
    """Bug guarded: α over all drafted tokens instead of those that were tested, or c of the wrong step."""
    one = figures(Setting({"source": "self-int8"}), accepted=(8, 6, 5, 4), step_s=0.2)
    alpha = 23 / 29
    assert one.alpha == pytest.approx(alpha)
    assert one.cost == pytest.approx(0.2)
    expected = max((1 - alpha ** (k + 1)) / (1 - alpha) / (1 + 0.025 * k + 0.2 * k) for k in range(1, 9))
    assert one.speedup == pytest.approx(expected, rel=1e-6)
    hopeless = figures(Setting({"source": "self-int8"}), accepted=(8, 6, 5, 4), step_s=2.0)
    assert hopeless.depth == 0
    assert hopeless.speedup < 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "3"], "--temperature must be a number from 0 to 2"),
        (["--context", "10"], "--context must be at least 64"),
        (["--context", "4000"], "--context 4000 and an answer do not fit into the 2048 tokens"),
        (["--set", "speculation.max_depth=0"], "speculation.max_depth is 0"),
        (["--set", "target.model=emulated:free"], "is emulated"),
    ],
)
def test_what_means_nothing_is_refused(folder: Path, arguments: list[str], told: str, capsys: Any) -> None:
    """Bug guarded: minutes of measuring before a mistake is told, or figures of something else than what was asked."""
    assert run(folder, *arguments) == EXIT_USAGE
    assert told in capsys.readouterr().err

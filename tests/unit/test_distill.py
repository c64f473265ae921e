"""`outrider distill` without a model: shards, schedule, prompts, the plan of a run and what it may go on with."""

import json
import random
from collections import namedtuple
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from autoscale.cost_model import RoundCost
from deployments.bench.prompts import PROMPTS
from deployments.cli import EXIT_USAGE, main
from deployments.distill import plan as plans
from deployments.distill.acceptance import expected_speed_up, token_acceptance
from deployments.distill.plan import DistillOptions, begin, check_room, check_state_room, find_plan, make_plan, state_tokens
from deployments.distill.prompts import KINDS, endless
from deployments.distill.report import make_report, model_card
from engine.distill import shards
from engine.distill.schedule import LAST_RATE, WARM_UP, Budget, batch_at, in_parts, rate_factor
from engine.distill.shards import TOP_K, VALIDATION_EVERY, Text, read_shard, shard_path, split, write_shard
from engine.errors import ConfigError, OutriderError
from engine.types import TokenLogprob


def text(prompt: tuple[int, ...], output: tuple[int, ...]) -> Text:
    top = tuple((token, -0.5 * token) for token in range(TOP_K))
    return Text.of(prompt, [TokenLogprob(token, -1.0, top) for token in output])


def options(out: Path, **changes: Any) -> DistillOptions:
    return DistillOptions(**{"target": "smollm2", "out": out, **changes})


# --- shards -----------------------------------------------------------------------------------------------------------------


def test_a_shard_gives_back_what_was_stored(tmp_path: Path) -> None:
    """Bug guarded: texts that borrow tokens or log-probabilities from their neighbours in the file."""
    stored = [text((1, 2, 3), (4, 5)), text((6,), (7, 8, 9)), text((10, 11), (12,))]
    write_shard(tmp_path, 3, stored)
    found = read_shard(tmp_path, 3)
    assert [(t.tokens.tolist(), t.prompt_length, t.num_output) for t in found] == [
        ([1, 2, 3, 4, 5], 3, 2),
        ([6, 7, 8, 9], 1, 3),
        ([10, 11, 12], 2, 1),
    ]
    for ours, theirs in zip(found, stored, strict=True):
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
        np.testing.assert_array_equal(ours.top_logprobs, theirs.top_logprobs)


def test_a_small_vocabulary_is_filled_up_with_impossible_tokens() -> None:
    """Bug guarded: filler that takes probability, so that the divergence of a small vocabulary is wrong."""
    made = Text.of((1,), [TokenLogprob(2, -0.1, ((2, -0.1), (3, -2.3)))])
    assert made.top_logprobs.shape == (1, TOP_K)
    assert np.exp(made.top_logprobs[0, 2:]).sum() == 0


def test_a_shard_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a run that is killed while it writes leaves half a shard, which --resume takes for a whole one."""
    real = shards.save_file

    def killed(arrays: Any, path: Path) -> None:
        real(arrays, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, 0, [text((1,), (2,))])
    assert not shard_path(tmp_path, 0).exists()


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a traceback after hours of sampling, because safetensors does not raise the system's error."""

    def full(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_shard(tmp_path, 0, [text((1,), (2,))])


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """Bug guarded: a traceback of the file format instead of which file to delete."""
    shard_path(tmp_path, 0).write_bytes(b"not a shard")
    with pytest.raises(OutriderError, match=r"shard-00000.safetensors is damaged .*: delete it"):
        read_shard(tmp_path, 0)


def test_held_out_texts_are_never_trained_on() -> None:
    """Bug guarded: acceptance measured on texts that were learned by heart; a split that moves when texts are added."""
    texts = [text((number,), (1,)) for number in range(50)]
    train, held_out = split(texts)
    more_train, more_held_out = split([*texts, text((50,), (1,))])
    firsts = [int(t.tokens[0]) for t in held_out]
    assert firsts == list(range(0, 50, VALIDATION_EVERY))
    assert {int(t.tokens[0]) for t in train} == set(range(50)) - set(firsts)
    assert more_held_out == held_out
    assert more_train[: len(train)] == train
    with pytest.raises(OutriderError, match="--tokens is too small"):
        split(texts[:1])


# --- schedule ---------------------------------------------------------------------------------------------------------------


def test_every_text_comes_once_per_epoch_in_a_new_order() -> None:
    """Bug guarded: a run that goes on at step n but sees other texts than the one that was not interrupted, or some twice."""
    steps = [batch_at(step, 10, 4, seed=3) for step in range(5)]
    flat = [index for step in steps for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert batch_at(3, 10, 4, seed=3) == steps[3]
    assert batch_at(3, 10, 4, seed=4) != steps[3]


def test_batches_larger_than_the_data_repeat_it() -> None:
    """Bug guarded: a run over a handful of texts ends in an index error."""
    assert sorted(batch_at(0, 2, 4, seed=0)) == [0, 0, 1, 1]
    assert list(in_parts([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]


def test_learning_rate_warms_up_and_falls() -> None:
    """Bug guarded: a first step at the full rate, a rate of zero for the last steps."""
    factors = [rate_factor(step / 100) for step in range(101)]
    peak = round(100 * WARM_UP)
    assert factors[peak] == pytest.approx(1)
    assert factors[0] == pytest.approx(LAST_RATE)
    assert factors[100] == pytest.approx(LAST_RATE)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_a_budget_is_steps_or_minutes() -> None:
    """Bug guarded: a run by minutes that never ends, or one whose time counts steps."""
    assert [Budget(steps=4).progress(step, 1e9) for step in (0, 1, 4, 5)] == [0, 0.25, 1, 1]
    assert [Budget(minutes=2).progress(10**9, seconds) for seconds in (0, 30, 120, 150)] == [0, 0.25, 1, 1]
    for both in ({}, {"steps": 1, "minutes": 1.0}):
        with pytest.raises(ValueError, match="either steps or minutes"):
            Budget(**both)  # type: ignore[arg-type]


# --- prompts ----------------------------------------------------------------------------------------------------------------


def test_prompts_are_many_and_the_same_again() -> None:
    """Bug guarded: a shard that is made again after a kill differs; all shards share their prompts."""
    first, again, other = (list(islice(endless(7, shard), 400)) for shard in (0, 0, 1))
    assert first == again
    assert len(set(first)) > 350
    assert len(set(first) & set(other)) < 100


def test_prompts_have_no_open_slots_and_are_not_those_that_measure() -> None:
    """Bug guarded: '{city}' in what the target reads; a draft that is measured on its own training prompts."""
    measured = {prompt for prompts in PROMPTS.values() for prompt in prompts}
    for kind in KINDS:
        draw = random.Random(1)
        for prompt in (kind(draw) for _ in range(200)):
            assert prompt not in measured
            assert "\x00" not in prompt
            assert not any("{" + slot in prompt for slot in ("name", "city", "thing", "text", "story", "call", "goal", "year"))


# --- plan -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "tree"], "--kind tree: must be one of draft, head"),
        (["--kind", "head", "--layers", "2"], "--layers has no meaning for --kind head: remove it, or set --kind draft"),
        (["--kind", "head", "--hidden", "64"], "--hidden has no meaning for --kind head"),
        (["--vocabulary", "64"], "--vocabulary has no meaning for --kind draft: remove it, or set --kind head"),
        (["--kind", "head", "--vocabulary", "1"], "--vocabulary 1: must be at least 2"),
        (["--samples", "/no/such/run"], "--samples: there is no run in /no/such/run"),
        (["--samples", "/no/such/run", "--tokens", "900"], "--tokens says what to sample, and with --samples nothing is"),
        (["--steps", "5", "--minutes", "2"], "--steps and --minutes"),
        (["--layers", "0"], "--layers 0: must be at least 1"),
        (["--hidden", "-8"], "--hidden -8: must be at least 1"),
        (["--tokens", "10"], "--tokens 10: must be at least 256"),
        (["--minutes", "0"], "--minutes 0"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--temperature", "0"], "--temperature 0: must be above 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--prompts", "/no/such/file"], "--prompts /no/such/file: cannot be read"),
        (["--resume"], "--resume: there is no run in"),
    ],
)
def test_mistakes_end_in_one_line_that_names_the_option(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a mistake that is found after hours of sampling, or in a traceback."""
    out = tmp_path / "out"
    assert main(["distill", "--target", "smollm2", "--out", str(out), *arguments]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists(), "what is refused leaves nothing behind"


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    """Bug guarded: samples and weights among somebody's files, or a second run on top of the first."""
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not empty; name another one"):
        find_plan(options(tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        find_plan(options(tmp_path / "mine"))
    out = tmp_path / "run"
    begin(out, make_plan(options(out), ()))
    with pytest.raises(ConfigError, match="--resume goes on with the run in it"):
        find_plan(options(out))


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    """Bug guarded: a draft trained half by one set of options and half by another; options that must be said again."""
    own = tmp_path / "prompts.jsonl"
    own.write_text('{"prompt": "one"}\n')
    out = tmp_path / "run"
    begun, _ = find_plan(options(out, layers=3, tokens=5000, prompts=own, minutes=2.5))
    begin(out, begun)
    assert find_plan(options(out, resume=True, prompts=own)) == (begun, ("one",))
    for changes in ({"layers": 4}, {"target": "other"}, {"tokens": 6000}, {"seed": 1}, {"steps": 7}, {"quick": True}):
        ((name, value),) = changes.items()
        with pytest.raises(ConfigError, match=f"--{name} is {value} now, but the run in"):
            find_plan(options(out, resume=True, prompts=own, **changes))
    with pytest.raises(ConfigError, match="--prompts is missing"):
        find_plan(options(out, resume=True))
    own.write_text('{"prompt": "two"}\n')
    with pytest.raises(ConfigError, match="--prompts is another file's now"):
        find_plan(options(out, resume=True, prompts=own))


def test_a_run_takes_the_samples_of_another_one_of_the_same_target(tmp_path: Path) -> None:
    """Bug guarded: texts of another model; a run that goes on with other texts because the first one has sampled more since."""
    first = tmp_path / "first"
    begin(first, make_plan(options(first, tokens=900, temperature=0.7), ()))
    with pytest.raises(ConfigError, match=r"--samples .*first: there is no complete shard in .*first; "):
        find_plan(options(tmp_path / "second", samples=first))
    write_shard(first / plans.SAMPLES, 0, [text((1, 2), (3,) * 40), text((4,), (5,) * 20)])
    second = options(tmp_path / "second", kind="head", samples=first)
    plan, _ = find_plan(second)
    assert (plan.tokens, plan.temperature, plan.vocabulary) == (60, 0.7, plans.VOCABULARY)
    assert plan.samples_folder(second.out) == first / plans.SAMPLES
    with pytest.raises(ConfigError, match="its texts are of smollm2, not of --target other"):
        find_plan(options(tmp_path / "second", samples=first, target="other"))
    begin(second.out, plan)
    assert not (second.out / plans.SAMPLES).exists()
    write_shard(first / plans.SAMPLES, 1, [text((1, 2), (3,) * 40)])
    continued, _ = find_plan(replace(second, resume=True))
    assert continued == plan
    assert shards.num_stored(plan.samples_folder(second.out), plan.tokens) == (1, 60)
    with pytest.raises(ConfigError, match=r"--samples is .* now, but the run in"):
        find_plan(replace(second, resume=True, samples=tmp_path))


def test_samples_of_a_run_that_has_them_from_another_one_are_those_of_the_other(tmp_path: Path) -> None:
    """Bug guarded: a run that is accepted and then finds none of its texts, because they lie two folders on."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    begin(first, make_plan(options(first, tokens=900), ()))
    write_shard(first / plans.SAMPLES, 0, [text((1, 2), (3,) * 40), text((4,), (5,) * 20)])
    begin(second, make_plan(options(second, samples=first), ()))
    given = options(third, kind="head", samples=second)
    plan, _ = find_plan(given)
    assert plan.samples_folder(third) == first / plans.SAMPLES
    assert shards.num_stored(plan.samples_folder(third), plan.tokens) == (1, 60)
    begin(third, plan)
    for same in (second, first):
        assert find_plan(replace(given, resume=True, samples=same))[0] == plan


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    """Bug guarded: a traceback about a keyword argument."""
    begin(tmp_path, make_plan(options(tmp_path), ()))
    (tmp_path / plans.PLAN_FILE).write_text('{"target": "smollm2"}')
    with pytest.raises(ConfigError, match=r"--resume: .*cannot be read"):
        find_plan(options(tmp_path, resume=True))


def test_samples_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: hours of sampling that end with a full disk."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plans.shutil, "disk_usage", lambda path: usage(0, 0, 2**30))
    check_room(tmp_path, 1_000_000)
    with pytest.raises(ConfigError, match=r"--out .*10000000 samples .* are free"):
        check_room(tmp_path, 10_000_000)
    with pytest.raises(ConfigError, match=r"and at most 1.0 GiB of hidden states, prompts at their longest, need .* are free"):
        check_room(tmp_path, 1_000, state_bytes=2**30)


def test_hidden_states_of_prompts_take_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: states of the output alone counted, so that the disk is found too small when all is sampled; advice to
    sample less when nothing is sampled any more.
    """
    plan = make_plan(options(tmp_path, kind="head", tokens=1280), ())
    assert state_tokens(plan, sampled=0, missing=1280) == 10 * (512 + 128)
    assert state_tokens(plan, sampled=700, missing=129) == 700 + 2 * (512 + 128)
    assert state_tokens(plan, sampled=700, missing=0) == 700
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(plans.shutil, "disk_usage", lambda path: usage(0, 0, 2**30))
    check_state_room(tmp_path, plan, 2**28)
    with pytest.raises(ConfigError) as refused:
        check_state_room(tmp_path, plan, 2**30)
    assert "the hidden states of its samples need 1.5 GiB, 1.0 GiB are free" in str(refused.value)
    assert f"--resume, or begin another run with --out on another disk and --samples {tmp_path}" in str(refused.value)
    assert "--tokens" not in str(refused.value)


def test_steps_default_to_a_few_passes(tmp_path: Path) -> None:
    """Bug guarded: a default that trains on a twentieth of what was sampled, or a hundred times over it."""
    plan = make_plan(options(tmp_path, tokens=1_000_000), ())
    assert plan.steps is not None
    assert plan.steps * plans.BATCH_TEXTS["draft"] * plan.output_tokens == pytest.approx(plans.PASSES * 1_000_000, rel=0.01)
    assert make_plan(options(tmp_path, minutes=3), ()).budget == Budget(minutes=3)


# --- report -----------------------------------------------------------------------------------------------------------------


def test_acceptance_per_token_is_the_one_that_gives_these_positions() -> None:
    """Bug guarded: shares that decline with the position taken for the acceptance of a token, which makes speed-ups small."""
    assert token_acceptance([0.8, 0.64, 0.512, 0.4096]) == pytest.approx(0.8)
    assert token_acceptance([0.0, 0.0]) == 0
    assert token_acceptance([1.0, 1.0, 1.0]) == 1


def test_expected_speed_up_of_a_free_and_of_a_dear_draft() -> None:
    """Bug guarded: a speed-up that forgets the draft's own time; one below 1 where not to draft is best."""
    flat = ((1.0, 0.03), (64.0, 0.03))
    gain, depth = expected_speed_up(0.5, RoundCost.measured(flat, None))
    assert depth == 8
    assert gain == pytest.approx(sum(0.5**j for j in range(9)))
    assert expected_speed_up(0.5, RoundCost.measured(flat, ((1.0, 0.03),))) == (1.0, 0)


def test_the_card_says_how_to_serve_it_and_the_report_names_the_best(tmp_path: Path) -> None:
    """Bug guarded: a card without the folder; the dearest draft named as the fastest."""

    def row(name: str, speed_up: float) -> dict[str, Any]:
        rule = {
            "temperature": 0.0,
            "accepted_share": 0.3,
            "accepted_by_position": [0.5, None],
            "alpha": 0.4,
            "expected_speed_up": speed_up,
            "best_depth": 2,
        }
        return {"name": name, "draft": {}, "cost_ratio": 0.3, "rules": [rule]}

    training = {"curve": [{"agreement": 0.25}], "tokens": 900, "steps": 8, "seconds": 60.0}
    report = make_report(
        make_plan(options(tmp_path, target="my/model"), ()),
        samples={"tokens": 300},
        training=training,
        rows=[row("distilled", 1.1), row("self-int8", 1.4)],
    )
    assert report["best_by_temperature"] == {"0": "self-int8"}
    card = model_card(tmp_path, json.loads(json.dumps(report)))
    assert f"draft: {{source: model, model: {tmp_path}}}" in card
    assert "| distilled | 0.30 | 0 | 30.0% | 50%  - | 40.0% | 1.10 at K=2 |" in card
    report["plan"] |= {"kind": "head", "vocabulary": 8192}
    card = model_card(tmp_path, report)
    assert f"draft: {{source: heads, model: {tmp_path}}}" in card
    assert "8,192 most frequent tokens" in card

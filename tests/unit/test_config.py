"""The configuration tree: what it refuses, and whether the message says what to do."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from engine.build import build_text_beside
from engine.config import OutriderConfig, TargetConfig, cache_folder, load_config, parse_config
from engine.errors import ConfigError

SECTIONS = list(OutriderConfig.model_fields)


def _refusal(data: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_config(data)
    return str(refused.value)


def _section(name: str) -> type[BaseModel]:
    section = OutriderConfig.model_fields[name].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    return section


# --- reading ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, {}])
def test_nothing_gives_the_defaults(data: Any) -> None:
    """Bug guarded: an empty file is an error, or means something else than no file."""
    assert parse_config(data) == OutriderConfig() == load_config(None)


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    """Bug guarded: naming one option of a section resets the others."""
    path = tmp_path / "outrider.yaml"
    path.write_text("target: {model: org/Model, num_gpus: 1}\nspeculation:\n  depth: 3\n", encoding="utf-8")
    config = load_config(path)
    assert (config.target.model, config.target.num_gpus, config.target.dtype) == ("org/Model", 1, "auto")
    assert (config.speculation.depth, config.speculation.rule) == (3, "coupled")
    assert config.api == OutriderConfig().api


def test_a_dumped_configuration_reads_back_equal() -> None:
    """Bug guarded: actors get the configuration as plain data, and a value that does not survive the way changes their
    behaviour."""
    config = parse_config({"draft": {"source": "model", "model": "x"}, "speculation": {"depth": 0}, "lanes": {"max": 3}})
    assert parse_config(config.model_dump()) == config


@pytest.mark.parametrize("data", [[], "target", 3])
def test_anything_but_a_mapping_is_refused(data: Any) -> None:
    """Bug guarded: a YAML list or word ends in a traceback from pydantic."""
    assert "mapping" in _refusal(data)


def test_numbers_as_keys_are_refused() -> None:
    """Bug guarded: YAML reads `1:` as a number, and looking for its nearest name fails with an AttributeError."""
    assert "1" in _refusal({1: 2})
    assert "target.1" in _refusal({"target": {1: 2}})


@pytest.mark.parametrize(
    "content",
    [
        b"target: {model: a",
        b"a: b: c",
        b"target: {}\n---\nlanes: {}",
        b"target: !!python/object:os.system {}",
        b"\tx: 1",
        b"\xff\xfe",
    ],
    ids=["open brace", "two colons", "two documents", "python tag", "tab", "not text"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Bug guarded: a file that is not YAML (or not UTF-8) ends in a traceback that does not say which file it was."""
    path = tmp_path / "outrider.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"outrider\.yaml"):
        load_config(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """Bug guarded: YAML keeps the last of two `target:` sections without a word, so the options of the first are ignored."""
    path = tmp_path / "outrider.yaml"
    path.write_text("target: {model: a}\nlanes: {min: 1}\ntarget: {num_gpus: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="target"):
        load_config(path)


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    """Bug guarded: with several files around, the message does not say which one to open."""
    path = tmp_path / "outrider.yaml"
    path.write_text("api: {port: 0}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"outrider\.yaml: api\.port"):
        load_config(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_an_unreadable_path_is_named(tmp_path: Path, name: str) -> None:
    """Bug guarded: a missing file or a folder ends in an OSError traceback."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / name)


# --- unknown keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "nearest"),
    [
        ({"targt": {}}, "'target'"),
        ({"draft": {"sourse": "none"}}, "'draft.source'"),
        ({"speculation": {"maxdepth": 1}}, "'speculation.max_depth'"),
        ({"lanes": {"max_batches": 1}}, "'lanes.max_batch'"),
        ({"api": {"Port": 1}}, "'api.port'"),
    ],
)
def test_an_unknown_key_names_the_nearest(data: Any, nearest: str) -> None:
    """Bug guarded: a misspelt option is accepted and ignored, or refused without a hint."""
    message = _refusal(data)
    assert "unknown option" in message
    assert f"did you mean {nearest}?" in message


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_without_a_neighbour_lists_what_there_is(section: str) -> None:
    """Bug guarded: the hint looks in the wrong section."""
    message = _refusal({section: {"qqqqqqqq": 1}})
    assert f"unknown option '{section}.qqqqqqqq'" in message
    assert all(name in message for name in _section(section).model_fields)


def test_all_mistakes_are_told_at_once() -> None:
    """Bug guarded: a user has to start the server once per mistake."""
    message = _refusal({"targt": {}, "api": {"port": 0}, "lanes": {"min": 2, "max": 1}})
    assert all(part in message for part in ("targt", "api.port", "lanes.max"))


# --- values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"target": {"dtype": "int4"}}, "target.dtype"),
        ({"target": {"num_gpus": -1}}, "target.num_gpus"),
        ({"target": {"num_threads": 0}}, "target.num_threads"),
        ({"target": {"max_context": 8}}, "target.max_context"),
        ({"target": {"kv_cache_tokens": 100}}, "target.kv_cache_tokens"),
        ({"target": None}, "target"),
        ({"draft": {"source": "modle"}}, "draft.source"),
        ({"draft": {"text": "prose"}}, "draft.text"),
        ({"draft": {"timeout_s": 0}}, "draft.timeout_s"),
        ({"draft": {"source": "suffix", "suffix_shared_tokens": -1}}, "draft.suffix_shared_tokens"),
        ({"draft": {"timeout_s": math.nan}}, "draft.timeout_s"),
        ({"lanes": {"min": 0}}, "lanes.min"),
        ({"lanes": {"max_batch": 0}}, "lanes.max_batch"),
        ({"lanes": {"prefill_tokens": 0}}, "lanes.prefill_tokens"),
        ({"drafts": {"min": -1}}, "drafts.min"),
        ({"drafts": {"max": -1}}, "drafts.max"),
        ({"drafts": {"idle_s": -1}}, "drafts.idle_s"),
        ({"drafts": {"replicas": 2}}, "unknown option 'drafts.replicas'"),
        ({"lanes": {"scale_up_s": -1}}, "lanes.scale_up_s"),
        ({"lanes": {"scale_down_s": -1}}, "lanes.scale_down_s"),
        ({"controller": {"num_gpus": 0}}, "controller.num_gpus"),
        ({"speculation": {"rule": "typical"}}, "speculation.rule"),
        ({"speculation": {"max_depth": 65}}, "speculation.max_depth"),
        ({"speculation": {"max_depth": -1}}, "speculation.max_depth"),
        ({"speculation": {"depth": "deep"}}, "speculation.depth"),
        ({"speculation": {"fan_out": 9}}, "speculation.fan_out"),
        ({"speculation": {"fan_out": -1}}, "speculation.fan_out"),
        ({"speculation": {"fan_out": "wide"}}, "speculation.fan_out"),
        ({"streams": {"tls_cert": 3}}, "streams.tls_cert"),
        ({"speculation": {"ngram_max": 0}}, "speculation.ngram_max"),
        ({"controller": {"report_interval_s": 0}}, "controller.report_interval_s"),
        ({"controller": {"dwell_s": -1}}, "controller.dwell_s"),
        ({"api": {"port": 65536}}, "api.port"),
        ({"api": {"max_waiting": 0}}, "api.max_waiting"),
        ({"api": {"max_body_bytes": 10}}, "api.max_body_bytes"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_by_name(data: Any, named: str) -> None:
    """Bug guarded: a bound that is described but not checked; the server then fails later and elsewhere."""
    assert _refusal(data).startswith(named)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"draft": {"source": "model"}}, "draft.model is missing"),
        ({"target": {"quantization": "int8"}}, "draft.source 'self-int8' is the target itself"),
        ({"draft": {"model": "x"}}, "draft.source is 'self-int8'"),
        ({"draft": {"source": "none", "model": "x"}}, "draft.source is 'none'"),
        (
            {"draft": {"source": "ngram", "suffix_shared_tokens": 4096}},
            "suffix_shared_tokens is set but draft.source is 'ngram'",
        ),
        ({"draft": {"dtype": "bfloat16"}}, "draft.dtype is set but draft.source is 'self-int8'"),
        ({"draft": {"source": "ngram", "dtype": "int8"}}, "draft.dtype is set but draft.source is 'ngram'"),
        ({"draft": {"skip_layers": "auto"}}, "draft.skip_layers is set but draft.source is 'self-int8'"),
        ({"draft": {"source": "layer-skip", "skip_layers": [3, 3]}}, "draft.skip_layers must be auto, or different layers"),
        ({"draft": {"source": "layer-skip", "skip_layers": []}}, "draft.skip_layers must be auto, or different layers"),
        ({"draft": {"source": "layer-skip", "skip_layers": [-1]}}, "draft.skip_layers must be auto, or different layers"),
        (
            {"draft": {"source": "ngram", "window_tokens": 256}},
            "draft.window_tokens is set but draft.source 'ngram' runs no model",
        ),
        ({"draft": {"sink_tokens": 4}}, "draft.sink_tokens is set without draft.window_tokens"),
        ({"draft": {"source": "ngram", "text": "suffix"}}, "set `source: suffix` and remove draft.text"),
        ({"draft": {"source": "none", "text": "ngram"}}, "draft.text 'ngram' stands beside a model"),
        ({"draft": {"text": "ngram", "suffix_shared_tokens": 4096}}, "or `text: suffix` beside a model"),
        ({"draft": {"source": "suffix", "suffix_shared_tokens": 9}}, "suffix_shared_tokens must be 0 or at least 1024, got 9"),
        ({"lanes": {"min": 3, "max": 2}}, "lanes.max (2) is below lanes.min (3)"),
        ({"drafts": {"min": 2}}, "drafts.max (1) is below drafts.min (2)"),
        ({"drafts": {"max": 0}}, "set both to 0"),
        ({"target": {"num_gpus": 1}, "drafts": {"num_gpus": 1}, "controller": {"num_gpus": 1}}, "below the 2 of lanes.min"),
        ({"speculation": {"depth": 9}}, "got 9"),
        ({"speculation": {"depth": -1}}, "got -1"),
        ({"speculation": {"depth": 1, "max_depth": 0}}, "max_depth (0)"),
        ({"streams": {"tls_cert": "a.pem"}}, "streams.tls_key and streams.tls_ca missing"),
        ({"streams": {"tls_cert": "a.pem", "tls_key": "b.pem"}}, "streams.tls_ca missing"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other(data: Any, said: str) -> None:
    """Bug guarded: one of two contradicting options is silently ignored."""
    message = _refusal(data)
    assert said in message
    assert "Value error" not in message


@pytest.mark.parametrize(
    "data",
    [
        {"draft": {"source": "model", "model": "x"}},
        {"lanes": {"min": 2, "max": 2}},
        {"speculation": {"depth": 0, "max_depth": 0}},
        {"speculation": {"depth": 8}},
        {"speculation": {"depth": "auto", "max_depth": 0}},
        {"drafts": {"min": 0}},
        {"drafts": {"min": 0, "max": 0}},
        {"target": {"num_gpus": 1}, "drafts": {"min": 0, "num_gpus": 1}, "controller": {"num_gpus": 1}},
    ],
    ids=str,
)
def test_the_edges_are_accepted(data: Any) -> None:
    """Bug guarded: a validator that also refuses the meaningful edge, such as speculation switched off."""
    assert isinstance(parse_config(data), OutriderConfig)


# --- the tree itself --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_described_and_has_a_default(section: str) -> None:
    """Bug guarded: an option without help text, or one that makes an empty configuration invalid."""
    for name, field in _section(section).model_fields.items():
        assert field.description, f"{section}.{name}"
        assert not field.is_required(), f"{section}.{name}"


@pytest.mark.parametrize("section", ["tree", *SECTIONS])
def test_the_configuration_cannot_be_changed(section: str) -> None:
    """Bug guarded: one part changes the configuration under another."""
    config = OutriderConfig()
    changed: BaseModel = config if section == "tree" else getattr(config, section)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(changed, next(iter(type(changed).model_fields)), None)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"model": "Qwen/Qwen3-32B"}, "Qwen3-32B"),
        ({"model": "/models/tiny.Q4_1.gguf"}, "tiny.Q4_1"),
        ({"model": "smollm2"}, "smollm2"),
        ({"model": "x/y", "name": "mine"}, "mine"),
        ({"model": "/"}, "/"),
    ],
)
def test_the_served_name(target: dict[str, str], name: str) -> None:
    """Bug guarded: clients see a path of the server's disk as the model's name."""
    assert OutriderConfig(target=TargetConfig(**target)).served_model_name == name


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug guarded: an empty variable is taken for a path, so that models land in the working folder."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == tmp_path
    monkeypatch.setenv("OUTRIDER_CACHE", "")
    assert cache_folder() == Path("/elsewhere/outrider")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "outrider"


def test_a_text_source_stands_beside_a_model() -> None:
    """Bug guarded: the option is accepted and ignored, by default or with speculation switched off a source reads all texts."""
    beside = build_text_beside(parse_config({"draft": {"text": "suffix", "suffix_shared_tokens": 4096}}))
    assert beside is not None
    assert beside.name == "suffix"
    assert build_text_beside(parse_config({})) is None
    assert build_text_beside(parse_config({"draft": {"text": "ngram"}, "speculation": {"max_depth": 0}})) is None

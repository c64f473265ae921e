"""`outrider bench engine` counts and compares what it says, on tiny models; no time is judged."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from deployments.bench import engine as bench
from deployments.bench import floor, report
from deployments.bench.arms import Arm, Run, Task, Text, engine_arm, take_turns, warm_up
from deployments.bench.engine import QUICK, batch_task, comparable, model_source, with_source
from deployments.bench.floor import Curve, RoundParts, measure_curve, measure_round_parts, timed_parts
from deployments.bench.peers import Peer
from deployments.bench.plot import check_plot_file, draw_curve
from deployments.bench.report import Measured, greedy_texts_equal, quartiles, summary
from engine.build import LocalEngine
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError
from engine.models import LoadedModel
from engine.propose.ngram import NgramSource
from engine.scheduler import FixedDepth
from engine.testing import model_info
from engine.verify.target import Target

VOCAB = 97
SHORT = Task("code", ((5, 6, 7),), 6)
BATCH = Task("batch", ((5, 6, 7), (8, 9), (10, 11, 12, 13), (14,)), 6)
"""Its first prompt is that of SHORT."""
REQUIRED = (
    "plain_vs_transformers_b1",
    "floor_share_b1",
    "plain_vs_continuous_batching_b16",
    "plain_vs_continuous_batching_b64",
    "verify4_vs_1",
    "verify8_vs_1",
    "ngram_edit_vs_plain",
    "suffix_edit_vs_plain",
    "suffix_agent_vs_plain",
    "suffix_open_vs_plain",
    "self_int8_vs_plain",
    "draft_vs_assisted",
    "python_ms_per_step_b64",
)


class Words:
    """A tokenizer with one token per letter."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % (VOCAB - 3) for letter in text]


def tiny_model() -> LoadedModel:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        name="tiny",
        tokenizer=Words(),
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=160,
        fingerprint="tiny",
        model=model,
        dtype=torch.float32,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    """One for all tests, as one target is for all arms."""
    loaded = tiny_model()
    target = Target(loaded, kv_capacity_tokens=8192, prefix_cache=False)
    return LocalEngine(target, None, loaded, comparable(OutriderConfig()))


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setattr("deployments.bench.peers.load_model", lambda *_, **__: tiny_model())
    return Peer(OutriderConfig())


def fake_arm(name: str, batch: int = 1, answer: Callable[[Task], Run] | None = None, is_peer: bool = False) -> Arm:
    return Arm(name, batch, answer or (lambda task: Run(1, 1.0)), is_peer)


def ran(name: str, seconds: dict[str, float], batch: int = 1, texts: tuple[Text, ...] = (), is_peer: bool = False) -> Arm:
    """An arm that made 60 tokens for a task of each kind."""
    arm = fake_arm(name, batch, is_peer=is_peer)
    for kind, time_s in seconds.items():
        arm.runs.append((Task(kind, ((1,),), 6), Run(60, time_s, texts, decode_s=(time_s / 60,))))
    return arm


def measured(*arms: Arm, **changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "info": model_info(step_times=((1, 0.02),)),
        "cost_ratio": 0.5,
        "source": "self-int8",
        "threads": 2,
        "weight_bytes": 1000,
        "arms": list(arms),
        "bandwidths": [1000.0] * len(arms[0].runs),
        "curve": Curve(8, (1, 4, 8), [[1.0, 1.2, 1.6], [2.0, 2.6, 3.6], [1.0, 1.1, 1.5]], [[0.9, 1.0, 1.5]] * 3),
        "round_parts": [RoundParts(0.1, 0.08, 0.01), RoundParts(0.2, 0.17, 0.01), RoundParts(0.1, 0.09, 0.005)],
    }
    return Measured(**{**fields, **changes})


# --- arms -------------------------------------------------------------------------------------------------------------------


def test_arms_take_turns_within_every_task() -> None:
    """Bug guarded: one arm answers all tasks before the next begins, or always runs after the same neighbour."""
    order: list[str] = []
    arms = [fake_arm(name, answer=lambda task, name=name: order.append(name) or Run(1, 1.0)) for name in "abc"]  # type: ignore[misc]
    take_turns(arms, [SHORT] * 4, lambda arm, task: None)
    assert "".join(order) == "abcbcacababc"
    assert [len(arm.runs) for arm in arms] == [4, 4, 4]


def test_warming_up_leaves_no_runs() -> None:
    """Bug guarded: the slow first answer counts."""
    arm = fake_arm("a")
    warm_up([arm], SHORT, lambda arm, task: None)
    assert arm.runs == []


def test_a_peer_that_fails_is_left_out_with_its_reason_and_ours_is_not() -> None:
    """Bug guarded: a peer that cannot run on this device ends the benchmark; an own failure goes unseen; half of a peer's runs
    are compared with other tasks than theirs."""
    answers = iter([Run(1, 1.0)])

    def breaks(task: Task) -> Run:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("no kernel\n here") from None

    peer = fake_arm("peer", answer=breaks, is_peer=True)
    take_turns([peer], [SHORT] * 3, lambda arm, task: None)
    assert (peer.runs, peer.failure) == ([], "RuntimeError: no kernel here")
    with pytest.raises(RuntimeError, match="no kernel"):
        take_turns([fake_arm("own", answer=breaks)], [SHORT], lambda arm, task: None)


def test_engine_arms_give_one_text_and_leave_nothing_behind(engine: LocalEngine) -> None:
    """Bug guarded: sequences of one arm stay in the KV cache that all arms share; texts end early or change places; a draft
    changes a text."""
    drafted = LocalEngine(engine.target, NgramSource(max_ngram=3), engine.loaded, engine._config)
    arms = [engine_arm("plain", 1, engine), engine_arm("ngram", 1, drafted, FixedDepth(3)), engine_arm("plain", 4, engine)]
    for arm, task in zip(arms, (SHORT, SHORT, BATCH), strict=True):
        free = engine.target.model.cache.pool.num_free
        take_turns([arm], [task, task], lambda arm, task: None)
        assert engine.target.model.cache.pool.num_free == free
        for _, run in arm.runs:
            assert run.num_tokens == 6 * task.batch
            assert 0 < len(run.decode_s) <= 6
            assert sum(run.decode_s) < run.seconds
    texts = [arm.runs[0][1].texts for arm in arms]
    assert texts[0] == texts[1] == texts[2][:1]
    assert len(set(texts[2])) > 1
    assert greedy_texts_equal(arms)
    assert arms[1].runs[0][1].rounds <= arms[0].runs[0][1].rounds == 6


# --- peers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "padded", "prompt lookup", "continuous"])
def test_peers_write_the_same_texts_as_the_engine(kind: str, peer: Peer, engine: LocalEngine) -> None:
    """Bug guarded: wrong padding or masks, a text that stops at its end or is sampled, results of continuous batching in
    another order: a peer that does less work than the engine."""
    arms = {
        "plain": (peer.plain(1), SHORT),
        "padded": (peer.plain(4), BATCH),
        "prompt lookup": (peer.assisted(), SHORT),
        "continuous": (peer.continuous(4, max_batch=8, max_length=64), BATCH),
    }
    arm, task = arms[kind]
    run = arm.play(task)
    assert arm.failure is None
    assert run is not None
    assert run.texts == engine_arm("plain", task.batch, engine).answer(task).texts


def test_assisted_generation_takes_the_configured_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a named draft is held against prompt lookup."""
    loaded: list[str] = []

    def load(name: str, **_: Any) -> LoadedModel:
        loaded.append(name)
        return tiny_model()

    monkeypatch.setattr("deployments.bench.peers.load_model", load)
    config = parse_config({"target": {"model": "big"}, "draft": {"source": "model", "model": "small"}})
    arm = Peer(config).assisted()
    assert (arm.name, loaded) == ("transformers assisted", ["big", "small"])
    assert arm.play(SHORT) is not None, arm.failure


def test_bytes_of_a_step(peer: Peer) -> None:
    """Bug guarded: an embedding of which a step reads one row counts in full, or a tied head does not count."""
    total = sum(p.numel() * 4 for p in peer.model.parameters())
    assert peer.bytes_per_step == total - VOCAB * 32 * 4
    peer.model.lm_head.weight = peer.model.model.embed_tokens.weight
    assert peer.bytes_per_step == total - VOCAB * 32 * 4
    peer.model.config.num_experts = 4
    assert peer.bytes_per_step is None


# --- steps ------------------------------------------------------------------------------------------------------------------


def test_curve_times_the_sizes_it_names(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: steps that grow the context, or compute other numbers of tokens than they are listed under."""
    computed: list[tuple[int, int]] = []
    forward = engine.target.model.forward

    def recording(chunks: Any) -> torch.Tensor:
        computed.append((len(chunks[0].sequence.ids), len(chunks[0].ids)))
        return forward(chunks)

    monkeypatch.setattr(engine.target.model, "forward", recording)
    sweeps: list[None] = []
    curve = measure_curve(engine, 2, lambda: sweeps.append(None))
    assert curve.sizes == floor.SIZES
    assert curve.context == 96  # of the 160 tokens that the model holds
    assert computed == [(0, 96), *[(96, size) for size in floor.SIZES] * 3]
    assert len(sweeps) == len(curve.verify_s) == len(curve.forward_s) == 2
    assert all(f < v for fs, vs in zip(curve.forward_s, curve.verify_s, strict=True) for f, v in zip(fs, vs, strict=True))
    assert len(curve.ratios(4)) == 2
    assert curve.ratios(5) == []
    assert engine.target.model.cache.pool.num_free == engine.target.model.cache.pool.num_blocks


def test_round_parts_are_those_of_full_decoding_rounds(engine: LocalEngine) -> None:
    """Bug guarded: prefill rounds among them; a forward or a sampling that is not seen; instruments left in place."""
    forward = engine.target.model.forward
    parts = measure_round_parts(engine, 5, batch=3)
    assert len(parts) == 5
    assert all(0 < part.sampling_s < part.outside_s < part.round_s for part in parts)
    assert all(0 < part.forward_s < part.round_s for part in parts)
    assert engine.target.model.forward == forward
    with timed_parts(engine) as seen:
        engine_arm("plain", 1, engine).answer(SHORT)
    before = (seen.forward_s, seen.sampling_s)
    engine_arm("plain", 1, engine).answer(SHORT)
    assert (seen.forward_s, seen.sampling_s) == before


def test_bandwidth_reads_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: bytes counted as numbers."""
    monkeypatch.setitem(floor.READ_BYTES, "cpu", 2**20)
    bandwidth = floor.Bandwidth(torch.device("cpu"))
    assert bandwidth._matrix.numel() * 4 == 2**20
    times = iter(range(1000))
    monkeypatch.setattr(floor.time, "perf_counter", lambda: next(times))
    assert bandwidth.sample() == 2**20  # every pass took one second


# --- report -----------------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_of_pairs() -> None:
    """Bug guarded: ratios of medians, of other kinds, upside down, or against another arm."""
    kinds = ("code", "editing", "open")
    arms = (
        ran("plain", dict(zip(kinds, (1.0, 2.0, 4.0), strict=True))),
        ran("ngram auto", dict(zip(kinds, (1.0, 0.5, 4.0), strict=True))),
        ran("suffix auto", dict(zip(kinds, (1.0, 0.8, 5.0), strict=True))),
        ran("self-int8 auto", dict(zip(kinds, (0.5, 1.0, 4.0), strict=True))),
        ran("transformers", dict(zip(kinds, (2.0, 2.0, 12.0), strict=True)), is_peer=True),
        ran("transformers prompt lookup", dict(zip(kinds, (1.0, 1.5, 4.0), strict=True)), is_peer=True),
        ran("plain", {"batch": 1.0}, batch=16),
        ran("transformers continuous batching", {"batch": 3.0}, batch=16, is_peer=True),
        fake_arm("transformers continuous batching", 64, is_peer=True),
    )
    arms[-1].failure = "RuntimeError: no kernel"
    result = summary(measured(*arms), quick=True)
    json.dumps(result, allow_nan=False)
    assert set(REQUIRED) <= set(result["ratios"]) == set(result["spread"])
    assert {name: result["ratios"][name] for name in REQUIRED} == {
        "plain_vs_transformers_b1": 2.0,
        "floor_share_b1": 30.0,  # 1000 bytes at 1000 bytes/s, in rounds of 1/60, 2/60 and 4/60 s
        "plain_vs_continuous_batching_b16": 3.0,
        "plain_vs_continuous_batching_b64": None,
        "verify4_vs_1": 1.2,
        "verify8_vs_1": 1.6,
        "ngram_edit_vs_plain": 4.0,
        "suffix_edit_vs_plain": 2.5,
        "suffix_agent_vs_plain": None,
        "suffix_open_vs_plain": 0.8,
        "self_int8_vs_plain": 2.0,
        "draft_vs_assisted": 1.5,
        "python_ms_per_step_b64": 20.0,
    }
    assert result["spread"]["plain_vs_transformers_b1"] == [1.5, 2.5]
    assert result["spread"]["plain_vs_continuous_batching_b64"] is None
    assert result["cost_ratio"] == 0.5
    assert result["arms"][-1] == {
        "arm": "transformers continuous batching",
        "batch": 64,
        "tokens_per_s": None,
        "reason": "RuntimeError: no kernel",
    }
    assert result["arms"][0] == {"arm": "plain", "batch": 1, "tokens_per_s": 30.0}


def test_a_choice_is_held_against_the_best_source_of_each_kind() -> None:
    """Bug guarded: the choice is compared with one source for all kinds, with one that it does not have, or with itself."""
    kinds = ("code", "editing", "open")
    arms = (
        ran("plain", dict.fromkeys(kinds, 9.0)),
        ran("ngram auto", dict.fromkeys(kinds, 0.1)),
        ran("suffix auto", dict(zip(kinds, (4.0, 1.0, 4.0), strict=True))),
        ran("self-int8 auto", dict(zip(kinds, (2.0, 2.0, 2.0), strict=True))),
        ran("self-int8+suffix auto", dict(zip(kinds, (2.0, 1.25, 1.6), strict=True))),
    )
    result = summary(measured(*arms), quick=True)
    assert result["ratios"]["choice_vs_best_source"] == 1.0
    assert result["spread"]["choice_vs_best_source"] == [0.9, 1.125]
    assert result["ratios"]["self-int8+suffix auto vs plain"] == 5.625
    assert "choice_vs_best_source" not in summary(measured(*arms[:4]), quick=True)["ratios"]


def test_the_configured_draft_is_held_against_assisted_generation() -> None:
    """Bug guarded: the int8 copy's figure under the name of another draft."""
    arms = (
        ran("plain", {"code": 1.0}),
        ran("self-int8 auto", {"code": 0.5}),
        ran("model auto", {"code": 0.25}),
        ran("transformers assisted", {"code": 1.0}, is_peer=True),
    )
    assert summary(measured(*arms, source="model"), quick=True)["ratios"]["draft_vs_assisted"] == 4.0
    assert summary(measured(*arms, source="none"), quick=True)["ratios"]["draft_vs_assisted"] is None


def test_texts_are_compared_over_all_own_arms() -> None:
    """Bug guarded: a difference that goes unseen in a batch; peers, whose kernels are others, that raise an alarm."""
    same, other = ((1, 2),), ((1, 3),)
    plain = ran("plain", {"code": 1.0}, texts=same)
    assert greedy_texts_equal([plain, ran("ngram auto", {"code": 1.0}, texts=same), ran("http off", {"code": 1.0})])
    assert not greedy_texts_equal([plain, ran("plain", {"batch": 1.0}, batch=4, texts=other)])
    assert greedy_texts_equal([plain, ran("transformers", {"code": 1.0}, texts=other, is_peer=True)])


def test_quartiles() -> None:
    """Bug guarded: quartiles of two values that lie outside them; a failure on one value."""
    assert quartiles([]) is None
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 3.0]) == (1.5, 2.0, 2.5)


def test_tables_show_what_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a table that fails on what is missing, or hides why."""
    from rich.console import Console

    broken = fake_arm("transformers continuous batching", 64, is_peer=True)
    broken.failure = "RuntimeError: no kernel"
    plain = ran("plain", {"code": 1.0}, texts=((1, 2),))
    differing = ran("plain", {"batch": 1.0}, batch=4, texts=((1, 3),))
    result = summary(measured(plain, differing, broken, weight_bytes=None), quick=False)
    report.print_tables(result, Console(width=200))
    shown = capsys.readouterr().out
    assert "not run: RuntimeError: no kernel" in shown
    assert "greedy texts differ" in shown


# --- command ----------------------------------------------------------------------------------------------------------------


def test_every_arm_computes_every_token() -> None:
    """Bug guarded: a prefix cache that helps one side; batches that wait because fewer requests may run; a fixed depth under
    the name "auto"; a named draft kept by sources that have none."""
    given = parse_config(
        {
            "target": {"prefix_cache": True},
            "lanes": {"max_batch": 2},
            "api": {"max_waiting": 1},
            "speculation": {"depth": 3},
            "draft": {"source": "model", "model": "small"},
        }
    )
    config = comparable(given)
    assert not config.target.prefix_cache
    assert (config.lanes.max_batch, config.api.max_waiting, config.speculation.depth) == (64, 64, "auto")
    assert with_source(config, "ngram").draft.model is None
    assert with_source(config, "model").draft.model == "small"
    shared = parse_config({"draft": {"source": "suffix", "suffix_shared_tokens": 4096}})
    assert [with_source(shared, name).draft.suffix_shared_tokens for name in ("ngram", "suffix")] == [0, 4096]


def test_the_model_source_is_the_configured_one_with_its_options() -> None:
    """Bug guarded: `bench engine` measures the int8 copy where layers are left out, or hands a window to n-gram lookup."""
    config = parse_config({"draft": {"source": "layer-skip", "skip_layers": [3], "window_tokens": 64, "sink_tokens": 0}})
    assert model_source(config) == "layer-skip"
    assert with_source(config, "layer-skip").draft == config.draft
    assert with_source(config, "ngram").draft.window_tokens is None
    assert model_source(parse_config({"draft": {"source": "ngram"}})) == "self-int8"


def test_batches_are_made_of_different_prompts(engine: LocalEngine) -> None:
    """Bug guarded: equal prompts, which a prefix cache of a peer would compute once; batches that cannot be compared."""
    large, small = batch_task(engine, 64, QUICK), batch_task(engine, 4, QUICK)
    assert len(set(large.prompts)) == 64
    assert {len(prompt) for prompt in large.prompts} == {QUICK.batch_prompt}
    assert small.prompts == large.prompts[:4]


def test_bad_plot_files_are_told_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: twenty minutes of measuring that end in an error about a file name."""
    check_plot_file(tmp_path / "curve.svg")
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        check_plot_file(tmp_path / "curve.pdf")
    with pytest.raises(ConfigError, match="does not exist"):
        check_plot_file(tmp_path / "nowhere" / "curve.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[plots\]'"):
        check_plot_file(tmp_path / "curve.png")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(suffix: str, tmp_path: Path) -> None:
    """Bug guarded: a plot that fails after everything was measured, with and without a floor."""
    rows = [{"tokens": size, "verify_ms": 10.0 + size, "forward_ms": 9.0 + size} for size in (1, 2, 64)]
    for floor_ms in (None, 9.5):
        path = tmp_path / f"curve{suffix}"
        draw_curve(path, rows, floor_ms, "tiny")
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    from deployments import cli

    seen: dict[str, Any] = {}
    monkeypatch.setattr("deployments.bench.engine.run_bench_engine", lambda config, **options: seen.update(options) or 0)
    assert cli.main(["bench", "engine", "--quick", "--json", "--no-http", "--batches", "16,4", "--plot", "curve.png"]) == 0
    assert seen == {"quick": True, "as_json": True, "over_http": False, "batches": (4, 16), "plot": Path("curve.png")}
    assert cli.main(["bench", "engine"]) == 0
    assert seen == {"quick": False, "as_json": False, "over_http": True, "batches": (4, 16, 64), "plot": None}
    assert cli.main(["bench", "engine", "--batches", "none"]) == 0
    assert seen["batches"] == ()
    with pytest.raises(SystemExit):
        cli.main(["bench", "engine", "--batches", "8"])


def test_heads_are_a_source_with_and_without_a_text_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a target whose drafts come from its own heads cannot be measured, for they are no model to load."""
    target, tokenizer = SimpleNamespace(heads=object(), info=None), SimpleNamespace(tokenizer=None)
    monkeypatch.setattr(bench, "preflight", lambda config: tokenizer)
    monkeypatch.setattr(bench, "build_target", lambda config: target)
    engines = bench.build_engines(parse_config({"draft": {"source": "heads", "model": "a-head"}}))
    assert list(engines) == ["none", "ngram", "suffix", "heads", "heads+suffix"]
    assert engines["heads"].source is engines["heads+suffix"].source is target.heads
    assert engines["none"].source is None
    assert engines["ngram"].source_name == "ngram"

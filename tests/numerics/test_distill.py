"""Making drafts, on models of a few thousand weights: what is learned, what a killed run becomes, what the folder is worth."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from tiny_models import VOCAB, plain_logits, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from deployments.cli import EXIT_OK, EXIT_USAGE, main
from deployments.distill import acceptance, command, sample
from deployments.distill.plan import SAMPLES, DistillOptions, make_plan
from deployments.distill.sample import Sampler
from deployments.distill.states import StateWriter
from engine import build, calibrate
from engine import models as engine_models
from engine.build import LocalEngine, build_local_engine
from engine.distill import checkpoints, draft_student, states, train
from engine.distill.checkpoints import KEPT, checkpoint_steps, save_checkpoint
from engine.distill.draft_student import DraftStudent, _inherit, chosen_layers, student_config
from engine.distill.head_student import NUM_STEPS, STEP_WEIGHT, Drafts, HeadStudent, check_fits, most_frequent
from engine.distill.schedule import Budget
from engine.distill.shards import TOP_K, Text, stored_texts, write_shard
from engine.distill.states import read_states, with_states, write_states
from engine.distill.student import CROSS_ENTROPY_WEIGHT, Batch, Said, Student, distillation_loss
from engine.distill.train import Recipe, Trainer
from engine.errors import ConfigError, OutriderError
from engine.models import LoadedModel, load_model, load_tokenizer
from engine.propose.heads import eagle
from engine.propose.heads.eagle import EagleHead
from engine.types import TokenLogprob
from engine.verify.target import Target

CPU = torch.device("cpu")
NUM_TEXTS, PROMPT, LENGTH = 48, 4, 24
EVALUATIONS = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints come with evaluations: with twenty of them there would be no step between two in runs as short as these."""
    monkeypatch.setattr(train, "NUM_EVALUATIONS", EVALUATIONS)


class Killed(Exception):
    """Stands for a signal."""


def tiny_target() -> LoadedModel:
    return tiny_model("llama", initializer_range=0.1)


def texts_of(target: LoadedModel, count: int = NUM_TEXTS) -> list[Text]:
    """Texts that the target wrote at temperature 1, with its likeliest tokens."""
    ids = torch.randint(3, VOCAB, (count, PROMPT))
    top: list[Any] = []
    with torch.inference_mode():
        for _ in range(LENGTH - PROMPT):
            logprobs = torch.log_softmax(target.model(input_ids=ids, use_cache=False).logits[:, -1].float(), dim=-1)
            top.append(logprobs.topk(TOP_K))
            ids = torch.cat([ids, torch.multinomial(logprobs.exp(), 1)], dim=1)
    return [
        Text.of(
            ids[row, :PROMPT].tolist(),
            [
                TokenLogprob(
                    int(ids[row, PROMPT + step]),
                    0.0,
                    tuple(zip(found.indices[row].tolist(), found.values[row].tolist(), strict=True)),
                )
                for step, found in enumerate(top)
            ],
        )
        for row in range(count)
    ]


def student_of(target: LoadedModel, **changes: Any) -> DraftStudent:
    return DraftStudent.build(target, **{"layers": 2, "hidden": None, "dtype": torch.float32, "seed": 0, **changes})


def trainer(target: LoadedModel, texts: list[Text], folder: Path, steps: int = 40) -> Trainer:
    recipe = Recipe(Budget(steps=steps), learning_rate=3e-3, batch_texts=8, part_texts=3, seed=1)
    return Trainer(student_of(target), texts[8:], texts[:8], recipe, folder)


def weights(trained: Trainer) -> dict[str, torch.Tensor]:
    return weights_of(trained.student)


def weights_of(student: Student) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in student.module.state_dict().items()}


# --- loss -------------------------------------------------------------------------------------------------------------------


def said(target: torch.Tensor, next_ids: list[int], k: int) -> Said:
    """Rows whose target distribution is ``target`` [N, V], known at its k likeliest tokens."""
    top = torch.log_softmax(target, dim=-1).topk(k)
    return Said(torch.tensor(next_ids), top.indices, top.values)


@pytest.mark.parametrize("k", [5, 12])
def test_loss_is_the_divergence_over_top_tokens_and_the_rest(k: int) -> None:
    """Bug guarded: a rest that is forgotten, so that the student gains by moving probability out of the top tokens."""
    ours, theirs, next_ids = torch.randn(3, 12), 2 * torch.randn(3, 12), [1, 7, 11]
    losses = distillation_loss(ours, said(theirs, next_ids, k))
    p, q = torch.softmax(theirs.double(), dim=-1), torch.softmax(ours.double(), dim=-1)
    order = p.argsort(dim=-1, descending=True)
    p, ordered = p.gather(1, order), q.gather(1, order)
    divergence = (p[:, :k] * (p[:, :k] / ordered[:, :k]).log()).sum()
    if k < 12:
        p_rest, q_rest = p[:, k:].sum(dim=1), ordered[:, k:].sum(dim=1)
        divergence += (p_rest * (p_rest / q_rest).log()).sum()
    cross_entropy = -q[torch.arange(3), torch.tensor(next_ids)].log().sum()
    assert losses.divergence == pytest.approx(float(divergence), rel=1e-4)
    assert float(losses.total) == pytest.approx(float(divergence + CROSS_ENTROPY_WEIGHT * cross_entropy), rel=1e-4)
    assert losses.agreement == float((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    assert losses.overlap == pytest.approx(float(torch.minimum(p[:, :k], ordered[:, :k]).sum()), rel=1e-4)


def test_impossible_filler_changes_nothing() -> None:
    """Bug guarded: NaN gradients from tokens of probability 0, which a vocabulary below the stored number is filled up with."""
    logits = torch.randn(2, 6, requires_grad=True)
    full = said(torch.randn(2, 6), [0, 1], 6)
    filled = Said(
        full.next_ids,
        torch.cat([full.top_ids, torch.zeros(2, 3, dtype=torch.long)], dim=1),
        torch.cat([full.top_logprobs, torch.full((2, 3), -torch.inf)], dim=1),
    )
    ours, theirs = (float(distillation_loss(logits, one).total.detach()) for one in (filled, full))
    assert ours == pytest.approx(theirs)
    distillation_loss(logits, filled).total.backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_rows_of_a_batch_are_those_before_what_the_target_wrote() -> None:
    """Bug guarded: off by one, where the student sees the token that it is to foresee, or filling that shifts the texts."""
    long, short = (
        Text.of(prompt, [TokenLogprob(token, 0.0, ((token, -0.1),)) for token in output])
        for prompt, output in (((5, 6, 7), (8, 9)), ((10,), (11,)))
    )
    packed = Batch.of([short, long], CPU)
    assert packed.ids.tolist() == [[10, 11, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert packed.ids.flatten()[packed.rows].tolist() == [10, 7, 8]
    assert packed.said.next_ids.tolist() == packed.said.top_ids[:, 0].tolist() == [11, 8, 9]


# --- student ----------------------------------------------------------------------------------------------------------------


def test_a_student_of_the_same_width_is_made_of_the_target() -> None:
    """Bug guarded: a random start, which costs millions of tokens; an embedding that is trained away from the target's."""
    target = tiny_target()
    model: Any = student_of(target).module
    assert chosen_layers(2, 3) == [0, 2]
    for own, index in zip(model.model.layers, (0, 2), strict=True):
        theirs = dict(target.model.model.layers[index].named_parameters())
        assert all(torch.equal(parameter, theirs[name]) for name, parameter in own.named_parameters())
    assert torch.equal(model.lm_head.weight, target.model.lm_head.weight)
    assert not model.lm_head.weight.requires_grad
    assert not model.model.embed_tokens.weight.requires_grad
    assert all(parameter.requires_grad for parameter in model.model.layers.parameters())


def test_all_layers_would_be_the_target_itself() -> None:
    """Bug guarded: parts copied to the wrong place, norms or rotary settings that are not the target's."""
    target = tiny_target()
    config = student_config(target.config, layers=2, hidden=None)
    config.num_hidden_layers = 3
    model = transformers.LlamaForCausalLM(config).eval()
    _inherit(model, target.model, config)
    ids = list(range(3, 20))
    torch.testing.assert_close(plain_logits(model, ids), plain_logits(target.model, ids))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2"])
def test_a_narrower_student_of_any_family_learns_its_embedding(family: str) -> None:
    """Bug guarded: widths that no head divides; families whose configuration names its fields otherwise."""
    target = tiny_model(family)
    student = student_of(target, layers=1, hidden=16)
    losses = student.loss(texts_of(target, 2))
    losses.total.backward()
    embedding: Any = student.module.get_input_embeddings().weight  # type: ignore[operator]
    assert embedding.shape == (VOCAB, 16)
    assert embedding.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"layers": 3}, "--layers 3"), ({"hidden": 20}, "--hidden 20"), ({"hidden": 64}, "--hidden 64")],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    """Bug guarded: a draft as deep as its target, or a traceback about shapes of tensors."""
    with pytest.raises(ConfigError, match=message):
        student_config(tiny_target().config, **{"layers": 2, "hidden": None, **changes})


# --- training ---------------------------------------------------------------------------------------------------------------


def test_training_makes_the_student_agree_with_its_target(tmp_path: Path) -> None:
    """Bug guarded: gradients that do not arrive, or a curve that measures the texts that were learned."""
    target = tiny_target()
    curve = trainer(target, texts_of(target), tmp_path).run().curve
    assert curve[-1]["divergence"] < 0.7 * curve[0]["divergence"]
    assert curve[-1]["agreement"] > curve[0]["agreement"]
    assert curve[-1]["trained_tokens"] == 40 * 8 * (LENGTH - PROMPT)


@pytest.mark.parametrize("kill_after", [1, 7])
def test_a_killed_run_goes_on_to_the_same_bits(kill_after: int, tmp_path: Path) -> None:
    """Bug guarded: an optimizer, a learning rate or an order of texts that begins anew where the run goes on. Killed between
    two checkpoints: the steps since the last one are done again, and before the first one: all of them.
    """
    target = tiny_target()
    texts = texts_of(target)
    whole = trainer(target, texts, tmp_path / "whole", steps=16)
    expected = whole.run()

    def kill(state: Any, progress: float, loss: float) -> None:
        if state.step == kill_after:
            raise Killed

    with pytest.raises(Killed):
        trainer(target, texts, tmp_path / "killed", steps=16).run(kill)
    second = trainer(target, texts, tmp_path / "killed", steps=16)
    assert second.resume() is (kill_after >= 16 // EVALUATIONS)
    found = second.run()
    for row in (*expected.curve, *found.curve):
        del row["seconds"]
    assert found.curve == expected.curve
    ours, theirs = weights(second), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_best_and_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    """Bug guarded: a disk that fills up, or an overfitted end that has replaced the best weights."""
    module = torch.nn.Linear(2, 2)
    for step in range(1, 8):
        save_checkpoint(tmp_path, step, module, {"step": step}, best_step=2 if step > 1 else 1)
    assert checkpoint_steps(tmp_path) == [2, *range(8 - KEPT, 8)]


def test_the_student_ends_with_its_best_weights(tmp_path: Path) -> None:
    """Bug guarded: the last weights of a run that had begun to learn its texts by heart are served."""
    target = tiny_target()
    texts = texts_of(target)
    trained = trainer(target, texts, tmp_path, steps=8)
    trained.state.curve.append({"step": 0, "divergence": 1e9})
    scores = iter([3.0, 1.0, 2.0, 2.0])
    best: dict[str, torch.Tensor] = {}

    def evaluate() -> None:
        trained.state.curve.append({"step": trained.state.step, "divergence": next(scores)})
        if trained.state.step == 4:
            best.update(weights(trained))

    trained._evaluate = evaluate  # type: ignore[method-assign]
    assert trained.run().best_step == 4
    assert all(torch.equal(tensor, best[name]) for name, tensor in weights(trained).items())


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    """Bug guarded: a traceback instead of which folder to delete."""
    target = tiny_target()
    texts = texts_of(target, 16)
    trainer(target, texts, tmp_path, steps=1).run()
    (tmp_path / "step-0000001" / "state.pt").write_bytes(b"nothing")
    with pytest.raises(OutriderError, match="step-0000001 is damaged"):
        trainer(target, texts, tmp_path, steps=1).resume()


def _full(*arguments: Any, **keywords: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def _full_for_torch(*arguments: Any) -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nC++ stack")


@pytest.mark.parametrize(
    ("module", "write"),
    [
        (states, lambda folder: write_states(folder, 0, [torch.zeros(2, 6)])),
        (checkpoints, lambda folder: save_checkpoint(folder, 1, torch.nn.Linear(2, 2), {}, best_step=1)),
        (draft_student, lambda folder: student_of(tiny_target()).save(folder)),
        (eagle, lambda folder: head_of(tiny_target()).save(folder)),
    ],
    ids=["states", "checkpoint", "draft", "head"],
)
def test_a_full_disk_is_an_error_of_the_disk(
    module: Any, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a traceback after hours, because safetensors does not raise the system's error."""
    monkeypatch.setattr(module, "save_file", _full)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path)


def test_a_full_disk_ends_a_training_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a traceback of the optimizer's state, which torch writes and raises RuntimeError for."""
    target = tiny_target()
    monkeypatch.setattr(torch, "save", _full_for_torch)
    with pytest.raises(OutriderError, match=r"--out: cannot write a checkpoint to .* 704 vs 598; is the disk full\?$"):
        trainer(target, texts_of(target, 16), tmp_path, steps=1).run()


# --- a head -----------------------------------------------------------------------------------------------------------------

HEAD_IDS = list(range(2, VOCAB, 2))


@pytest.fixture
def _no_time_for_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models measure themselves for seconds when they load."""
    monkeypatch.setattr("engine.verify.ragged.STEP_BUDGET_S", 0.0)


def texts_with_states(folder: Path, count: int = NUM_TEXTS) -> list[Text]:
    """Texts whose hidden states lie in ``folder``, as the command stores them. Takes a target of its own over."""
    texts = texts_of(tiny_target(), count)
    target = Target(tiny_target(), kernels="torch", prefix_cache=False, hidden_layers=(1, 2, 3), kv_capacity_tokens=2048)
    StateWriter(target, folder).shard(0, texts)
    return with_states(folder, 0, texts)


def head_of(target: LoadedModel) -> HeadStudent:
    return HeadStudent.build(target, draft_ids=HEAD_IDS, dtype=torch.float32, seed=0)


def test_a_target_that_no_head_fits_is_refused() -> None:
    """Bug guarded: a traceback about a missing field after hours of sampling."""
    with pytest.raises(ConfigError, match=r"--target mine: no head can be made for this kind of model .*: use --kind draft"):
        check_fits(tiny_model("gpt2").config, "mine")
    check_fits(tiny_target().config, "mine")


@pytest.mark.usefixtures("_no_time_for_step_times")
def test_stored_states_are_those_of_the_texts(tmp_path: Path) -> None:
    """Bug guarded: rows of the neighbour in the file, states before the wrong layer, rows that a prefix cache has left out."""
    target = tiny_target()
    for text in texts_with_states(tmp_path, 5):
        with torch.inference_mode():
            ids = torch.from_numpy(text.tokens).long()[None]
            states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        # The last one of transformers' has gone through the final norm.
        torch.testing.assert_close(read_states(text)[:, : 2 * states[0].shape[-1]], torch.cat(states[1:3], dim=-1)[0])


@pytest.mark.usefixtures("_no_time_for_step_times")
def test_states_of_other_texts_are_refused(tmp_path: Path) -> None:
    """Bug guarded: a head that learns from the states of texts that have been sampled anew since."""
    texts = texts_with_states(tmp_path, 3)
    with pytest.raises(OutriderError, match=r"states-00000.safetensors is damaged .*: delete it"):
        with_states(tmp_path, 0, texts[:2])


@pytest.mark.usefixtures("_no_time_for_step_times")
def test_training_sees_what_drafting_computes(tmp_path: Path) -> None:
    """Bug guarded: later tokens trained on keys that are not there when the head drafts, or on rows of another draft or text.

    The reference is a draft as it is served: the rows of the text, then rows of the head's own hidden states, one text.
    """
    texts = texts_with_states(tmp_path, 3)
    short = texts[1]
    cut = PROMPT + 5
    texts[1] = Text(short.tokens[:cut], PROMPT, short.top_ids[:5], short.top_logprobs[:5], short.states)
    student = head_of(tiny_target())
    head: Any = student.module
    for parameter in head.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    expected, rows = torch.zeros(NUM_STEPS), [0] * NUM_STEPS
    with torch.inference_mode():
        for text in texts:
            ids, states = torch.from_numpy(text.tokens).long(), read_states(text)
            for start in range(PROMPT - 2, len(ids) - 2):
                hidden = head.fuse(states[: start + 1])
                for step in range(min(NUM_STEPS, len(ids) - 2 - start)):
                    last = start + step
                    out = head(ids[1 : last + 2], hidden, torch.arange(last + 1))[-1:]
                    number = last + 2 - PROMPT
                    told = Said.of([text]).at(torch.tensor([number]))
                    expected[step] += distillation_loss(head.logits(out), student._cut(told)).total
                    rows[step] += 1
                    hidden = torch.cat((hidden, out))
        losses = student.loss(texts)
    weights_ = torch.tensor([STEP_WEIGHT**step for step in range(NUM_STEPS)])
    torch.testing.assert_close(losses.total, (expected * weights_).sum() / weights_.sum(), rtol=1e-4, atol=1e-4)
    assert [count for _, count in losses.agreement_by_step] == rows


def test_a_draft_begins_where_the_target_wrote_what_comes_out(tmp_path: Path) -> None:
    """Bug guarded: off by one, where the head sees the token that it is to foresee; prompts of one token, before which no draft
    can begin.
    """
    texts = [
        Text.of((5, 6, 7), [TokenLogprob(token, 0.0, ((token, -0.1),)) for token in (8, 9)]),
        Text.of((10,), [TokenLogprob(token, 0.0, ((token, -0.1),)) for token in (11, 12, 13)]),
    ]
    write_states(tmp_path, 0, [torch.zeros(len(text.tokens), 6) for text in texts])
    drafts, told = Drafts.of(with_states(tmp_path, 0, texts), CPU), Said.of(texts)
    assert drafts.next_ids[drafts.starts].tolist() == [7, 8, 11, 12]
    assert told.next_ids[drafts.said].tolist() == [8, 9, 12, 13]
    assert drafts.left.tolist() == [2, 1, 2, 1]


def test_a_head_drafts_the_most_frequent_tokens_only() -> None:
    """Bug guarded: draft ids taken for the target's; a head that is praised for a token that it cannot say."""
    texts = texts_of(tiny_target(), 4)
    counts = np.bincount(np.concatenate([text.tokens[PROMPT:] for text in texts]), minlength=VOCAB)
    chosen = most_frequent(texts, 10, VOCAB)
    assert chosen == sorted(set(chosen))
    assert counts[chosen].sum() > counts.sum() * 10 / VOCAB
    student = head_of(tiny_target())
    logits = torch.zeros(1, len(HEAD_IDS))
    logits[0, 0] = 9.0
    can, cannot = (student._cut(Said(torch.tensor([i]), torch.tensor([[i]]), torch.tensor([[-0.1]]))) for i in (2, 3))
    assert distillation_loss(logits, can).agreement == 1
    found = distillation_loss(logits, cannot)
    assert (found.agreement, found.overlap) == (0, 0)
    assert bool(found.total.isfinite())


@pytest.mark.usefixtures("_no_time_for_step_times")
def test_a_killed_training_of_a_head_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Bug guarded: weights of a head that a checkpoint leaves out; gradients that do not arrive; a trained embedding."""
    texts = texts_with_states(tmp_path)

    def trainer_of(folder: str) -> Trainer:
        recipe = Recipe(Budget(steps=16), learning_rate=3e-3, batch_texts=8, part_texts=3, seed=1)
        return Trainer(head_of(tiny_target()), texts[8:], texts[:8], recipe, tmp_path / folder)

    def kill(state: Any, progress: float, loss: float) -> None:
        if state.step == 7:
            raise Killed

    whole = trainer_of("whole")
    expected = whole.run()
    with pytest.raises(Killed):
        trainer_of("killed").run(kill)
    second = trainer_of("killed")
    assert second.resume()
    found = second.run()
    for row in (*expected.curve, *found.curve):
        del row["seconds"]
    assert found.curve == expected.curve
    assert expected.curve[-1]["divergence"] < 0.9 * expected.curve[0]["divergence"]
    assert len(expected.curve[-1]["agreement_by_step"]) == NUM_STEPS
    ours, theirs = weights(second), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    begun = weights_of(head_of(tiny_target()))
    unchanged = {name for name, tensor in theirs.items() if torch.equal(tensor, begun[name])}
    assert unchanged == {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer of words, whose next token hangs on the one before."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=1024)
    model.config.architectures = ["LlamaForCausalLM"]
    model.model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "w3 {% for message in messages %}{{ message['content'] }} w4 {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def distill(target: Path, out: Path, *arguments: str) -> int:
    return main(["distill", "--target", str(target), "--out", str(out), "--quick", "--device", "cpu", *arguments])


@pytest.fixture(scope="module")
def engine(target_folder: Path) -> LocalEngine:
    """Loading and measuring a model takes longer than all that is done with it here."""
    return build_local_engine(acceptance.engine_config(str(target_folder), "cpu", {"source": "none"}))


@pytest.fixture(autouse=True)
def _loaded_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "engine" in request.fixturenames:
        loaded = request.getfixturevalue("engine")
        monkeypatch.setattr(build, "build_local_engine", lambda config: loaded)


def write_random_draft(target: LoadedModel, folder: Path) -> Path:
    """A draft of the same shape that has learned nothing."""
    folder.mkdir()
    student = student_of(target)
    torch.manual_seed(11)
    for parameter in student.module.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    student.save(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def test_the_folder_is_a_draft_that_is_accepted_more_than_a_random_one(
    target_folder: Path,
    engine: LocalEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug guarded: a folder that does not load as draft.model, weights that are not the trained ones, a report that measures
    something else, weights that only their maker may read.
    """
    out = tmp_path / "out"
    target = load_model(str(target_folder), dtype="float32")
    random = write_random_draft(target, tmp_path / "random")
    real = acceptance.candidates
    untrained = acceptance.Candidate("random", {"source": "model", "model": str(random)})
    monkeypatch.setattr(acceptance, "candidates", lambda folder, kind: (real(folder, kind)[0], untrained))
    assert distill(target_folder, out, "--tokens", "2000", "--steps", "40", "--json") == EXIT_OK
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["name"]: row["rules"] for row in report["candidates"]}
    assert list(rows) == ["distilled", "random"]
    assert [candidate.name for candidate in real(str(out), "draft")] == ["distilled", "distilled-int8", "self-int8"]
    for ours, theirs in zip(rows["distilled"], rows["random"], strict=True):
        assert ours["accepted_share"] > theirs["accepted_share"]
    assert report["samples"]["tokens"] >= 2000
    assert report["training"]["steps"] == 40
    assert json.loads((out / "report.json").read_text()) == report
    assert str(out) in (out / "README.md").read_text()
    assert len({path.stat().st_mode for path in (out / "model.safetensors", out / "config.json")}) == 1


@pytest.mark.usefixtures("_no_time_for_step_times")
def test_a_head_learns_from_the_samples_of_a_draft_and_is_measured_as_it_is_served(
    target_folder: Path,
    engine: LocalEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug guarded: a folder that does not load with draft.source heads; a head that drafts otherwise than it was trained, or
    whose drafts the report does not get to see; a shape of head that is not the target's.
    """
    sampled, out = tmp_path / "sampled", tmp_path / "head"
    with monkeypatch.context() as patched:
        patched.setattr(command, "_train", _stop)
        assert distill(target_folder, sampled, "--tokens", "2000") == 130
    monkeypatch.setattr(build, "build_local_engine", build_local_engine)
    monkeypatch.setattr(acceptance, "DRAFT_ROWS", (1, 2))
    monkeypatch.setattr(calibrate, "TARGET_TOKENS", (1, 2, 4))
    real = acceptance.candidates
    monkeypatch.setattr(acceptance, "candidates", lambda folder, kind: real(folder, kind)[:1])
    options = ("--kind", "head", "--samples", str(sampled), "--vocabulary", "64", "--steps", "40")
    assert distill(target_folder, out, *options, "--json") == EXIT_OK
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = report["candidates"]
    assert [candidate.name for candidate in real(str(out), "head")] == ["distilled", "self-int8"]
    assert row["draft"] == {"source": "heads", "model": str(out)}
    assert row["cost_ratio"] > 0
    curve = report["training"]["curve"]
    assert curve[-1]["divergence"] < curve[0]["divergence"]
    untrained = EagleHead.untrained(*_shape_of(load_model(str(target_folder), dtype="float32")), draft_ids=range(3, VOCAB, 2))
    untrained.save(tmp_path / "untrained")
    config = acceptance.engine_config(str(target_folder), "cpu", {"source": "heads", "model": str(tmp_path / "untrained")})
    (other,) = acceptance.measure_candidates(build_local_engine(config), "", "cpu", "head", quick=True)
    for ours, theirs in zip(row["rules"], other["rules"], strict=True):
        assert ours["num_drafted"] > 0
        assert ours["accepted_share"] > theirs["accepted_share"]
    assert not (out / "samples").exists()
    assert "draft: {source: heads" in (out / "README.md").read_text()


def test_a_draft_is_trained_for_as_long_as_was_said(
    target_folder: Path,
    engine: LocalEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug guarded: minutes that are read as seconds or as steps, or a kind that is accepted and another one trained."""
    real = acceptance.candidates
    monkeypatch.setattr(acceptance, "candidates", lambda folder, kind: real(folder, kind)[:1])
    assert distill(target_folder, tmp_path / "out", "--kind", "draft", "--minutes", "0.02", "--json") == EXIT_OK
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["training"]["steps"] >= 1
    assert report["training"]["seconds"] >= 1.2
    assert [row["name"] for row in report["candidates"]] == ["distilled"]


def _shape_of(target: LoadedModel) -> tuple[Any, torch.Tensor]:
    return target.config, target.model.get_input_embeddings().weight.detach()


def _stop(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def test_a_run_killed_while_sampling_goes_on_to_the_same_texts(
    target_folder: Path,
    engine: LocalEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug guarded: texts that hang on interruptions, shards that are sampled again, options that are taken over in silence."""
    monkeypatch.setattr(sample, "SHARD_TEXTS", 8)
    kept: list[list[Text]] = []
    monkeypatch.setattr(command, "_train", _stop)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert distill(target_folder, whole, "--tokens", "600") == 130
    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "shard", _killing(Sampler.shard, 1))
        assert distill(target_folder, killed, "--tokens", "600") == 130
    before = (killed / "samples" / "shard-00000.safetensors").stat().st_mtime_ns
    assert distill(target_folder, killed, "--resume", "--tokens", "700") == EXIT_USAGE
    assert "--tokens is 700 now" in capsys.readouterr().err
    assert distill(target_folder, killed, "--resume") == 130
    assert (killed / "samples" / "shard-00000.safetensors").stat().st_mtime_ns == before
    for folder in (whole, killed):
        kept.append([text for texts in stored_texts(folder / SAMPLES, 10**9) for text in texts])
    assert len(kept[0]) > 16
    for ours, theirs in zip(*kept, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.top_logprobs, theirs.top_logprobs)


def _killing(shard: Callable[..., list[Text]], index: int) -> Callable[..., list[Text]]:
    def killed(self: Sampler, number: int, *arguments: Any) -> list[Text]:
        if number == index:
            raise KeyboardInterrupt
        return shard(self, number, *arguments)

    return killed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "3"], "--layers 3: must lie between 1 and 2"),
        (["--hidden", "12"], "--hidden 12: must be a multiple of"),
        (["--device", "tpu"], "--device: 'tpu' is not a device"),
        (["--kind", "head", "--vocabulary", "98"], "--vocabulary 98: the target has 97 tokens; give at most as many"),
    ],
)
def test_what_the_target_does_not_allow_is_refused_before_anything_is_written(
    arguments: list[str], message: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: hours of sampling for a student that cannot be built, or a folder that must be deleted first."""
    out = tmp_path / "out"
    assert distill(target_folder, out, *arguments) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_vocabulary_of_a_head_is_at_most_the_targets(target_folder: Path, tmp_path: Path) -> None:
    """Bug guarded: a plan and a model card that name 8,192 draft ids for a target that has fewer."""
    options = DistillOptions(str(target_folder), tmp_path / "out", kind="head", device="cpu")
    assert command._fit_to_target(options, make_plan(options, ())).vocabulary == VOCAB
    given = replace(options, vocabulary=VOCAB - 1)
    assert command._fit_to_target(given, make_plan(given, ())).vocabulary == VOCAB - 1


def test_room_is_asked_for_in_the_dtype_that_states_are_stored_in(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: half the room asked for where the target computes in float32; stored texts counted at their longest."""
    options = DistillOptions(str(target_folder), tmp_path, kind="head", tokens=1280, device="cpu")
    plan = make_plan(options, ())
    width = load_tokenizer(str(target_folder)).config.hidden_size
    (tmp_path / SAMPLES).mkdir()
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        monkeypatch.setattr(engine_models, "choose_dtype", lambda name, device, dtype=dtype: (dtype, ""))
        assert command._most_state_bytes(options, plan) == 10 * (128 + 512) * 3 * width * size
    text = Text.of((1,) * 30, [TokenLogprob(2, 0.0, ((2, -0.1),))] * 128)
    write_shard(tmp_path / SAMPLES, 0, [text] * 9)
    assert command._most_state_bytes(options, plan) == (9 * 158 + 128 + 512) * 3 * width * 2


def test_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: an error that names a field of the configuration, which this command does not have."""
    assert distill(tmp_path / "none", tmp_path / "out") == 1
    assert "--target: no such model" in capsys.readouterr().err
    assert distill(Path("emulated:free"), tmp_path / "out") == EXIT_USAGE
    assert "--target 'emulated:free' is emulated" in capsys.readouterr().err

"""A draft with a vocabulary of its own: the same as asking its model for each text in its own spelling, in target ids."""

import copy
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from table_lane import DEPTH, LEVEL, SETTINGS, sample
from tiny_models import plain_logits, tiny_model
from torch import Tensor, nn
from two_vocabularies import random_text, write_pair

from engine.build import build_local_engine, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ModelError
from engine.models import LoadedModel, LoadedTokenizer, load_model, load_tokenizer, shared_vocabulary
from engine.propose.draft_model import DraftModel
from engine.propose.translated import num_alike
from engine.propose.vocabulary import SharedVocabulary, Spelling, Vocabulary
from engine.sampling import SampledSequence, propose_tokens
from engine.scheduler import FixedDepth
from engine.types import (
    GenerateRequest,
    Prepared,
    PrepareItem,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    SparseProbs,
)
from engine.verify.attention import Chunk
from engine.verify.ragged import RaggedModel
from engine.verify.stateful import StatefulModel

NUM_TEXTS = 250
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0},
    "coupled, filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "coupled, penalised": {"temperature": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.3, "min_tokens": 40},
    "rejection": {"temperature": 1.0, "rule": "rejection"},
    "block, filtered": {"temperature": 1.0, "rule": "block", "top_p": 0.8},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    for model in (RaggedModel, StatefulModel):
        monkeypatch.setattr(model, "_measure_step_times", lambda self: ())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@cache
def loaded_once(folders: tuple[Path, Path]) -> tuple[LoadedTokenizer, LoadedModel, SharedVocabulary]:
    target, draft = load_tokenizer(str(folders[0])), load_model(str(folders[1]), dtype="float32", device="cpu")
    shared = shared_vocabulary(target, draft)
    assert shared is not None
    return target, draft, shared


class Pair:
    """A target's tokenizer, a draft model translated to it, and the draft's plain model to compare with."""

    def __init__(self, folders: tuple[Path, Path], **options: Any):
        self.target, loaded, self.shared = loaded_once(folders)
        self.plain: nn.Module = loaded.model
        sizes = {"kv_capacity_tokens": 4096, "shared_catch_up_tokens": 256, **options}
        copied = replace(loaded, model=copy.deepcopy(loaded.model))
        self.draft = DraftModel(copied, kernels="torch", vocabulary=self.shared, **sizes)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of the draft after a text of target ids, over target ids, without any state."""
        row = plain_logits(self.plain, Spelling(self.shared).spell(ids))[-1]
        translated = torch.full((self.target.vocab_size,), -torch.inf)
        for ours, theirs in self.shared.to_draft.items():
            translated[ours] = row[theirs]
        return translated

    def drafted(
        self, ids: Sequence[int], context: SequenceContext, depth: int
    ) -> tuple[tuple[int, ...], tuple[SparseProbs, ...] | None]:
        """What a draft of the target's own vocabulary would draw from these logits."""
        text, probs = list(ids), []
        for drawn in range(depth):
            sequence = SampledSequence(context.params, context.prompt_length, list(text), num_drawn=drawn)
            ((token, q, _),) = propose_tokens(self.logits(text)[None], [sequence], self.target.eos_token_ids)
            text.append(token)
            probs += [q] if q is not None else []
            if token in self.target.eos_token_ids and not context.params.ignore_eos:
                break
        return tuple(text[len(ids) :]), tuple(probs) or None

    def propose(self, *items: ProposeItem) -> tuple[Proposal, ...]:
        return self.draft.propose(ProposeRequest(round_id=1, items=items)).proposals

    def prepare(self, *items: PrepareItem) -> tuple[Prepared, ...]:
        return self.draft.prepare(PrepareRequest(round_id=2, items=items)).prepared


@pytest.fixture
def pair(folders: tuple[Path, Path]) -> Pair:
    return Pair(folders)


def context(prompt: Sequence[int], **params: Any) -> SequenceContext:
    return SequenceContext(
        params=SamplingParams(**{"ignore_eos": True, "seed": 3, "temperature": 0.0, **params}), prompt_length=len(prompt)
    )


def ask(name: str, tokens: Sequence[int], depth: int, known: SequenceContext, base: int = 0) -> ProposeItem:
    return ProposeItem(
        sequence_id=name, base_length=base, tokens=tuple(tokens), depth=depth, context=known if base == 0 else None
    )


def counted(monkeypatch: pytest.MonkeyPatch, draft: DraftModel) -> list[int]:
    """Draft tokens of every forward from now on."""
    computed: list[int] = []
    inner = draft.model._model  # type: ignore[attr-defined]
    forward: Callable[[Sequence[Chunk]], Tensor] = inner.forward

    def counting(chunks: Sequence[Chunk]) -> Tensor:
        computed.append(sum(len(chunk.ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(inner, "forward", counting)
    return computed


def close(ours: tuple[SparseProbs, ...] | None, theirs: tuple[SparseProbs, ...] | None) -> bool:
    """Whether two lists of q agree but for rounding in the forwards."""
    if ours is None or theirs is None:
        return ours is theirs
    for (ids, probs), (other_ids, other_probs) in zip(ours, theirs, strict=True):
        found, expected = dict(zip(ids, probs, strict=True)), dict(zip(other_ids, other_probs, strict=True))
        if any(abs(found.get(i, 0.0) - expected.get(i, 0.0)) > 1e-4 for i in found.keys() | expected.keys()):
            return False
    return True


# --- what is drafted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_are_drawn_in_target_ids_from_the_drafts_logits(pair: Pair, name: str) -> None:
    """Bug guarded: noise, penalties, filters, positions or q by the draft's ids or lengths: coupled drafts would agree by
    chance only, and q would not be what was drawn from. With roll-backs, and ends that are spelled otherwise each time."""
    rng = random.Random(4)
    prompt = random_text(rng, pair.target, 40)
    known, ids, base = context(prompt, **PARAMS[name]), prompt, 0
    for _ in range(6):
        (proposal,) = pair.propose(ask("a", ids[base:], 4, known, base))
        tokens, probs = pair.drafted(ids, known, 4)
        assert (proposal.tokens, proposal.known_length) == (tokens, len(ids))
        assert close(proposal.probs, probs)
        assert set(tokens) <= set(pair.shared.to_draft)
        if proposal.probs is not None:
            assert {i for ids_of_q, _ in proposal.probs for i in ids_of_q} <= set(pair.shared.to_draft)
        base = len(ids) + rng.randint(0, 2)  # so many were accepted
        ids = [*ids, *tokens[: base - len(ids)], *random_text(rng, pair.target, 2)[:3]]


@pytest.mark.parametrize("name", ["greedy", "coupled, penalised", "block, filtered"])
def test_what_is_prepared_is_what_would_be_proposed(folders: tuple[Path, Path], name: str) -> None:
    """Bug guarded: forks that read the draft's spelling of the guesses and not the text's, or take back each other's tokens."""
    pair, other = Pair(folders), Pair(folders)
    rng = random.Random(5)
    prompt = random_text(rng, pair.target, 30)
    known = context(prompt, **PARAMS[name])
    (proposal,) = pair.propose(ask("a", prompt, 4, known))
    item = PrepareItem(
        sequence_id="a", base_length=len(prompt), tokens=(), draft=proposal.tokens, depth=3, fan_out=(2,) * 5, context=known
    )
    (prepared,) = pair.prepare(item)
    assert prepared.reason is None
    assert {outcome.accepted for outcome in prepared.outcomes} == {0, 1, 2, 3, 4}
    for number, outcome in enumerate(prepared.outcomes):
        ids = [*prompt, *proposal.tokens[: outcome.accepted], outcome.token]
        (expected,) = other.propose(ask(str(number), ids, 3, known))
        assert outcome.tokens == expected.tokens
        assert close(outcome.probs, expected.probs)
    ids = [*prompt, *proposal.tokens[:2], prepared.outcomes[0].token]  # and the sequence itself is none the worse
    (after,) = pair.propose(ask("a", ids[len(prompt) :], 3, known, len(prompt)))
    assert after.tokens == other.propose(ask("b", ids, 3, known))[0].tokens


def test_a_draft_of_words_that_the_draft_lacks_is_prepared_for(pair: Pair) -> None:
    """Bug guarded: drafts of another source (n-grams, another model) with tokens that this one must spell in several of its
    own: the rows after them belong to the wrong tokens, or the call fails."""
    prompt = random_text(random.Random(6), pair.target, 20)
    lacking = [i for i in range(pair.target.vocab_size) if i not in pair.shared.to_draft and i not in pair.target.eos_token_ids]
    draft = (lacking[5], prompt[0], lacking[9])
    assert len(pair.shared.spell_token(draft[0])) > 1
    known = context(prompt)
    item = PrepareItem(
        sequence_id="a", base_length=0, tokens=tuple(prompt), draft=draft, depth=1, fan_out=(1,) * 4, context=known
    )
    (prepared,) = pair.prepare(item)
    found = {outcome.accepted: outcome for outcome in prepared.outcomes}
    assert set(found) == {0, 1, 2, 3}
    for accepted, outcome in found.items():
        text = Spelling(pair.shared).spell(prompt)
        for token in draft[:accepted]:
            text += pair.shared.spell_token(token)
        row = plain_logits(pair.plain, text)[-1]
        order = sorted(pair.shared.to_draft, key=lambda i: -float(row[pair.shared.to_draft[i]]))
        assert outcome.token == next(i for i in order if i not in draft[accepted : accepted + 1] and i not in (2,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_goes_on_after_words_that_it_lacks(pair: Pair, temperature: float) -> None:
    """Bug guarded: tokens of the text that the draft spells in several of its own are left out, or stay after a refusal."""
    prompt = random_text(random.Random(8), pair.target, 20)
    lacking = [i for i in range(pair.target.vocab_size) if i not in pair.shared.to_draft and i not in pair.target.eos_token_ids]
    known, ahead = context(prompt, temperature=temperature), (lacking[5], prompt[0], lacking[9])
    (hybrid,) = pair.propose(msgspec.structs.replace(ask("a", prompt, 3, known), ahead=ahead))
    assert hybrid.tokens == pair.drafted([*prompt, *ahead], known, 3)[0]
    assert hybrid.known_length == len(prompt)
    more = [ahead[0], prompt[2]]
    (after,) = pair.propose(ask("a", more[1:], 3, known, len(prompt) + 1))
    assert after.tokens == pair.drafted([*prompt, *more], known, 3)[0]


def test_only_what_is_spelled_anew_is_computed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the whole text computed again whenever its end is spelled otherwise than before."""
    prompt = random_text(random.Random(7), pair.target, 80)
    known = context(prompt)
    computed = counted(monkeypatch, pair.draft)
    (proposal,) = pair.propose(ask("a", prompt, 4, known))
    assert computed[0] > 80
    computed.clear()
    rest = [*proposal.tokens, *pair.target.tokenizer.encode(" ca")]
    pair.propose(ask("a", rest, 1, known, len(prompt)))
    pair.propose(
        ask("a", pair.target.tokenizer.encode("t"), 1, known, len(prompt) + len(rest))
    )  # ' cat' is one token of the draft
    assert max(computed) < 20


def test_half_a_character_is_no_obstacle(pair: Pair) -> None:
    """Bug guarded: committed text that ends within a character breaks the call, or is drafted after U+FFFD."""
    ids = pair.target.tokenizer.encode("the 🙂")
    assert len(ids) > 3
    for length in range(1, len(ids) + 1):
        known = context(ids[:length])
        (proposal,) = pair.propose(ask(f"{length}", ids[:length], 2, known))
        assert proposal.tokens == pair.drafted(ids[:length], known, 2)[0]


def test_the_end_of_a_text_is_drafted_as_the_targets(pair: Pair) -> None:
    """Bug guarded: the draft's id for the end of a text taken for the target's, so that drafts never stop, or stop anywhere."""
    ends = pair.target.eos_token_ids
    prompt = random_text(random.Random(8), pair.target, 10)
    known = context(prompt, ignore_eos=False, logit_bias={ends[0]: 1000.0})
    (proposal,) = pair.propose(ask("a", prompt, 5, known))
    assert proposal.tokens == ends
    assert pair.draft.info.eos_token_ids == ends
    assert ends[0] != pair.shared.to_draft[ends[0]]


def matching(name: str, pieces: Sequence[bytes]) -> Vocabulary:
    """A text is read by always taking the longest token that fits; what no token fits is left out."""

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            fitting = [i for i, piece in enumerate(pieces) if data.startswith(piece)]
            best = max(fitting, key=lambda i: len(pieces[i]), default=None)
            ids += [best] if best is not None else []
            data = data[len(pieces[best]) if best is not None else 1 :]
        return ids

    return Vocabulary(name, tuple(pieces), encode)


@pytest.mark.parametrize(("rule", "fan_out"), [("coupled", 2), ("rejection", 0), ("block", 2)])
def test_texts_have_the_targets_distribution(rule: str, fan_out: int) -> None:
    """Bug guarded: a bias where q covers only a part of the target's tokens, under the ratio tests and with shared noise. For
    other seeds the odds that one of these cases fails by chance are six times `LEVEL`, 4e-8, at most."""
    shared = SharedVocabulary(matching("t", [b"a", b"b", b"c", b"d"]), matching("d", [b"c", b"xy", b"a", b"ac", b"b"]))
    assert shared.to_draft == {0: 2, 1: 4, 2: 0}
    loaded = replace(tiny_model("llama", vocab_size=5, initializer_range=0.02), vocab_size=5, eos_token_ids=())
    draft = DraftModel(loaded, kernels="torch", vocabulary=shared, kv_capacity_tokens=1 << 18, catch_up_tokens=1 << 20)
    chosen = {name: SETTINGS[name] for name in ("plain", "penalties")}
    sampled = sample(rule, chosen, draft, num_texts=NUM_TEXTS, policy=FixedDepth(DEPTH, fan_out=fan_out))
    for result in sampled.values():
        assert result.p > LEVEL
        assert result.num_drafted >= NUM_TEXTS * DEPTH
        assert 0.15 < result.acceptance < 0.95
        assert (sum(result.hits.values()) > NUM_TEXTS / 4) == (fan_out > 0)


# --- room and faults --------------------------------------------------------------------------------------------------------


def test_sequences_that_find_no_room_spoil_nothing(folders: tuple[Path, Path]) -> None:
    """Bug guarded: a text that takes more of the draft's tokens than of the target's overruns the blocks or fails others."""
    pair = Pair(folders, kv_capacity_tokens=320)
    rng = random.Random(9)
    for number in range(8):
        prompts = [random_text(rng, pair.target, 25) for _ in range(3)]
        proposals = pair.propose(*[ask(f"{number}/{i}", p, 2, context(p)) for i, p in enumerate(prompts)])
        for prompt, proposal in zip(prompts, proposals, strict=True):
            assert proposal.tokens or proposal.reason in ("kv_full", "bad_logits")
            assert proposal.tokens == pair.drafted(prompt, context(prompt), len(proposal.tokens))[0]
        assert any(proposal.tokens for proposal in proposals)
    pair.draft.propose(ProposeRequest(round_id=3, items=(), release=tuple(f"7/{i}" for i in range(3))))
    prompt = random_text(rng, pair.target, 40)
    assert pair.propose(ask("last", prompt, 3, context(prompt)))[0].tokens == pair.drafted(prompt, context(prompt), 3)[0]


def test_released_sequences_give_all_their_room_back(pair: Pair) -> None:
    """Bug guarded: blocks of forks, of roll-backs or of ended sequences that nobody holds and nobody frees."""
    prompt = random_text(random.Random(10), pair.target, 40)
    pool = pair.draft.model.cache.pool
    before = pool.num_free
    known = context(prompt)
    (proposal,) = pair.propose(ask("a", prompt, 4, known))
    pair.prepare(
        PrepareItem(sequence_id="a", base_length=len(prompt), tokens=(), draft=proposal.tokens, depth=3, fan_out=(3,) * 5)
    )
    assert pool.num_free < before
    pair.draft.propose(ProposeRequest(round_id=3, items=(), release=("a",)))
    assert pool.num_free == before


def test_a_forward_that_breaks_off_leaves_a_draft_that_works(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: ids that were never computed count as held by the draft, and later drafts follow another text."""
    prompt = random_text(random.Random(11), pair.target, 20)
    known = context(prompt)
    pair.propose(ask("a", prompt, 2, known))
    with monkeypatch.context() as patch:

        def breaks(chunks: Sequence[Chunk]) -> Tensor:
            raise RuntimeError("out of memory")

        patch.setattr(pair.draft.model._model, "forward", breaks)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError):
            pair.propose(ask("a", prompt[:3], 2, known, len(prompt)))
    assert pair.propose(ask("a", prompt[:3], 2, known, len(prompt)))[0].reason == "need_context"
    assert pair.propose(ask("a", prompt, 2, known))[0].tokens == pair.drafted(prompt, known, 2)[0]


def test_texts_beyond_the_drafts_context_are_not_drafted(pair: Pair) -> None:
    """Bug guarded: a text that fits the target's count of tokens but not the draft's is read past the end of its positions."""
    limit = pair.draft.info.max_context
    assert limit < 256
    rng = random.Random(12)
    prompt = random_text(rng, pair.target, 400)
    (proposal,) = pair.propose(ask("a", prompt[:limit], 1, context(prompt)))
    assert proposal.tokens or proposal.reason in ("bad_logits", "catching_up")
    assert pair.propose(ask("b", prompt[: limit + 1], 1, context(prompt)))[0].reason == "out_of_context"


def test_drafts_that_cannot_fork_still_propose(tmp_path: Path) -> None:
    """Bug guarded: a draft of one cache per sequence and a vocabulary of its own is taken for one that can prepare."""
    pair = Pair(write_pair(tmp_path, "bloom"), kv_capacity_tokens=2048)
    assert not pair.draft.prepares
    prompt = random_text(random.Random(13), pair.target, 20)
    known = context(prompt)
    (first,) = pair.propose(ask("a", prompt, 3, known))
    (second,) = pair.propose(ask("a", first.tokens[:2], 3, known, len(prompt)))
    assert first.tokens == pair.drafted(prompt, known, 3)[0]
    assert second.tokens == pair.drafted([*prompt, *first.tokens[:2]], known, 3)[0]


@pytest.mark.parametrize(("ids", "others", "expected"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 4], [1, 2, 3], 2)])
def test_common_beginnings(ids: list[int], others: list[int], expected: int) -> None:
    """Bug guarded: a token that differs is kept, or one that does not is computed again."""
    assert num_alike(ids, others) == expected


# --- from a configuration ---------------------------------------------------------------------------------------------------


SMALL_PLACE = {"kv_cache_tokens": 4096, "device": "cpu", "dtype": "float32", "num_threads": 1}


def configured(folders: tuple[Path, Path], **speculation: Any) -> OutriderConfig:
    return parse_config(
        {
            "target": {"model": str(folders[0]), "kernels": "torch", "numerics": "fast", **SMALL_PLACE},
            "draft": {"source": "model", "model": str(folders[1]), **SMALL_PLACE},
            "speculation": {"max_depth": 4, "depth": 4, **speculation},
        }
    )


def test_a_pair_with_two_vocabularies_runs_and_changes_no_text(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: such a pair refused at start, or drafts that change the text. At a high temperature the noise decides, so
    coupled drafts are accepted only if draft and target key it by the same ids."""
    with caplog.at_level(logging.INFO):
        engine = build_local_engine(configured(folders))
    assert "tokens that both have" in caplog.text
    assert "tokens that both have" in engine.source.info.path_reason  # type: ignore[union-attr]
    for temperature in (0.0, 30.0):
        texts = {}
        for depth in (4, 0):
            params = SamplingParams(temperature=temperature, seed=9, max_tokens=40, max_depth=depth, ignore_eos=True)
            request = GenerateRequest(request_id="r", prompt_ids=tuple(engine.encode("the cat sat", chat=False)), params=params)
            deltas = list(engine.generate([request]))
            texts[depth] = [token for delta in deltas for token in delta.token_ids]
            if depth and temperature:
                assert deltas[-1].num_accepted > 0.5 * deltas[-1].num_drafted > 10
        assert texts[4] == texts[0]


def test_vocabularies_that_are_the_same_are_not_translated(folders: tuple[Path, Path]) -> None:
    """Bug guarded: drafts of the target's family pay for a translation, and lose graphs and prefix cache by it."""
    target = load_tokenizer(str(folders[0]))
    assert shared_vocabulary(target, target) is None


def test_too_little_in_common_is_refused_at_start(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the actors load their weights and serve without a single draft ever accepted."""
    monkeypatch.setattr("engine.propose.vocabulary.LEAST_SHARE", 0.99)
    with pytest.raises(ModelError, match=r"draft\.model: .*are only \d\d\.\d% of the target's tokens, and at least 99%"):
        preflight(configured(folders))


def test_what_both_know(folders: tuple[Path, Path]) -> None:
    """Bug guarded: ids paired by number, or by the spelling of special tokens as text, when real tokenizer files are read."""
    target, draft, shared = loaded_once(folders)
    pairs = {name(target, i): name(draft, j) for i, j in shared.to_draft.items()}
    assert all(ours == theirs for ours, theirs in pairs.items())
    assert {"<user>", "<eos>", "\u0120the"} <= pairs.keys()
    assert {"<pad>", "<other>"}.isdisjoint(pairs)


def name(loaded: LoadedTokenizer, token_id: int) -> str:
    return str(loaded.tokenizer.convert_ids_to_tokens(token_id))

"""Lanes around table models, and many short texts played through them at once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from chi_square import exact_joint, texts_p
from msgspec.structs import replace
from torch import Tensor

from engine.drivers import SyncDriver
from engine.propose.base import DraftSource
from engine.propose.beside import TextBeside
from engine.propose.from_text import TextSource
from engine.scheduler import DepthPolicy, FixedDepth, Scheduler
from engine.testing import TableModel
from engine.types import Delta, GenerateRequest, SamplingParams
from engine.verify.base import TargetModel

VOCAB = 4
DEPTH = 2
FIXED_DEPTH = FixedDepth(DEPTH)
LENGTH = DEPTH + 2
"""One token comes with the prefill, then one round of full depth makes the other three: a joint (K+1)-gram."""
PROMPT = (1, 3, 0, 2, 1, 3, 0, 2)
"""Every token occurs twice, so that n-grams always match."""
NUM_TEXTS = 2_000
FIRST_SEED = 1_000_000
FALSE_ALARM = 1e-6
NUM_CASES = 180
LEVEL = FALSE_ALARM / NUM_CASES
"""A case fails at a p-value below this, so that the odds that any of `NUM_CASES` fails by chance are at most `FALSE_ALARM`."""
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature and top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.15, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
}


def table(vocab: int, seed: int, scale: float = 1.3) -> Tensor:
    """Random logits, float32 [vocab, vocab]."""
    return scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


TARGET = table(VOCAB, 8, 1.0)
GOOD_DRAFT = TARGET + table(VOCAB, 6, 0.7)
BAD_DRAFT = table(VOCAB, 9)


def lane(
    target: TargetModel, source: DraftSource | None, policy: DepthPolicy, text: TextSource | None = None, **limits: int
) -> SyncDriver:
    """A driver with room for everything that ``limits`` does not bound; ``text`` drafts beside ``source``."""
    limits = {"max_batch": 1_000, "prefill_tokens": 1 << 20, "max_waiting": 1 << 20, **limits}
    beside = None if text is None else TextBeside(text, 20)
    return SyncDriver(target, source, Scheduler(target.info, policy, text=beside, **limits))


@dataclass(frozen=True)
class Sampled:
    """What a set of texts of one kind came to."""

    p: float
    """p-value of the texts under the target's exact distribution."""
    num_drafted: int
    num_accepted: int
    hits: Counter[str]
    """Of all texts that were played together."""
    misses: Counter[str]
    by_source: Counter[str]
    """Requests times rounds whose draft came from a source, over all texts."""

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were kept."""
        return self.num_accepted / max(self.num_drafted, 1)


def sample(
    rule: str,
    settings: dict[str, dict[str, float]],
    source: DraftSource | None,
    target: Tensor = TARGET,
    num_texts: int = NUM_TEXTS,
    policy: DepthPolicy = FIXED_DEPTH,
    text: TextSource | None = None,
    length: int = LENGTH,
) -> dict[str, Sampled]:
    """Play texts of distinct seeds, ``num_texts`` for each of the ``settings``, all mixed in one lane."""
    kinds = {name: SamplingParams(rule=rule, max_tokens=length, **kind) for name, kind in settings.items()}  # type: ignore[arg-type]
    requests = [
        GenerateRequest(request_id=f"{name}/{seed}", prompt_ids=PROMPT, params=replace(params, seed=seed))
        for seed in range(FIRST_SEED, FIRST_SEED + num_texts)
        for name, params in kinds.items()
    ]
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, list[Delta]] = {name: [] for name in kinds}
    driver = lane(TableModel(target, kv_capacity_tokens=1 << 30), source, policy, text)
    for request in requests:
        driver.add(request)
    hits, misses, by_source = Counter[str](), Counter[str](), Counter[str]()
    while driver.scheduler.running or driver.scheduler.waiting:
        result = driver.step()
        hits.update(result.report.hits)
        misses.update(result.report.misses)
        by_source.update({name: step.num_requests for name, step in result.report.sources.items()})
        for delta in result.deltas:
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ended[delta.request_id.split("/")[0]].append(delta)
    joints = {name: exact_joint(target.tolist(), params, PROMPT, length) for name, params in kinds.items()}
    return {name: _judged(joints[name], texts, ended[name], hits, misses, by_source) for name in kinds}


def _judged(joint: Tensor, texts: dict[str, list[int]], ended: Sequence[Delta], *counted: Counter[str]) -> Sampled:
    return Sampled(
        p=texts_p([texts[delta.request_id] for delta in ended], joint),
        num_drafted=sum(delta.num_drafted for delta in ended),
        num_accepted=sum(delta.num_accepted for delta in ended),
        hits=counted[0],
        misses=counted[1],
        by_source=counted[2],
    )

"""Texts from the target, by the engine itself in large batches, shard after shard until there are enough."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from deployments.distill.plan import MAX_PROMPT_TOKENS, SAMPLES, DistillPlan
from deployments.distill.prompts import endless
from engine.build import LocalEngine
from engine.distill.shards import TOP_K, Text, num_stored, write_shard
from engine.errors import ConfigError, OutriderError
from engine.scheduler import FixedDepth
from engine.types import GenerateRequest, SamplingParams, TokenLogprob

SHARD_TEXTS = 64
"""A run that is killed loses at most so many; each shard ends with a batch that runs empty."""
LEAST_TEXTS = 8
"""In a shard: the last few tokens are not worth a batch of one or two texts each."""
QUESTION_TOKENS = 48
"""Longest question that the target makes up itself."""
MARK = "⟦question⟧"


@dataclass(frozen=True)
class Sampled:
    """Where sampling stands."""

    num_tokens: int
    """That the target has written, in this run and before."""
    new_tokens: int
    """Those of this run."""
    seconds: float
    """Of this run."""


OnTokens = Callable[[Sampled], None]


class Sampler:
    """Makes the shards of one plan. What is in a shard depends on the plan and the shards before it, not on interruptions."""

    def __init__(self, engine: LocalEngine, plan: DistillPlan, out: Path, texts: Sequence[str]):
        self._engine = engine
        self._plan = plan
        self._out = out
        self._has_template = engine.tokenizer.chat_template is not None
        self._own_prompts = [self._encode_own(number, text) for number, text in enumerate(texts, 1)]

    def run(self, on_tokens: OnTokens = lambda sampled: None) -> None:
        """Sample until there are enough tokens. Raises `OutriderError` when a shard cannot be written."""
        index, total = num_stored(self._out / SAMPLES)
        before, started_s = total, time.monotonic()

        def on_written(stored: int, count: int) -> None:
            on_tokens(Sampled(stored + count, stored + count - before, time.monotonic() - started_s))

        while total < self._plan.tokens:
            texts = self.shard(index, self._plan.tokens - total, partial(on_written, total))
            try:
                write_shard(self._out / SAMPLES, index, texts)
            except OSError as error:
                raise OutriderError(f"--out: cannot write samples to {self._out}: {error.strerror or error}") from None
            index += 1
            total += sum(text.num_output for text in texts)

    def shard(self, index: int, missing_tokens: int, on_written: Callable[[int], None]) -> list[Text]:
        """The texts of one shard, for the last ones as many as it takes when all reach their longest.

        ``on_written`` is told the number of tokens so far.
        """
        num_texts = min(SHARD_TEXTS, max(LEAST_TEXTS, -(-missing_tokens // self._plan.output_tokens)))
        prompts = self._prompts(index, num_texts)
        seeds = random.Random(f"{self._plan.seed}/{index}/seeds")
        params = [self._params(self._plan.output_tokens, seeds, logprobs=TOP_K) for _ in prompts]
        written = self._generate(f"shard-{index}", prompts, params, on_written)
        return [Text.of(prompt, output) for prompt, output in zip(prompts, written, strict=True) if output]

    def _prompts(self, index: int, count: int) -> list[tuple[int, ...]]:
        """Of every kind alike: put together, made up by the target itself, and the user's own."""
        draw = random.Random(f"{self._plan.seed}/{index}/prompts")
        num_own = count // 3 if self._own_prompts else 0
        num_made_up = (count - num_own) // 2
        own = [draw.choice(self._own_prompts) for _ in range(num_own)]
        built_in = islice(endless(self._plan.seed, index), count - num_own - num_made_up)
        return [*own, *(self._encode(text) for text in built_in), *self._made_up(index, num_made_up, draw)]

    def _made_up(self, index: int, count: int, draw: random.Random) -> list[tuple[int, ...]]:
        """Questions that the target asks itself; of a model without chats texts that begin with any token."""
        if not self._has_template:
            return [(draw.randrange(self._engine.info.vocab_size),) for _ in range(count)]
        tokenizer = self._engine.tokenizer
        messages = [{"role": "user", "content": MARK}]
        before = str(tokenizer.apply_chat_template(messages, tokenize=False)).partition(MARK)[0]
        start = tuple(tokenizer.encode(before, add_special_tokens=False)) or self._encode("Hello")
        params = [self._params(QUESTION_TOKENS, draw) for _ in range(count)]
        written = self._generate(f"questions-{index}", [start] * count, params)
        decoded = (tokenizer.decode([t.token_id for t in output], skip_special_tokens=True).strip() for output in written)
        return [self._encode(text or "Hello") for text in decoded]

    def _params(self, max_tokens: int, draw: random.Random, logprobs: int = 0) -> SamplingParams:
        return SamplingParams(
            temperature=self._plan.temperature, max_tokens=max_tokens, seed=draw.getrandbits(63), logprobs=logprobs
        )

    def _generate(
        self,
        name: str,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        on_written: Callable[[int], None] = lambda count: None,
    ) -> list[list[TokenLogprob]]:
        requests = [
            GenerateRequest(request_id=f"{name}-{i}", prompt_ids=ids, params=own)
            for i, (ids, own) in enumerate(zip(prompts, params, strict=True))
        ]
        written: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in requests}
        num_written = 0
        for delta in self._engine.generate(requests, FixedDepth(0)):
            if delta.error is not None:
                raise OutriderError(f"the target cannot be sampled: {delta.error}")
            written[delta.request_id] += delta.logprobs or ()
            num_written += len(delta.token_ids)
            on_written(num_written)
        return list(written.values())

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._engine.encode(text, chat=self._has_template))

    def _encode_own(self, number: int, text: str) -> tuple[int, ...]:
        ids = self._encode(text)
        if not 0 < len(ids) <= MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"--prompts: prompt {number} has {len(ids)} tokens as a chat; 1 to {MAX_PROMPT_TOKENS} are possible"
            )
        return ids

"""transformers on the same weights, dtype, device and threads: `generate`, assisted generation, continuous batching."""

import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from deployments.bench.arms import Arm, Run, Task, Text
from engine.config import OutriderConfig
from engine.models import load_model

LOOKUP_TOKENS = 4
"""Tokens that prompt lookup proposes, which has no default."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configurations of mixtures of experts name their number."""
PAGE_SIZE = 256
"""transformers' own default."""
RESULT_TIMEOUT_S = 1.0
"""Longest wait before it is checked that continuous batching still runs."""


class Peer:
    """A target of transformers, loaded once for all its arms, which go on after the end of a text as ours do."""

    def __init__(self, config: OutriderConfig):
        self._config = config
        self.model: Any = _endless(
            load_model(config.target.model, dtype=config.target.dtype, device=config.target.device).model
        )

    @property
    def bytes_per_step(self) -> int | None:
        """Bytes of weights that a step of one token must read: tied ones once, of an untied input embedding nothing but a row.

        None for mixtures of experts, whose steps read a share that depends on the text.
        """
        config = self.model.config.get_text_config()
        if any(getattr(config, name, None) for name in EXPERT_COUNTS):
            return None
        embedding = self.model.get_input_embeddings().weight
        total = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        head = self.model.get_output_embeddings()
        tied = head is not None and head.weight is embedding
        return int(total) if tied else int(total - embedding.numel() * embedding.element_size())

    def plain(self, batch: int) -> Arm:
        """`generate`; several prompts are padded on the left."""
        return self._arm("transformers", batch, {})

    def assisted(self) -> Arm:
        """Assisted generation with the configured draft model in transformers' own settings, or with prompt lookup."""
        draft = self._config.draft
        if draft.model is None:
            return self._arm("transformers prompt lookup", 1, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})
        dtype = "auto" if draft.dtype == "int8" else draft.dtype  # transformers has no int8 of its own for any device
        assistant = _endless(load_model(draft.model, dtype=dtype, device=draft.device, field="draft.model").model)
        return self._arm("transformers assisted", 1, {"assistant_model": assistant})

    def continuous(self, batch: int, max_batch: int, max_length: int) -> Arm:
        """Continuous batching without prefix sharing; one KV cache for all arms, of ``max_batch`` texts of ``max_length``."""
        cache = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=max_batch * (-(-max_length // PAGE_SIZE) + 1),
            max_batch_tokens=self._config.lanes.prefill_tokens + max_batch,
            max_requests_per_batch=max_batch,
            allow_block_sharing=False,
        )
        return Arm("transformers continuous batching", batch, lambda task: self._continue(task, cache), is_peer=True)

    def _arm(self, name: str, batch: int, options: dict[str, Any]) -> Arm:
        def answer(task: Task) -> Run:
            ids, mask = _left_padded(task.prompts)
            started_s = time.perf_counter()
            with torch.inference_mode():
                output = self.model.generate(
                    ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    do_sample=False,
                    max_new_tokens=task.num_tokens,
                    **options,
                )
            texts = tuple(tuple(row) for row in output[:, ids.shape[1] :].tolist())
            return _run(texts, time.perf_counter() - started_s, task)

        return Arm(name, batch, answer, is_peer=True)

    @torch.inference_mode()
    def _continue(self, task: Task, cache: ContinuousBatchingConfig) -> Run:
        generation = GenerationConfig(do_sample=False, max_new_tokens=task.num_tokens, eos_token_id=-1, pad_token_id=0)
        manager = self.model.init_continuous_batching(generation_config=generation, continuous_batching_config=cache)
        manager.start()
        try:
            started_s = time.perf_counter()
            order = manager.add_requests([list(prompt) for prompt in task.prompts], max_new_tokens=task.num_tokens)
            results = _collect(manager, len(order))
            elapsed_s = time.perf_counter() - started_s
        finally:
            manager.stop(keep_for_next_session=True)
        return _run(tuple(results[request_id] for request_id in order), elapsed_s, task)


def _collect(manager: Any, count: int) -> dict[str, Text]:
    results: dict[str, Text] = {}
    while len(results) < count:
        result = manager.get_result(timeout=RESULT_TIMEOUT_S)
        if result is not None and result.error is not None:
            raise RuntimeError(str(result.error))
        if result is not None and result.is_finished():
            results[result.request_id] = tuple(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("its thread ended before the requests did")
    return results


def _run(texts: tuple[Text, ...], seconds: float, task: Task) -> Run:
    lengths = {len(text) for text in texts}
    if lengths != {task.num_tokens}:
        raise RuntimeError(f"it made {sorted(lengths)} tokens instead of {task.num_tokens}")
    return Run(sum(map(len, texts)), seconds, texts)


def _endless(model: Any) -> Any:
    """No end of text, and none of the sampling settings that a model may bring."""
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def _left_padded(prompts: tuple[Text, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, int64 [B, longest]."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)

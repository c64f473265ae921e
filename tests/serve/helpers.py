"""What several tests of this tier need."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def wait_until(look: Callable[[], T], good: Callable[[T], bool], timeout_s: float, what: str) -> T:
    """Poll until ``good(look())``; fails with the last value seen."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = look()
        if good(value):
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s, last seen {value!r}")
        time.sleep(0.05)


def drafted(answer: dict[str, Any]) -> int:
    """Draft tokens that were verified."""
    details = answer["usage"]["completion_tokens_details"]
    count: int = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    return count


def write_emulation(file: Path, query: str) -> None:
    """From now on, emulated models that follow ``file`` are as ``query`` says."""
    new = file.with_name("new")
    new.write_text(f"emulated:free?step_ms=5&{query}")
    os.replace(new, file)


def write_random_draft(folder: Path, model: str) -> Path:
    """A tiny model with random weights and the tokenizer of ``model``: hardly anything it proposes is accepted."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.models import load_tokenizer

    loaded = load_tokenizer(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=loaded.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=loaded.max_context,
        eos_token_id=loaded.eos_token_ids[0],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def write_untrained_head(folder: Path, model: str) -> Path:
    """A prediction head for a model, that drafts nothing right but works: in ``folder``, over 512 ids."""
    from engine.models import load_model
    from engine.propose.heads.eagle import EagleHead

    loaded = load_model(model)
    embedding = loaded.model.get_input_embeddings().weight.detach()
    EagleHead.untrained(loaded.config, embedding, draft_ids=range(512)).to(loaded.dtype).save(folder)
    return folder

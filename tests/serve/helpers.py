"""What several tests of this tier need."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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

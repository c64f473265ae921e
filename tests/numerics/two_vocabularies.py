"""A target and a draft whose tokenizers differ: both byte-level BPE, trained here on different texts; tiny random models."""

import random
from pathlib import Path

import torch
import transformers
from tiny_models import FAMILIES, SMALL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.models import LoadedTokenizer

WORDS = ["the", "cat", "sat", "on", "mat", "and", "then", "it", "ran", "hills", "some", "cold", "wind", "blew", "all", "night"]
TARGET_TEXT = [" ".join(WORDS), "sat on the mat", "the hills ran on", "cold cold wind"] * 3
DRAFT_TEXT = [" ".join(reversed(WORDS)), "then it blew", "some cats and mats", "night over night"] * 3


def trained_tokenizer(texts: list[str], num_tokens: int, specials: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; the last of the special tokens ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[-1])


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str = "llama", seed: int = 1) -> Path:
    """A random model for a tokenizer, as a Hugging Face folder."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "head_dim": 16}
    fields = {**SMALL, **FAMILIES[family], **sizes}
    config = transformers.AutoConfig.for_model(family, **fields)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_pair(folder: Path, family: str = "llama") -> tuple[Path, Path]:
    """Folders of a target and of a smaller draft; both know <user> and <eos>, by other ids."""
    target = trained_tokenizer(TARGET_TEXT, 330, ["<pad>", "<user>", "<eos>"])
    draft = trained_tokenizer(DRAFT_TEXT, 285, ["<user>", "<other>", "<more>", "<eos>"])
    return write_model(folder / "target", target), write_model(folder / "draft", draft, family, seed=2)


def random_text(rng: random.Random, target: LoadedTokenizer, num_words: int) -> list[int]:
    """Target ids of words, other characters and special tokens, in any order."""
    words = [*WORDS, "catmat", "ö", "🙂", "  ", "\n", "<user>"]
    text = " ".join(rng.choice(words) for _ in range(num_words))
    return list(target.tokenizer.encode(text, add_special_tokens=False))

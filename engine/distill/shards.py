"""Texts that the target wrote, with its own log-probabilities, in files that are written whole or not at all."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from engine.distill.files import disk_errors
from engine.errors import OutriderError
from engine.types import TokenLogprob

TOP_K = 20
"""Likeliest tokens that are stored with their log-probabilities, per position: as many as the engine reports."""
BYTES_PER_TOKEN = 4 + TOP_K * (4 + 4)
MOST_TOKENS = 1 << 62
VALIDATION_EVERY = 20
"""One text in so many is never trained on."""
NAMES = ("tokens", "lengths", "prompt_lengths", "top_ids", "top_logprobs")


@dataclass(frozen=True)
class StoredStates:
    """Where the target's hidden states over one text are on disk (`engine.distill.states`)."""

    path: Path
    start: int
    """First row of the text in the file."""
    end: int


@dataclass(frozen=True)
class Text:
    """One prompt and what the target wrote after it."""

    tokens: npt.NDArray[np.int32]
    """[L]: prompt and output."""
    prompt_length: int
    top_ids: npt.NDArray[np.int32]
    """[L - prompt_length, TOP_K]: the target's likeliest tokens at every position of the output, most likely first."""
    top_logprobs: npt.NDArray[np.float32]
    """The same shape: natural logarithms, of the distribution at temperature 1."""
    states: StoredStates | None = None
    """Of all its tokens, for students that read them."""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], output: Sequence[TokenLogprob]) -> "Text":
        """From what the engine reports; a vocabulary below `TOP_K` is filled up with id 0 at probability 0."""
        ids = np.zeros((len(output), TOP_K), np.int32)
        logprobs = np.full((len(output), TOP_K), -np.inf, np.float32)
        for row, token in enumerate(output):
            top = token.top[:TOP_K]
            ids[row, : len(top)] = [token_id for token_id, _ in top]
            logprobs[row, : len(top)] = [logprob for _, logprob in top]
        tokens = np.array([*prompt_ids, *(token.token_id for token in output)], np.int32)
        return cls(tokens, len(prompt_ids), ids, logprobs)

    @property
    def num_output(self) -> int:
        """Tokens that the target wrote."""
        return len(self.tokens) - self.prompt_length


def shard_path(folder: Path, index: int) -> Path:
    """Where shard ``index`` is, or will be."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, texts: Sequence[Text]) -> None:
    """Store texts under their final name only when all of them are on disk. Raises OSError."""
    path = shard_path(folder, index)
    partial = path.with_suffix(".partial")
    arrays = (
        np.concatenate([text.tokens for text in texts]),
        np.array([len(text.tokens) for text in texts], np.int32),
        np.array([text.prompt_length for text in texts], np.int32),
        np.concatenate([text.top_ids for text in texts]),
        np.concatenate([text.top_logprobs for text in texts]),
    )
    with disk_errors():
        save_file(dict(zip(NAMES, arrays, strict=True)), partial)
    os.replace(partial, path)


def read_shard(folder: Path, index: int) -> list[Text]:
    """The texts of one shard. Raises `OutriderError` for a file that is damaged or no shard."""
    path = shard_path(folder, index)
    try:
        arrays = load_file(path)
        tokens, lengths, prompt_lengths, top_ids, top_logprobs = (arrays[name] for name in NAMES)
    except (SafetensorError, KeyError) as error:
        raise OutriderError(f"{path} is damaged ({error}): delete it, and --resume samples it again") from None
    ends = np.cumsum(lengths)
    output_ends = np.cumsum(lengths - prompt_lengths)
    return [
        Text(
            tokens[end - length : end],
            int(prompt_length),
            top_ids[output_end - (length - prompt_length) : output_end],
            top_logprobs[output_end - (length - prompt_length) : output_end],
        )
        for end, length, prompt_length, output_end in zip(ends, lengths, prompt_lengths, output_ends, strict=True)
    ]


def stored_texts(folder: Path, tokens: int) -> Iterator[list[Text]]:
    """Complete shards in order, until the target has written ``tokens`` in them. Raises `OutriderError` for a damaged one."""
    index, total = 0, 0
    while total < tokens and shard_path(folder, index).is_file():
        texts = read_shard(folder, index)
        yield texts
        total += sum(text.num_output for text in texts)
        index += 1


def num_stored(folder: Path, tokens: int | None = None) -> tuple[int, int]:
    """(shards, tokens that the target wrote) of `stored_texts`; without ``tokens`` of all that is there."""
    counts = [
        sum(text.num_output for text in texts) for texts in stored_texts(folder, MOST_TOKENS if tokens is None else tokens)
    ]
    return len(counts), sum(counts)


def split(texts: Iterable[Text]) -> tuple[list[Text], list[Text]]:
    """(texts to train on, texts to validate on), the same ones in every run; raises `OutriderError` when there are too few."""
    numbered = list(enumerate(texts))
    train = [text for index, text in numbered if index % VALIDATION_EVERY]
    held_out = [text for index, text in numbered if index % VALIDATION_EVERY == 0]
    if not train:
        raise OutriderError("--tokens is too small: at least two texts are needed, one to train on and one to validate on")
    return train, held_out

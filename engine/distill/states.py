"""The target's hidden states over the texts of a shard, in a file of their own: computed once, read in every pass.

A pass of the target costs more than training a head of one layer does. The file stays mapped by the system, not in memory.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.distill.files import disk_errors
from engine.distill.shards import StoredStates, Text
from engine.errors import OutriderError

NAME = "states"


def states_path(folder: Path, index: int) -> Path:
    """Where those of shard ``index`` are, or will be."""
    return folder / f"states-{index:05d}.safetensors"


def write_states(folder: Path, index: int, rows: Sequence[Tensor]) -> None:
    """Store [L, H * layers] per text under the final name only when all of them are on disk. Raises OSError."""
    path = states_path(folder, index)
    partial = path.with_suffix(".partial")
    states = torch.cat(list(rows)).cpu().contiguous()
    with disk_errors():
        save_file({NAME: states}, partial)
    os.replace(partial, path)


def with_states(folder: Path, index: int, texts: Sequence[Text]) -> list[Text]:
    """The texts of a shard with the places of their states. Raises `OutriderError` for a file that is not of these texts."""
    path = states_path(folder, index)
    num_tokens = sum(len(text.tokens) for text in texts)
    try:
        with safe_open(path, framework="pt") as opened:
            num_rows = opened.get_slice(NAME).get_shape()[0]
        if num_rows != num_tokens:
            raise ValueError(f"{num_rows} rows for {num_tokens} tokens")
    except (OSError, SafetensorError, ValueError) as error:
        raise OutriderError(f"{path} is damaged ({error}): delete it, and --resume computes it again") from None
    placed, start = [], 0
    for text in texts:
        end = start + len(text.tokens)
        placed.append(replace(text, states=StoredStates(path, start, end)))
        start = end
    return placed


def read_states(text: Text) -> Tensor:
    """[L, H * layers] on the CPU, in the dtype that the target computed in. Raises ValueError for a text without any."""
    stored = text.states
    if stored is None:
        raise ValueError("the text has no hidden states")
    with safe_open(stored.path, framework="pt") as opened:
        rows: Tensor = opened.get_slice(NAME)[stored.start : stored.end]
    return rows

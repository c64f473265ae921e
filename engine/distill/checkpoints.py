"""Where a training run stands, on disk: each checkpoint is a folder that is there as a whole or not at all."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.distill.files import disk_errors
from engine.errors import OutriderError

KEPT = 2
"""Newest checkpoints that stay, beside the best one."""
WEIGHTS, STATE = "weights.safetensors", "state.pt"


def save_checkpoint(folder: Path, step: int, module: nn.Module, state: Mapping[str, Any], *, best_step: int) -> None:
    """Write the trained weights and ``state`` (tensors and plain values), then delete what is neither new nor the best.

    Raises OSError.
    """
    path = _path(folder, step)
    partial = path.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with disk_errors():
        save_file(trained_weights(module), partial / WEIGHTS)
    with disk_errors(RuntimeError):  # what torch's own writer raises
        torch.save(dict(state), partial / STATE)
    shutil.rmtree(path, ignore_errors=True)  # of a run that went on from an older one
    os.replace(partial, path)
    kept = {*checkpoint_steps(folder)[-KEPT:], best_step, step}
    for old in set(checkpoint_steps(folder)) - kept:
        shutil.rmtree(_path(folder, old))


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints, in order."""
    names = (path.name for path in folder.glob("step-*") if path.suffix != ".partial")
    return sorted(int(name.removeprefix("step-")) for name in names)


def load_weights(folder: Path, step: int, module: nn.Module) -> None:
    """Put a checkpoint's weights into the module. Raises `OutriderError` when it is damaged or of another shape."""
    path = _path(folder, step)
    own = _trained_parameters(module)
    try:
        stored = load_file(path / WEIGHTS)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(stored[name])
    except Exception as error:
        raise OutriderError(f"{path} is damaged ({error}): delete it, and --resume goes on from the one before") from None


def load_state(folder: Path, step: int) -> dict[str, Any]:
    """What was stored with the weights. Raises `OutriderError` when it is damaged."""
    path = _path(folder, step)
    try:
        return dict(torch.load(path / STATE, map_location="cpu", weights_only=True))
    except Exception as error:
        raise OutriderError(f"{path} is damaged ({error}): delete it, and --resume goes on from the one before") from None


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that change, by name; the others are the target's."""
    return {name: parameter.detach().contiguous() for name, parameter in _trained_parameters(module).items()}


def _trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"

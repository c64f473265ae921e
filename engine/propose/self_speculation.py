"""Cheaper versions of the target as its draft: no training, the same vocabulary, any architecture that the target may have."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from engine.errors import ConfigError
from engine.models import LoadedModel
from engine.propose.draft_model import DraftModel
from engine.propose.layer_skip import choose_layers, leave_out
from engine.verify.ragged import Weights

COPIES: dict[str, Weights] = {"self-int8": "int8", "self-int4": "int4", "self-fp8": "fp8"}
"""Quantised copies of the target, by ``draft.source``."""
INT8_COST = 0.5
"""Of a weight in int8 against one in 16 bits, for what reads weights."""
FP8_CAPABILITY = (8, 9)
"""Compute capability from which GPUs multiply float8."""


def build_self_copy(loaded: LoadedModel, source: str, **options: Any) -> DraftModel:
    """Quantise a freshly loaded copy of the target, which is taken over, as one of `COPIES`; ``options`` as of `DraftModel`.

    Raises `ConfigError` for kernels that the device lacks, and `ModelError` as `DraftModel`.
    """
    check_kernels(source, torch.device(loaded.device))
    return DraftModel(loaded, weights=COPIES[source], name=source, **options)


def build_self_int8(loaded: LoadedModel, **options: Any) -> DraftModel:
    """As `build_self_copy` of "self-int8"."""
    return build_self_copy(loaded, "self-int8", **options)


def build_layer_skip(
    loaded: LoadedModel, skip_layers: Sequence[int] | Literal["auto"], *, weights: Weights = "exact", **options: Any
) -> DraftModel:
    """A freshly loaded copy of the target without some decoder layers, by index, or without those of `choose_layers`.

    The copy is taken over. Raises `ConfigError` for layers that are not there, `ModelError` for an architecture whose layers
    cannot be left out, and as `DraftModel`.
    """
    if skip_layers == "auto":
        skip_layers = choose_layers(loaded, weight_cost=1.0 if weights == "exact" else INT8_COST).layers
    leave_out(loaded, skip_layers)
    return DraftModel(loaded, weights=weights, name="layer-skip", **options)


def check_kernels(source: str, device: torch.device) -> None:
    """Raises `ConfigError` where a device has no kernels for one of `COPIES`."""
    if source == "self-fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY):
        raise ConfigError(
            f"draft.source 'self-fp8' needs a GPU that multiplies float8 (compute capability 8.9: Ada, Hopper and later), but "
            f"draft.device is {device}: set draft.source to self-int8"
        )
    if source == "self-int4" and device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"draft.source 'self-int4' has kernels for cpu and cuda, not for {device}: set draft.source to self-int8"
        )

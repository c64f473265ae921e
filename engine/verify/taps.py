"""Hidden states that a forward leaves behind for prediction heads, and who takes them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.propose.base import DraftSource
from engine.types import ModelInfo, SequenceContext


class Taps:
    """The residual stream before some layers, of every row of the last forward.

    Layer 0 is the embedding, layer j what the first j layers made of it, and the number of layers what the final norm gets: as
    ``eagle_aux_hidden_state_layer_ids`` counts in the `speculators` format and in vLLM.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._taken: dict[int, Tensor] = {}
        self._rows: Tensor | None = None

    def take(self, layer: int, x: Tensor) -> None:
        """Keep x [T, H] as it is now, if it is wanted: the caller may go on in the same memory."""
        if layer in self.layers:
            self._taken[layer] = x.clone()

    def put(self, rows: Tensor) -> None:
        """All that is wanted at once: [T, H * number of layers]."""
        self._rows = rows

    def by_chunk(self, lengths: Sequence[int], order: Sequence[int]) -> list[Tensor]:
        """What was taken, per chunk [n, H * number of layers], where chunks of ``lengths`` were packed in ``order``."""
        rows = torch.cat([self._taken[layer] for layer in self.layers], dim=-1) if self._rows is None else self._rows
        self._taken, self._rows = {}, None
        packed = iter(torch.split(rows, [lengths[index] for index in order]))
        found = {index: next(packed) for index in order}
        return [found[index] for index in range(len(lengths))]

    def hook(self, model: Any) -> None:
        """Take from transformers' own layers. Raises `ModelError` where they are not in the usual place."""
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"prediction heads: a {model.config.model_type} model does not say where its layers are")
        for index, layer in enumerate(layers):
            if index in self.layers:
                layer.register_forward_pre_hook(_before(self, index), with_kwargs=True)
        if len(layers) in self.layers:
            layers[-1].register_forward_hook(_after(self, len(layers)))


def _before(taps: Taps, index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        taps.take(index, x[0])

    return hook


def _after(taps: Taps, index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x: Tensor = output[0] if isinstance(output, tuple) else output
        taps.take(index, x[0])

    return hook


class HeadsBeside(DraftSource, Protocol):
    """A source of drafts that lives with the target and is told what its verifies leave behind."""

    @property
    def info(self) -> ModelInfo:
        """Of the head, with its step times."""

    def committed(self, sequence_id: str, context: SequenceContext, ids: Sequence[int], hidden: Tensor) -> None:
        """The target holds ``ids``; ``hidden`` [n, H * number of layers] are the states of the last n of them.

        Those before them are as they were told earlier, or unknown where the target found them in its prefix cache.
        """

    def forget(self, sequence_id: str) -> None:
        """The target forgot the sequence, or begins it anew."""

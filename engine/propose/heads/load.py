"""The head that a configuration names, checked against the target that it is to draft for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models import LoadedModel, LoadedTokenizer, model_folder
from engine.propose.heads.eagle import EagleHead, default_aux_layers, read_config
from engine.propose.heads.mtp import MtpHead, check_brings_mtp
from engine.propose.heads.source import Head
from engine.verify.attention import AttentionSpec, AttentionState


def check_head(name: str | None, target: LoadedTokenizer) -> None:
    """Raises `ModelError` when the head ``name``, or None for the target's own MTP layers, cannot draft for ``target``.

    Reads configurations only.
    """
    if name is None:
        check_brings_mtp(target.name, target.config)
    else:
        check_fits(read_config(model_folder(name, "draft.model")), name, target)


def load_head(name: str | None, loaded: LoadedModel) -> Head:
    """The head ``name``, an alias of nothing but a folder or Hugging Face id; None: the target's own MTP layers.

    ``loaded`` is the target, not taken over yet. Raises `ModelError`.
    """
    if name is None:
        return MtpHead(loaded)
    folder = model_folder(name, "draft.model")
    check_fits(read_config(folder), name, loaded)
    return EagleDrafter(
        EagleHead.from_folder(folder, loaded.model.get_input_embeddings().weight.detach()), Path(name).name, loaded
    )


def check_fits(config: dict[str, Any], name: str, target: LoadedTokenizer) -> None:
    """Raises `ModelError` when hidden size, vocabulary or layers are not the target's."""
    text = target.config.get_text_config()
    layer = config["transformer_layer_config"]
    hidden_size = config.get("target_hidden_size") or layer.get("hidden_size")
    if hidden_size != text.hidden_size:
        raise ModelError(
            f"draft.model {name} reads hidden states of {hidden_size} numbers, those of {target.name} have "
            f"{text.hidden_size}: it is a head for another model"
        )
    if layer.get("vocab_size") != text.vocab_size:
        raise ModelError(
            f"draft.model {name} knows {layer.get('vocab_size')} token ids, {target.name} has {text.vocab_size}: "
            "it is a head for another model"
        )
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and (len(layers) != 3 or not all(0 <= index <= text.num_hidden_layers for index in layers)):
        raise ModelError(
            f"draft.model {name} reads the layers {layers}, but three from 0 to {text.num_hidden_layers} of "
            f"{target.name} are needed"
        )


class EagleDrafter:
    """An EAGLE-3 head as `Head`, in the dtype and on the device of the target."""

    def __init__(self, head: EagleHead, name: str, target: LoadedModel):
        self.name = name
        self.device, self.dtype = torch.device(target.device), target.dtype
        self.layers = head.aux_layers or default_aux_layers(target.config.get_text_config().num_hidden_layers)
        self.fused_size = head.hidden_size
        self._head = head.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        self._spec = AttentionSpec(scaling=head.head_dim**-0.5)

    def fuse(self, hidden: Tensor) -> Tensor:
        """As `Head`."""
        return self._head.fuse(hidden)

    def run(self, hidden: Tensor, state: AttentionState) -> Tensor:
        """As `Head`."""

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return state.forward(query, keys, values, self._spec)

        out: Tensor = self._head(state.batch.tokens, hidden, state.batch.positions, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Head`."""
        return self._head.target_logits(hidden)

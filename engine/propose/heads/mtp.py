"""Multi-token prediction layers that checkpoints bring along (DeepSeek-V3, arXiv 2412.19437; GLM-4.5), loaded by transformers.

Such a layer reads the target's last hidden state, normed, beside the embedding of the next token, and shares embedding and head
with the target. Its result takes the hidden state's place for the token after. The first layer drafts all tokens: checkpoints
of these families have one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from engine.errors import ModelError
from engine.models import LoadedModel
from engine.verify.attention import NAME, AttentionState, run_with

FAMILIES = ("deepseek_v3", "glm4_moe")
"""Values of ``model_type``."""


def check_brings_mtp(name: str, config: Any) -> None:
    """Raises `ModelError` when a model of this configuration brings no layers that are known here."""
    text = config.get_text_config()
    how = "name an EAGLE-3 head by draft.model, or choose another draft.source"
    if text.model_type not in FAMILIES:
        raise ModelError(
            f"draft.source 'heads' without draft.model uses the target's own MTP layers, but a {text.model_type} "
            f"model such as {name} has none that are supported ({', '.join(FAMILIES)} have): {how}"
        )
    if not getattr(text, "num_mtp_layers", 0):
        raise ModelError(f"{name}: its config.json counts no MTP layers (num_nextn_predict_layers): {how}")


class MtpHead:
    """The first MTP layer of a loaded model, which must not be taken over yet. Raises `ModelError` when it is not there."""

    def __init__(self, loaded: LoadedModel):
        check_brings_mtp(loaded.name, loaded.config)
        model = loaded.model
        self.name = f"{loaded.name} (MTP)"
        self.layers = (int(loaded.config.get_text_config().num_hidden_layers),)
        self.device, self.dtype = torch.device(loaded.device), loaded.dtype
        self.fused_size: int = model.config.get_text_config().hidden_size
        # transformers finds the layers by the numbers that they have in the sizes published first.
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\..*" for number in _layer_numbers(loaded.config)]
        try:
            mtp = MtpModel.from_pretrained(model, device_map={"": self.device}).eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise ModelError(f"{loaded.name}: its MTP layers cannot be loaded: {' '.join(str(error).split())[:300]}") from None
        mtp.config._attn_implementation = NAME
        self._mtp = mtp
        self._layer = mtp.layers[0]
        self._embedding = model.get_input_embeddings()
        self._norm = model.get_decoder().norm

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states before its final norm [T, H] -> after it."""
        normed: Tensor = self._norm(hidden)
        return normed

    def run(self, hidden: Tensor, state: AttentionState) -> Tensor:
        """As `engine.propose.heads.source.Head`."""
        embedded, positions = self._embedding(state.batch.tokens)[None], state.batch.positions[None]
        rotation = self._mtp.rotary_emb(embedded, position_ids=positions)
        out: Tensor = run_with(
            state,
            lambda: self._layer(
                embedded, hidden[None], position_embeddings=rotation, attention_mask=None, position_ids=positions, cache=None
            ),
        )
        return out[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """As `engine.propose.heads.source.Head`."""
        logits: Tensor = self._mtp._project_to_logits(hidden)
        return logits


def _layer_numbers(config: Any) -> range:
    """Of the MTP layers in a checkpoint: behind the model's own."""
    text = config.get_text_config()
    return range(text.num_hidden_layers, text.num_hidden_layers + text.num_mtp_layers)

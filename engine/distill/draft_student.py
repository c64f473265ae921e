"""A small model of the Llama architecture with the target's vocabulary, made of the target's own parts where they fit."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.distill.files import disk_errors
from engine.distill.shards import Text
from engine.distill.student import Batch, Losses, distillation_loss, mixed_precision
from engine.errors import ConfigError
from engine.models import LoadedModel

TIED_HEAD = "lm_head.weight"
"""The same tensor as the embedding where a configuration ties them."""
WIDTH_MULTIPLE = 32
"""Rows of the feed-forward layers come in multiples of this, which kernels like."""


class DraftStudent:
    """Trains a whole small model. Its embedding and head stay the target's where they have the target's width.

    They hold most of the weights of a small draft, the target has trained them on far more than can be sampled here, and
    without their gradients a step takes two thirds of the time.
    """

    def __init__(self, model: Any, dtype: torch.dtype):
        self._model = model
        self._dtype = dtype

    @classmethod
    def build(cls, target: LoadedModel, *, layers: int, hidden: int | None, dtype: torch.dtype, seed: int) -> "DraftStudent":
        """A student of a target loaded in float32, on the target's device; ``dtype`` is what the draft is stored in.

        Raises `ConfigError` when the shape is not possible beside this target.
        """
        config = student_config(target.config, layers=layers, hidden=hidden)
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).to(device=target.device, dtype=torch.float32)
        _inherit(model, target.model, config)
        model.generation_config.eos_token_id = list(target.eos_token_ids)
        return cls(model.train(), dtype)

    @property
    def module(self) -> nn.Module:
        """The Llama model."""
        return self._model  # type: ignore[no-any-return]

    def loss(self, texts: Sequence[Text]) -> Losses:
        """Logits are computed only where the target wrote something."""
        batch = Batch.of(texts, self._model.device)
        with mixed_precision(batch.ids.device, self._dtype):
            hidden = self._model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
            logits: Tensor = self._model.lm_head(hidden.flatten(0, 1)[batch.rows])
        return distillation_loss(logits, batch.said)

    def save(self, folder: Path) -> None:
        """Configuration and weights, the latter in the dtype that the device computes in. Raises OSError."""
        config, tied = self._model.config, self._model.config.tie_word_embeddings
        config.dtype, config.architectures = self._dtype, [type(self._model).__name__]
        state = self._model.state_dict()
        kept = {name: tensor.to(self._dtype).contiguous() for name, tensor in state.items() if not (tied and name == TIED_HEAD)}
        with disk_errors():
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        self._model.generation_config.save_pretrained(folder)


def student_config(target: Any, *, layers: int, hidden: int | None) -> Any:
    """The target's shape with fewer layers and, if asked, narrower. Raises `ConfigError` that names the option."""
    text = target.get_text_config()
    if not 0 < layers < text.num_hidden_layers:
        raise ConfigError(f"--layers {layers}: must lie between 1 and {text.num_hidden_layers - 1}, one below the target's")
    width = hidden or text.hidden_size
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if width > text.hidden_size or width % head_dim:
        raise ConfigError(
            f"--hidden {width}: must be a multiple of the heads' {head_dim} and at most the target's {text.hidden_size}"
        )
    same = width == text.hidden_size
    heads = text.num_attention_heads if same else width // head_dim
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return transformers.LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=inner if same else _rounded(inner * width / text.hidden_size),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads if same else math.gcd(heads, max(1, heads * kv_heads // text.num_attention_heads)),
        head_dim=head_dim,
        max_position_embeddings=getattr(text, "max_position_embeddings", 2048),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=_rope(text),
        tie_word_embeddings=text.tie_word_embeddings,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )


def chosen_layers(layers: int, of: int) -> list[int]:
    """The target's first and last layers: those in the middle change the least (Gromov et al. 2024, arXiv 2403.17887)."""
    first = (layers + 1) // 2
    return [*range(first), *range(of - layers + first, of)]


def _rounded(width: float) -> int:
    return max(WIDTH_MULTIPLE, round(width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def _rope(text: Any) -> dict[str, Any]:
    parameters = getattr(text, "rope_parameters", None) or {}
    is_flat = "rope_type" in parameters  # some families have one table for each kind of layer
    return dict(parameters) if is_flat else {"rope_type": "default", "rope_theta": getattr(text, "rope_theta", 10000.0)}


@torch.no_grad()
def _inherit(model: Any, target: Any, config: Any) -> None:
    """Copy from the target what fits. A narrower embedding is the target's, projected on its widest directions."""
    embedding = target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight
    own_embedding, own_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    same = embedding.shape == own_embedding.shape
    basis = None if same else _widest_directions(embedding, config.hidden_size)
    for own, theirs in ((own_embedding, embedding), (own_head, head)):
        own.copy_(theirs if basis is None else theirs @ basis)
        own.requires_grad_(not same)
    if not same:
        return
    inner = target.get_decoder()
    if getattr(inner, "norm", None) is not None:
        _copy_fitting(model.model.norm, inner.norm)
    theirs = getattr(inner, "layers", ())
    if len(theirs) >= config.num_hidden_layers:
        for own, index in zip(model.model.layers, chosen_layers(config.num_hidden_layers, len(theirs)), strict=True):
            _copy_fitting(own, theirs[index])


def _copy_fitting(own: nn.Module, theirs: nn.Module) -> None:
    """Every tensor that has the same name and shape on both sides."""
    available = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        if name in available and available[name].shape == parameter.shape:
            parameter.copy_(available[name])


def _widest_directions(embedding: Tensor, width: int) -> Tensor:
    """[D, width]: eigenvectors of the embedding's second moments with the largest eigenvalues."""
    vectors: Tensor = torch.linalg.eigh(embedding.T @ embedding).eigenvectors
    return vectors[:, -width:]

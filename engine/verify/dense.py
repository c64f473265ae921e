"""A lean forward of the plain dense families: RMSNorm, rotary grouped-query attention, SwiGLU; Llama, Mistral, Qwen2, Qwen3.

transformers runs a step of such a model in some two thousand small operations, which on CPU take as long as the products. Here
it is a few hundred. Whether the result is the same is checked on the loaded weights (`engine.verify.ragged`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.verify.attention import AttentionSpec, AttentionState, Window
from engine.verify.linear import MakeLinear, PlainRMSNorm, fused_linear
from engine.verify.taps import Taps

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type``."""

Map = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Layer:
    """One decoder layer as functions of rows [T, ...]. Those that end in ``add`` take the residual first and return the sum."""

    attention_norm: Map
    qkv: Map
    head_norms: tuple[Map, Map] | None
    """Over each head of q and of k; Qwen3."""
    attention: AttentionSpec
    attention_add: Callable[[Tensor, Tensor], Tensor]
    mlp_norm: Map
    gate_up: Map
    mlp_add: Callable[[Tensor, Tensor], Tensor]


class DenseModel:
    """Weights of one model in the form that `forward` wants them; takes nothing from the model but its rotary embedding."""

    def __init__(self, model: nn.Module, make: MakeLinear, activations: torch.dtype, taps: Taps | None = None):
        """``activations``: dtype between the layers, and of what ``taps`` get. The KV cache has the dtype of the model."""
        decoder: Any = model.model
        config: Any = model.config
        self._dtype = activations
        self._taps = taps
        self._cache_dtype: torch.dtype = decoder.embed_tokens.weight.dtype
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._rotary = decoder.rotary_emb
        attention = decoder.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._num_heads: int = attention.q_proj.out_features // self._head_dim
        self._num_kv: int = attention.k_proj.out_features // self._head_dim
        self._layers = [self._layer(layer, config, make) for layer in decoder.layers]
        self._norm = self._plain_norm(decoder.norm)
        head: Any = model.lm_head
        self._head = make(head.weight, head.bias).forward
        # rotate_half(x) is (-x2, x1): the halves swapped, times these signs.
        self._signs = torch.tensor([[-1.0], [1.0]], dtype=activations, device=self._embedding.device)

    @staticmethod
    def supports(model: nn.Module) -> bool:
        """Whether the model says that it is one of `FAMILIES`, with their usual activation and plain weights."""
        config: Any = model.config
        quantised = getattr(config, "quantization_config", None) is not None
        return config.model_type in FAMILIES and config.hidden_act == "silu" and not quantised

    def forward(self, state: AttentionState) -> Tensor:
        """Logits [R, V] of the rows that the batch asks for."""
        batch = state.batch
        x = nn.functional.embedding(batch.tokens, self._embedding).to(self._dtype)
        cos, sin = self._rotation(x, batch.positions)
        for index, layer in enumerate(self._layers):
            if self._taps is not None:
                self._taps.take(index, x)
            x = layer.attention_add(x, self._attend(layer, layer.attention_norm(x), cos, sin, state))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = layer.mlp_add(x, nn.functional.silu(gate).mul_(up))
        if self._taps is not None:
            self._taps.take(len(self._layers), x)
        return self._head(self._norm(x.index_select(0, batch.logit_rows)))

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin per row, [T, 1, 2, D / 2]."""
        cos, sin = self._rotary(x, positions.unsqueeze(0))
        shape = (-1, 1, 2, self._head_dim // 2)
        return cos.view(shape), sin.view(shape) * self._signs

    def _attend(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, state: AttentionState) -> Tensor:
        """Heads side by side, [T, Hq * D]."""
        num_rotated = self._num_heads + self._num_kv
        heads = layer.qkv(x).view(len(x), -1, self._head_dim)
        rotated = heads[:, :num_rotated]
        if layer.head_norms is not None:
            parts = torch.split(rotated, [self._num_heads, self._num_kv], dim=1)
            for part, norm in zip(parts, layer.head_norms, strict=True):
                part.copy_(norm(part))
        halves = rotated.view(len(x), num_rotated, 2, -1)
        swapped = halves.flip(2)
        halves.mul_(cos).addcmul_(swapped, sin)
        heads = heads.to(self._cache_dtype)
        query, keys_values = torch.split(heads, [self._num_heads, 2 * self._num_kv], dim=1)
        return state.forward_both(query, keys_values.transpose(0, 1), layer.attention).to(self._dtype)

    def _layer(self, layer: Any, config: Any, make: MakeLinear) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        attention_out = make(attention.o_proj.weight, attention.o_proj.bias)
        mlp_out = make(mlp.down_proj.weight, mlp.down_proj.bias)
        return Layer(
            attention_norm=self._plain_norm(layer.input_layernorm),
            qkv=fused_linear([attention.q_proj, attention.k_proj, attention.v_proj], make).forward,
            head_norms=self._head_norms(attention),
            attention=AttentionSpec(attention.scaling, Window(window_size(config, attention.layer_idx))),
            attention_add=attention_out.add_to,
            mlp_norm=self._plain_norm(layer.post_attention_layernorm),
            gate_up=fused_linear([mlp.gate_proj, mlp.up_proj], make).forward,
            mlp_add=mlp_out.add_to,
        )

    def _plain_norm(self, norm: Any) -> Map:
        return PlainRMSNorm(norm.weight.to(self._dtype), norm.variance_epsilon).forward

    def _head_norms(self, attention: Any) -> tuple[Map, Map] | None:
        if not hasattr(attention, "q_norm"):
            return None
        return self._plain_norm(attention.q_norm), self._plain_norm(attention.k_norm)


def window_size(config: Any, layer: int) -> int | None:
    """Size of a layer's sliding window. Families with layer types slide only where these say so."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)

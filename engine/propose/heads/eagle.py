"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) in the checkpoint format of `speculators`.

Hidden states of three of the target's layers are fused into one vector per token. One decoder layer reads it beside the
embedding of the *next* token and gives the hidden state from which the token after that is predicted; drafting on, that hidden
state takes the place of the fused one. Row i of a text is (fused states of token i, embedding of token i + 1) -> token i + 2.

The vocabulary may be cut: ``lm_head`` has a row per draft id, ``d2t`` [draft ids] is what must be added to a draft id to get
the target's, ``t2d`` [target ids] says which of these can be drafted.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import ModelError

FAMILIES = ("llama", "qwen3")
"""Of the decoder layer: they differ in the norms over the heads of q and k, which Qwen3 has."""
NUM_FUSED = 3
"""Layers of the target whose hidden states are fused."""
UNSUPPORTED = ("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting")
"""Switches of the format that change the computation and are not known here."""
SHARED_WEIGHTS = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
"""Prefixes of weights that trainers may leave in a checkpoint and drafting does not need."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [T, Hq, D], keys [Hkv, T, D], values [Hkv, T, D]) -> heads side by side [T, Hq * D]; positions are in the rotation."""


def causal_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`Attend` over one text from its first row on."""
    out = nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> the same shape and dtype."""
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.head_dim: int = config.head_dim
        bias = bool(getattr(config, "attention_bias", False))
        heads, kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, heads, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        self.has_norms = config.model_type == "qwen3"
        if self.has_norms:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [T, 2 H] -> [T, H]."""
        query, keys, values = (map_(x).view(len(x), -1, self.head_dim) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norms:
            query, keys = self.q_norm(query), self.k_norm(keys)
        query, keys = _rotated(query, rotation), _rotated(keys, rotation)
        out: Tensor = self.o_proj(attend(query, keys.transpose(0, 1), values.transpose(0, 1)))
        return out


class _Mlp(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Any, *, norm_before_residual: bool):
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedding: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """embedding, hidden [T, H] -> [T, H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat((self.input_layernorm(embedding), normed), dim=-1), rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """One EAGLE-3 head; ``config`` is its ``config.json`` (`head_config` makes one), checked here.

    Raises `ModelError` for a configuration that is not of this format or that asks for what is not known here.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: dict[str, Any], name: str = "head"):
        super().__init__()
        self.name = name
        self.config = config
        layer = _layer_config(config, name)
        self.hidden_size: int = layer.hidden_size
        self.target_hidden_size: int = config.get("target_hidden_size") or layer.hidden_size
        self.vocab_size: int = layer.vocab_size
        """Ids of the target that have an embedding."""
        self.draft_vocab_size: int = config["draft_vocab_size"]
        self.num_kv_heads: int = layer.num_key_value_heads
        self.head_dim: int = layer.head_dim
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.fc = nn.Linear(NUM_FUSED * self.target_hidden_size, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(layer, norm_before_residual=bool(config.get("norm_before_residual")))])
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, self.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        cut = self.draft_vocab_size != self.vocab_size
        self.register_buffer("d2t", torch.zeros(self.draft_vocab_size, dtype=torch.int64) if cut else None)
        self.register_buffer("t2d", torch.zeros(self.vocab_size, dtype=torch.bool) if cut else None)

    # --- computing ----------------------------------------------------------------------------------------------------------

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [T, 3 * Ht], layer by layer side by side -> [T, H]."""
        fused: Tensor = self.fc(hidden)
        return fused

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend = causal_attention) -> Tensor:
        """Rows of texts: the *next* token's id int64 [T], fused states or the last step's result [T, H], int64 [T] -> [T, H].

        For training on one text with ids t [n] and hidden states h [n, 3 * Ht], feed ``t[1:]``, ``fuse(h[:-1])`` and
        ``arange(n - 1)``: row i then predicts t[i + 2].
        """
        rotation = self._rotation(hidden, positions)
        out: Tensor = self.layers[0](self.embed_tokens(ids).to(hidden.dtype), hidden, rotation, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave [R, H] -> logits of the draft ids [R, draft_vocab_size]; train them against ``draft_ids``."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The same over the target's ids, float32 [R, vocab_size]: -inf for those that cannot be drafted."""
        logits = self.logits(hidden).float()
        if self.d2t is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return spread.index_copy_(1, self.draft_ids, logits)

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each draft id, int64 [draft_vocab_size]."""
        ids = torch.arange(self.draft_vocab_size, device=self.lm_head.weight.device)
        return ids if self.d2t is None else ids + self.d2t

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """Layers of the target whose hidden states are fused, as `engine.verify.taps` counts; None: `default_aux_layers`."""
        layers = self.config.get("eagle_aux_hidden_state_layer_ids")
        return None if layers is None else tuple(layers)

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D]."""
        cos, sin = self.rotary_emb(x, positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    # --- files --------------------------------------------------------------------------------------------------------------

    @classmethod
    def untrained(
        cls, target: Any, embedding: Tensor, *, draft_ids: Sequence[int] | None = None, aux_layers: Sequence[int] | None = None
    ) -> "EagleHead":
        """A head for a target with transformers' configuration ``target`` and input embedding [V, H], which is copied.

        ``draft_ids``: the target's ids that can be drafted, for example the most frequent ones; None: all of them. The
        decoder layer has the target's widths. Raises `ModelError` for ids that are not the target's.
        """
        num_draft_ids = None if draft_ids is None else len(set(draft_ids))
        head = cls(head_config(target, num_draft_ids=num_draft_ids, aux_layers=aux_layers))
        with torch.no_grad():
            head.embed_tokens.weight.copy_(embedding)
        head.embed_tokens.weight.requires_grad_(False)
        if draft_ids is not None and head.d2t is not None and head.t2d is not None:
            chosen = torch.tensor(sorted(set(draft_ids)))
            if int(chosen[0]) < 0 or int(chosen[-1]) >= head.vocab_size:
                raise ModelError(f"draft ids must lie between 0 and {head.vocab_size - 1}")
            head.d2t.copy_(chosen - torch.arange(len(chosen)))
            head.t2d[chosen] = True
        return head

    @classmethod
    def from_folder(cls, folder: str | Path, embedding: Tensor | None = None) -> "EagleHead":
        """Read ``config.json`` and the safetensors beside it. ``embedding`` [V, H] is taken where the folder has none.

        Raises `ModelError` when weights are missing, left over or of the wrong shape, and when the id maps disagree.
        """
        folder = Path(folder)
        head = cls(read_config(folder), str(folder))
        weights = _read_weights(folder)
        if "embed_tokens.weight" not in weights and embedding is not None:
            weights["embed_tokens.weight"] = embedding
        head._load(weights)
        return head

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None, with_embedding: bool = True) -> None:
        """Write ``config.json`` and ``model.safetensors``, as `from_folder` reads them; weights in ``dtype`` (None: as is).

        Without the embedding, which is often most of it, `from_folder` needs the target's.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.detach().to(dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in self.state_dict().items()
            if with_embedding or name != "embed_tokens.weight"
        }
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def _load(self, weights: dict[str, Tensor]) -> None:
        wanted = self.state_dict()
        missing, left_over = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        if missing or left_over:
            raise ModelError(
                f"{self.name}: its weights are not those of its config.json: "
                f"missing {', '.join(missing) or 'none'}; left over {', '.join(left_over) or 'none'}"
            )
        for name, tensor in weights.items():
            if tensor.shape != wanted[name].shape:
                raise ModelError(
                    f"{self.name}: {name} is {list(tensor.shape)}, but by config.json it is {list(wanted[name].shape)}"
                )
        self.load_state_dict(weights)
        if self.t2d is not None:
            ids = self.draft_ids
            if (
                int(ids.min()) < 0
                or int(ids.max()) >= self.vocab_size
                or not torch.equal(_marked(ids, self.vocab_size), self.t2d)
            ):
                raise ModelError(f"{self.name}: its maps of ids d2t and t2d do not agree")


def head_config(target: Any, *, num_draft_ids: int | None = None, aux_layers: Sequence[int] | None = None) -> dict[str, Any]:
    """``config.json`` of a head with the widths of a target, of which transformers' configuration is given."""
    text = target.get_text_config()
    heads = text.num_attention_heads
    layer = {
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": text.vocab_size if num_draft_ids is None else num_draft_ids,
        "norm_before_residual": True,
        "target_hidden_size": text.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers or default_aux_layers(text.num_hidden_layers)),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": getattr(target, "name_or_path", "") or None,
                "architectures": target.architectures or [],
            },
        },
    }


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Where a head does not say which layers it reads: an early one, the middle and a late one, as vLLM chooses them."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a head. Raises `ModelError` when it is not one of this format."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: cannot read config.json: {error}") from None
    kind = config.get("speculators_model_type") if isinstance(config, dict) else None
    if kind != "eagle3":
        raise ModelError(
            f"{folder}: not an EAGLE-3 head in the speculators format: speculators_model_type in its config.json is {kind!r}, "
            "expected 'eagle3'; heads in other formats can be converted by `speculators convert`"
        )
    _layer_config(config, str(folder))
    return cast(dict[str, Any], config)


def _layer_config(config: dict[str, Any], name: str) -> Any:
    """transformers' configuration of the decoder layer."""
    fields = config.get("transformer_layer_config")
    if not isinstance(fields, dict) or not isinstance(config.get("draft_vocab_size"), int):
        raise ModelError(f"{name}: config.json needs transformer_layer_config and draft_vocab_size")
    for switch in UNSUPPORTED:
        if config.get(switch):
            raise ModelError(f"{name}: heads with {switch} are not supported")
    family = fields.get("model_type", "llama")
    if family not in FAMILIES:
        raise ModelError(f"{name}: its layer is of type '{family}'; supported: {', '.join(FAMILIES)}")
    try:
        layer = AutoConfig.for_model(family, **{key: value for key, value in fields.items() if key != "model_type"})
    except Exception as error:
        raise ModelError(f"{name}: transformer_layer_config: {' '.join(str(error).split())[:200]}") from None
    if layer.num_hidden_layers != 1 or layer.hidden_act != "silu":
        raise ModelError(
            f"{name}: supported is one layer with silu, but it has {layer.num_hidden_layers} with {layer.hidden_act}"
        )
    if getattr(layer, "head_dim", None) is None:
        layer.head_dim = layer.hidden_size // layer.num_attention_heads
    return layer


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: there is no safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                weights |= {_plain_name(name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise ModelError(f"{file}: {error}") from None
    return {name: weight for name, weight in weights.items() if not name.startswith(SHARED_WEIGHTS)}


def _plain_name(name: str) -> str:
    """The layer has another name in checkpoints of the method's authors."""
    return name.replace("midlayer.", "layers.0.")


def _marked(ids: Tensor, size: int) -> Tensor:
    """bool [size]: where ids are."""
    marked = torch.zeros(size, dtype=torch.bool, device=ids.device)
    marked[ids] = True
    return marked


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    return float(theta or 10_000.0)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, heads, D] turned by its rows' positions."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

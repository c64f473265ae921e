"""The dense families as one call of compiled code per forward: weights packed once, a batch described by pointers.

The structures mirror those of `kernels.c`, field by field.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.verify.attention import Chunk, pack
from engine.verify.dense import DenseModel, window_size
from engine.verify.kv_cache import KVCache
from engine.verify.taps import Taps

PANEL = 32
"""Outputs that are computed together; as in the kernels."""
ATTENTION_ROWS = 16
"""Rows of a sequence that attention treats together; as in the kernels."""
LANES = 16
"""float32 in a vector; heads must be whole vectors."""
LINEARS = ("qkv", "attention_out", "gate_up", "mlp_out")
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

Pointer = ctypes.c_void_p
Int = ctypes.c_int32


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("weight", "scale", "offset", "bias")),
        *((name, Int) for name in ("format", "num_inputs", "num_outputs", "num_groups")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in LINEARS),
        *((name, Pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("scaling", ctypes.c_float),
        ("window", Int),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("head", _Linear),
        ("embedding", Pointer),
        ("norm", Pointer),
        ("eps", ctypes.c_float),
        *((name, Int) for name in ("num_layers", "hidden", "num_heads", "num_kv", "head_dim", "mlp_width")),
        ("cache_format", Int),
        ("max_words", Int),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *(
            (name, Pointer)
            for name in ("tokens", "positions", "places", "slots", "logit_rows", "row_blocks", "tables", "cos", "sin")
        ),
        *((name, Pointer) for name in ("caches", "taps")),
        *((name, ctypes.c_int64) for name in ("num_slots", "tap_stride")),
        *((name, Int) for name in ("num_rows", "num_logit_rows", "num_row_blocks", "block_size", "places_first")),
    )


class NativeModel:
    """Weights of one model, packed for `kernels.c`; takes nothing from the model but its rotary embedding.

    ``dtype`` is that of the packed weights: the model's own, or int8, whose activations are rounded to 16 bits with one scale
    per row. Within ``max_context`` positions the rotary frequencies must be fixed. ``taps`` get their hidden states in float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, kernels: ctypes.CDLL, max_context: int, taps: Taps | None = None):
        decoder: Any = model.model
        self._kernels = kernels
        self._dtype = dtype
        self._max_context = max_context
        self._kept: list[Any] = []  # what the structures point to
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self._num_layers = len(decoder.layers)
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = decoder.rotary_emb
        self._cos = self._sin = torch.empty(0)
        self._workspace = torch.empty(0)
        self._cache: KVCache | None = None
        self._taps = taps
        self._caches = (ctypes.c_void_p * self._num_layers)()
        self._model = self._describe(model)
        self._head_dim, self._num_kv = self._model.head_dim, self._model.num_kv

    @staticmethod
    def supports(model: nn.Module) -> bool:
        """Whether the kernels know this architecture, dtype and device."""
        dtypes = {parameter.dtype for parameter in model.parameters()}
        devices = {parameter.device.type for parameter in model.parameters()}
        if not (DenseModel.supports(model) and devices == {"cpu"} and dtypes in ({torch.float32}, {torch.bfloat16})):
            return False
        attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
        return int(attention.head_dim) % LANES == 0

    def forward(self, cache: KVCache, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [R, V], float32, of the rows that the chunks ask for."""
        block_size = cache.pool.block_size
        batch = pack(chunks, range(len(chunks)), block_size, self._embedding.device)
        num_rows, num_logits = len(batch.tokens), len(batch.logit_rows)
        blocks, tables = _row_blocks(chunks, block_size)
        places = _places(batch.positions, chunks)
        self._bind(cache)
        self._extend_rotation(max(len(chunk.sequence.ids) + len(chunk.ids) + chunk.num_left_out for chunk in chunks))
        num_threads = torch.get_num_threads()
        needed = self._kernels.workspace_floats(ctypes.byref(self._model), num_rows, num_threads)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        kept, tap_places = self._tap_places(num_rows)
        described = _Batch(
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            places=places.data_ptr(),
            slots=batch.slots.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            row_blocks=blocks.ctypes.data,
            tables=tables.ctypes.data,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            caches=ctypes.addressof(self._caches),
            taps=None if tap_places is None else ctypes.addressof(tap_places),
            tap_stride=kept.shape[1],
            num_slots=cache.pool.num_blocks * block_size,
            num_rows=num_rows,
            num_logit_rows=num_logits,
            num_row_blocks=len(blocks),
            block_size=block_size,
            places_first=len(blocks) > len(chunks) or shares_blocks(tables),
        )
        logits = torch.empty(num_logits, self._model.head.num_outputs)
        workspace = self._workspace.data_ptr()
        self._kernels.forward(ctypes.byref(self._model), ctypes.byref(described), workspace, num_threads, logits.data_ptr())
        if self._taps is not None:
            self._taps.put(kept)
        return logits

    def _tap_places(self, num_rows: int) -> tuple[Tensor, Any]:
        """Room for hidden states, float32 [rows, H * taps], and where each layer's begin in it."""
        layers = () if self._taps is None else self._taps.layers
        width = self._embedding.shape[1]
        kept = torch.empty(num_rows, len(layers) * width)
        if not layers:
            return kept, None
        places = (ctypes.c_void_p * (self._num_layers + 1))()
        for index, layer in enumerate(layers):
            places[layer] = kept.data_ptr() + index * width * kept.element_size()
        return kept, places

    def _bind(self, cache: KVCache) -> None:
        """Point at the tensors of ``cache``, which are made when it is new."""
        if cache is self._cache:
            return
        like = torch.empty(self._num_kv, 0, self._head_dim, dtype=self._embedding.dtype)
        for call in range(self._num_layers):
            self._caches[call] = cache.layer(call, like, like).keys.data_ptr()
        cache.reads_unwritten = False
        self._cache = cache

    def _extend_rotation(self, length: int) -> None:
        """Tables of cos and sin [positions, D / 2], doubled within the limit behind which some models change them all."""
        if length > len(self._cos):
            positions = torch.arange(max(length, min(2 * length, self._max_context))).unsqueeze(0)
            half = self._head_dim // 2
            self._cos, self._sin = (
                part[0, :, :half].contiguous() for part in self._rotary(torch.empty(0, dtype=torch.float32), positions)
            )

    # --- packing ------------------------------------------------------------------------------------------------------------

    def _describe(self, model: Any) -> _Model:
        decoder, attention, mlp = model.model, model.model.layers[0].self_attn, model.model.layers[0].mlp
        layers = (_Layer * self._num_layers)(*(self._layer(layer, model.config) for layer in decoder.layers))
        head = self._linear(model.lm_head.weight, model.lm_head.bias)
        linears = [head, *(getattr(layer, name) for layer in layers for name in LINEARS)]
        return _Model(
            layers=layers,
            head=head,
            embedding=self._keep(self._embedding),
            norm=self._keep(decoder.norm.weight.float()),
            eps=decoder.norm.variance_epsilon,
            num_layers=self._num_layers,
            hidden=self._embedding.shape[1],
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            mlp_width=mlp.gate_proj.out_features,
            cache_format=FORMATS[self._embedding.dtype],
            max_words=max(linear.num_inputs for linear in linears) + 3,
        )

    def _layer(self, layer: Any, config: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        query_norm, key_norm = (None if norm is None else self._keep(norm.weight.float()) for norm in head_norms)
        return _Layer(
            qkv=self._linear(torch.cat([part.weight for part in projections]), _joined_bias(projections)),
            attention_out=self._linear(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=self._gate_up(mlp.gate_proj, mlp.up_proj),
            mlp_out=self._linear(mlp.down_proj.weight, mlp.down_proj.bias),
            attention_norm=self._keep(layer.input_layernorm.weight.float()),
            mlp_norm=self._keep(layer.post_attention_layernorm.weight.float()),
            query_norm=query_norm,
            key_norm=key_norm,
            scaling=attention.scaling,
            window=window_size(config, attention.layer_idx) or 0,
        )

    def _gate_up(self, gate: nn.Linear, up: nn.Linear) -> _Linear:
        """Panels of 16 gates and their 16 ups, so that one panel makes 16 outputs."""
        bias = _joined_bias((gate, up))
        biases = (None, None) if bias is None else bias.chunk(2)
        weight = _interleaved(gate.weight, up.weight)
        packed = self._linear(weight, None if bias is None else _interleaved(*biases))
        packed.num_outputs = gate.out_features
        return packed

    def _linear(self, weight: Tensor, bias: Tensor | None) -> _Linear:
        weight = weight.detach()
        num_outputs, num_inputs = weight.shape
        scale = offset = None
        if self._dtype == torch.int8:
            weight, scale = quantised(weight)
            offset = self._keep(_padded(128 * weight.sum(dim=1, dtype=torch.int32)))
        packed = pack_weight(weight)
        return _Linear(
            weight=self._keep(packed),
            scale=None if scale is None else self._keep(_padded(scale)),
            offset=offset,
            bias=None if bias is None else self._keep(_padded(bias.detach().float())),
            format=FORMATS[weight.dtype],
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            num_groups=packed.shape[1],
        )

    def _keep(self, tensor: Tensor) -> int:
        """Address of a tensor that stays alive as long as the model."""
        self._kept.append(tensor.detach().contiguous())
        return int(self._kept[-1].data_ptr())


def pack_weight(weight: Tensor) -> Tensor:
    """[out, in] as words of four bytes [panels, groups, 32]: each a group of inputs of one output; padded with zeros."""
    missing = (-weight.shape[0] % PANEL, -weight.shape[1] % (4 // weight.element_size()))
    if any(missing):
        weight = nn.functional.pad(weight, (0, missing[1], 0, missing[0]))
    words = weight.contiguous().view(torch.int32)
    words = words.view(-1, PANEL, words.shape[1]).transpose(1, 2)
    # numpy asks the kernel for large pages, through which weights stream faster.
    return torch.from_numpy(np.empty(words.shape, dtype=np.int32)).copy_(words)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scales [out], by which it is multiplied."""
    plain = weight.float()
    scale = plain.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
    return (plain / scale[:, None]).round_().to(torch.int8), scale


def shares_blocks(tables: np.ndarray[Any, Any]) -> bool:
    """Whether two chunks of a forward look at one block of the cache, which one of them may just be filling."""
    return len(np.unique(tables)) < len(tables)


def _row_blocks(chunks: Sequence[Chunk], block_size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Blocks of rows, int32 [blocks, 3] of (first row, rows, where the table begins), and the block tables, int32."""
    blocks: list[tuple[int, int, int]] = []
    tables: list[int] = []
    first_row = 0
    for chunk in chunks:
        count = len(chunk.ids)
        blocks += [(first_row + at, min(ATTENTION_ROWS, count - at), len(tables)) for at in range(0, count, ATTENTION_ROWS)]
        tables += chunk.sequence.blocks[: -(-(len(chunk.sequence.ids) + count) // block_size)]
        first_row += count
    return np.array(blocks, dtype=np.int32), np.array(tables, dtype=np.int32)


def _places(positions: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """int64 [T]: where the rows are in the sequences that their chunks see."""
    if not any(chunk.num_left_out for chunk in chunks):
        return positions
    return positions - torch.tensor([chunk.num_left_out for chunk in chunks for _ in chunk.ids])


def _interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both, [n, ...], in turns of 16; padded to whole turns with zeros."""
    turn = PANEL // 2
    missing = torch.zeros(-len(gate) % turn, *gate.shape[1:], dtype=gate.dtype)
    parts = [torch.cat((part, missing)).view(-1, 1, turn, *gate.shape[1:]) for part in (gate, up)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat([layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])


def _padded(vector: Tensor) -> Tensor:
    """Values per output, for whole panels."""
    return nn.functional.pad(vector, (0, -len(vector) % PANEL))

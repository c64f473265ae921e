"""Linear layers and norms that are fast at a few rows: packed once for oneDNN, fused where inputs are shared, or quantised."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.verify.triton_linear import has_triton, invariant_linear

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of siblings that transformers' attention and MLP modules apply to one and the same input."""
INVARIANT_ROWS = 16
"""Rows of every product where no kernel is known whose sums do not depend on their number."""
INT4_GROUP = 32
"""Inputs that share a scale and a minimum: the fewest that torch's kernels know, since small models need them."""
FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""


class Linear(Protocol):
    """A linear map with weight [out, in]."""

    invariant: bool
    """Whether to use the kernel by which a row's bits do not depend on the other rows, where that is not the fastest one."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [n, out] + map of x [n, in]. The memory of ``residual`` may be reused for the result."""


MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> the layer, which is an `nn.Module`."""


class PlainLinear(nn.Module):
    """torch's own kernel; the invariant one is Triton's on CUDA, elsewhere torch's over `INVARIANT_ROWS` rows at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.invariant = False
        self.weight = _frozen(weight)
        self.bias = None if bias is None else _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`."""
        if not self.invariant:
            return nn.functional.linear(x, self.weight, self.bias)
        if has_triton(x.device):
            return invariant_linear(x, self.weight, self.bias)
        return by_row_blocks(lambda rows: nn.functional.linear(rows, self.weight, self.bias), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """As `Linear`."""
        return residual + self.forward(x)


class PackedLinear(nn.Module):
    """oneDNN with the weight laid out for it once: on CPU faster than `PlainLinear` from the first row on.

    A row's result has the same bits for any number of rows from two on. A lone row takes another kernel, which in some shapes
    sums in another order; there it is doubled. Should a processor's kernels differ more than that, ``invariant`` gives them
    `INVARIANT_ROWS` rows at a time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.invariant = False
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach().contiguous(), 8)
        self.bias = None if bias is None else _frozen(bias)
        self.in_features = weight.shape[1]
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary
        self._doubles_lone_row = _lone_row_differs(min(weight.shape[0], 1024), weight.shape[1], weight.dtype)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether this build of torch can pack the weight."""
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.bfloat16, torch.float32)
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and (weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
        )

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in], for architectures that look at it."""
        plain: Tensor = self.packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`."""
        if self.invariant:
            return by_row_blocks(lambda rows: self._product(rows, self.packed, self.bias, "none", [], ""), x)
        if self._doubles_lone_row and x.numel() == self.in_features:
            row = x.reshape(1, -1)
            doubled = self._product(torch.cat((row, row)), self.packed, self.bias, "none", [], "")
            return doubled[:1].view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
        return self._product(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """As `Linear`; rounds once, after the addition, unless ``invariant``."""
        if self.invariant:
            return residual + self.forward(x)
        if self._doubles_lone_row and x.numel() == self.in_features:
            doubled = self._sum(torch.cat((x, x)), torch.cat((residual, residual)), self.packed, self.bias, "add")
            return doubled[:1]  # type: ignore[no-any-return]
        return self._sum(x, residual, self.packed, self.bias, "add")  # type: ignore[no-any-return]


class Int8Linear(nn.Module):
    """int8 weights with one scale per output, int8 activations with one scale per row, exact int32 sums; computes in float32.

    One activation scale for all rows would let an outlier in one row round the others away. Exact sums have the same bits in
    any order, so there is no other kernel for ``invariant`` to choose.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.invariant = True
        plain = weight.detach().float()
        scale = plain.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        self.quantised = _frozen((plain / scale[:, None]).round_().to(torch.int8))
        self.scale = _frozen(scale / 127)
        """float32 [out]: the weight's scale times the constant part of the activations', which is (largest magnitude) / 127."""
        self.bias = None if bias is None else _frozen(bias.float())
        self._transposed = self.quantised.t()
        self._minimum_rows = 24 if weight.device.type == "cuda" else 1  # cuBLAS refuses 16 rows and less
        # A float32 plus this has the nearest integer in the low bits of its mantissa: rounding and conversion in one addition.
        self._rounding = torch.tensor(1.5 * 2**23, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`, in the dtype of x."""
        out = self._scaled_by_row(x.reshape(-1, x.shape[-1]))
        out = out.mul_(self.scale) if self.bias is None else torch.addcmul(self.bias, out, self.scale)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """As `Linear`, in the memory of ``residual``."""
        residual.addcmul_(self._scaled_by_row(x), self.scale)
        return residual if self.bias is None else residual.add_(self.bias)

    def _scaled_by_row(self, x: Tensor) -> Tensor:
        """Products of x [n, in] with the integers of the weight, float32 [n, out]."""
        x = x.float()
        largest = x.abs().amax(dim=-1, keepdim=True)
        quantised = torch.addcdiv(self._rounding, x, largest, value=127).view(torch.int32).to(torch.int8)
        missing = self._minimum_rows - len(x)
        if missing > 0:
            padded = nn.functional.pad(quantised, (0, 0, 0, missing))
            return torch._int_mm(padded, self._transposed)[: len(x)] * largest
        return torch._int_mm(quantised, self._transposed) * largest


class Int4Linear(nn.Module):
    """int4 weights in groups of `INT4_GROUP` inputs, each with a scale and a minimum; torch's own kernels, in bfloat16.

    Half the memory of int8, and coarser: activations keep their precision.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.invariant = False
        self._num_outputs, num_inputs = weight.shape
        self._missing = -num_inputs % INT4_GROUP
        quantised, scales = int4_groups(nn.functional.pad(weight.detach().float(), (0, self._missing, 0, -len(weight) % 16)))
        self.scales = _frozen(scales.to(torch.bfloat16))
        """[groups, outputs, 2]: scale, and the value of the integer 8."""
        self.bias = None if bias is None else _frozen(bias.to(torch.bfloat16))
        if weight.device.type == "cuda":
            tiles = next(count for count in (8, 4, 2) if quantised.shape[1] % (16 * count) == 0)
            pairs = (quantised[:, ::2] << 4 | quantised[:, 1::2]).to(torch.uint8)
            self.packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
            self._product = torch.ops.aten._weight_int4pack_mm.default
        else:
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised, 1)
            self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`, in the dtype of x."""
        rows = nn.functional.pad(x.reshape(-1, x.shape[-1]).to(torch.bfloat16), (0, self._missing))
        out: Tensor = self._product(rows, self.packed, INT4_GROUP, self.scales)[:, : self._num_outputs]
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """As `Linear`, in the memory of ``residual``."""
        return residual.add_(self.forward(x))


class Fp8Linear(nn.Module):
    """float8_e4m3fn weights with one scale per output, activations with one per row; sums in float32 on the tensor cores."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.invariant = False
        self._num_outputs, num_inputs = weight.shape
        self._missing = -num_inputs % 16
        padded = nn.functional.pad(weight.detach().float(), (0, self._missing, 0, -len(weight) % 16))
        quantised, scale = fp8_rows(padded)
        self.quantised = _frozen(quantised)
        self.scale = _frozen(scale.T.contiguous())
        self.bias = None if bias is None else _frozen(bias.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`, in the dtype of x."""
        rows, scale = fp8_rows(nn.functional.pad(x.reshape(-1, x.shape[-1]).float(), (0, self._missing)))
        out = torch._scaled_mm(rows, self.quantised.t(), scale, self.scale, out_dtype=torch.bfloat16)[:, : self._num_outputs]
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """As `Linear`, in the memory of ``residual``."""
        return residual.add_(self.forward(x))


class PlainRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension.

    torch's RMS norm is one kernel on CUDA and a dozen on CPU, where layer norm is one: the layer norm of (x, -x), whose mean is
    0 and whose variance is mean(x²), begins with the RMS norm of x.
    """

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = _frozen(weight)
        self.eps = eps
        self._doubled = torch.cat((weight, weight)).detach() if weight.device.type == "cpu" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> the same shape and dtype."""
        if self._doubled is None:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        mirrored = torch.cat((x, x.neg()), dim=-1)
        return torch.layer_norm(mirrored, self._doubled.shape, self._doubled, None, self.eps)[..., : x.shape[-1]]


def fastest_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest exact layer for a weight: `PackedLinear` where it can be had."""
    return PackedLinear(weight, bias) if PackedLinear.supports(weight) else PlainLinear(weight, bias)


MAKERS: dict[str, MakeLinear] = {"exact": fastest_linear, "int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}
"""How weights are kept, by name."""


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [out, in] of 0 … 15, and [groups, out, 2] of (scale, value of the integer 8), from float32 [out, in]."""
    groups = weight.view(len(weight), -1, INT4_GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min_(torch.finfo(torch.float32).tiny)
    quantised = ((groups - low) / scale).round_().to(torch.int32).view(weight.shape)
    return quantised, torch.cat((scale, low + 8 * scale), dim=-1).transpose(0, 1).contiguous()


def fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [n, in] and float32 scales [n, 1], by which it is multiplied, from float32 [n, in]."""
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / FP8_MAX
    return (rows / scale).to(torch.float8_e4m3fn), scale


def by_row_blocks(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``product`` of x [..., in] as products of exactly `INVARIANT_ROWS` rows each, the last one padded with zeros."""
    rows = x.reshape(-1, x.shape[-1])
    padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % INVARIANT_ROWS))
    out = torch.cat([product(block) for block in torch.split(padded, INVARIANT_ROWS)])
    return out[: len(rows)].view(*x.shape[:-1], -1)


def fused_linear(layers: list[nn.Linear], make: MakeLinear) -> Linear:
    """One layer that gives the outputs of several, side by side."""
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
        bias = torch.cat(biases)
    return make(torch.cat([layer.weight.detach() for layer in layers]), bias)


def replace_linears(model: nn.Module, make: MakeLinear) -> None:
    """Replace every `nn.Linear` in place, siblings in `FUSED` by one product. Old weights are freed unless they are shared."""
    for parent in list(model.modules()):
        for names in FUSED:
            siblings = [getattr(parent, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in siblings):
                _fuse(parent, names, siblings, make)  # type: ignore[arg-type]
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))


def replace_rms_norms(model: nn.Module) -> None:
    """Replace in place the RMS norms whose output a `PlainRMSNorm` reproduces; others, such as Gemma's 1 + weight, stay."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            plain = _plain_rms_norm(child)
            if plain is not None:
                setattr(parent, name, plain)


class _SharedProduct:
    """The product of fused siblings, kept from the first sibling's call to the last one's."""

    def __init__(self, layer: Linear, sizes: list[int]):
        self.layer = layer
        self._sizes = sizes
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        if x is not self._input:
            self._input, self._outputs = x, torch.split(self.layer.forward(x), self._sizes, dim=-1)
        out = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return out


class _FusedPart(nn.Module):
    def __init__(self, shared: _SharedProduct, index: int):
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(self._index, x)


def _fuse(parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear], make: MakeLinear) -> None:
    if len({layer.in_features for layer in layers}) > 1:
        return
    shared = _SharedProduct(fused_linear(layers, make), [layer.out_features for layer in layers])
    for index, name in enumerate(names):
        setattr(parent, name, _FusedPart(shared, index))


def _plain_rms_norm(module: nn.Module) -> PlainRMSNorm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1 and eps):
        return None
    plain = PlainRMSNorm(weight, eps)
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    tolerance = 4 * torch.finfo(weight.dtype).eps
    return plain if torch.allclose(module(x), plain(x), rtol=tolerance, atol=tolerance) else None


@lru_cache
def _lone_row_differs(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN sums one row of ``in_features`` in another order than several.

    All terms cancel in pairs, so nothing but rounding errors is left of the sums, and another order gives others. With ordinary
    numbers the difference would show in few rows.
    """
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    order = torch.randperm(2 * half, generator=generator)
    terms = torch.randn(4, half, generator=generator) * torch.exp2(torch.randint(-6, 6, (4, half), generator=generator))
    row = torch.randn(1, half, generator=generator)
    x = nn.functional.pad(torch.cat([terms, -terms], dim=1)[:, order], (0, in_features - 2 * half)).to(dtype)
    weight = nn.functional.pad(torch.cat([row, row], dim=1)[:, order], (0, in_features - 2 * half)).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.repeat(out_features, 1), 8)
    many, one = (torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "") for rows in (x, x[:1]))
    return not torch.equal(many[:1], one)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)

"""One packed forward over many sequences with different contexts and different numbers of new tokens, over a paged KV cache.

A `RaggedModel` takes a loaded model over: it replaces its layers by faster ones, checks on the loaded weights that the packed
forward computes what the plain one did, and refuses the model otherwise.
"""

import contextlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.models import LoadedModel
from engine.types import ModelInfo
from engine.verify.attention import NAME, AttentionState, Chunk, Kernels, Mask, Prepare, cpu, cuda, run_with
from engine.verify.dense import DenseModel
from engine.verify.graphs import FIRST_BUCKETS, RECORDERS, GraphedForward, Network, reserved_bytes
from engine.verify.invariance import RowInvariance, probe
from engine.verify.invariance import random_ids as _random_ids
from engine.verify.kv_cache import CachedSequence, KVCache, affordable_blocks
from engine.verify.linear import MAKERS, Linear, replace_linears, replace_rms_norms
from engine.verify.native.build import kernels as compiled_kernels
from engine.verify.native.model import NativeModel
from engine.verify.taps import Taps

logger = logging.getLogger(__name__)

Weights = Literal["exact", "int8", "int4", "fp8"]
"""How the weights of linear layers are kept; all but the first make another model."""
Forward = Callable[[KVCache, Sequence[Chunk]], Tensor]
"""Logits [R, V] of the wanted tokens of all chunks, or of one row where none are wanted."""
Reference = list[tuple[list[int], Tensor]]
"""Ids, and the loaded model's own logits [n, V] after each of them."""

CPU_BLOCK_SIZE = 64
MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest accepted root mean square error of the packed forward, relative to that of the centred logits, per dtype.

In bfloat16 two of transformers' own attentions differ by 0.1 on a deep small model and random ids; a wrong mask or position
gives 0.5 and more.
"""
MAX_QUANTISED_ERROR = 0.8
"""A quantised copy is another model: this only tells it from noise, whose error is about 1.4."""
NEAR_TIE = {torch.float32: 3.2e-4, torch.bfloat16: 1.6, torch.float16: 0.2}
"""Per dtype, the margin between the two largest logits below which kernels that are not row-invariant may choose either token.

Twice the largest difference of one logit between kernels, since both of the two may move. Measured on SmolLM2-135M on CPU:
float32 1.6e-4, bfloat16 0.78. float16, not measured, is eight times as precise as bfloat16.
"""
KERNEL_CHOICES: tuple[tuple[Kernels, Kernels], ...] = (("fast", "fast"), ("invariant", "fast"), ("invariant", "invariant"))
"""Kernels of attention and of linear layers, the cheaper ones first."""
STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEP_CONTEXT = 64
"""Tokens in the cache while step times are measured."""
STEP_BUDGET_S = 2.0


class UnsupportedArchitecture(ModelError):
    """A way of running does not reproduce the architecture; ``reason`` says how that showed, without the model's name."""

    def __init__(self, loaded: LoadedModel, reason: str):
        architecture = (loaded.config.architectures or [loaded.config.model_type])[0]
        super().__init__(f"{loaded.name}: the architecture {architecture} is not supported yet: {reason}")
        self.reason = reason


class RaggedModel:
    """A causal language model as a function of packed chunks.

    ``numerics`` "invariant" tries `KERNEL_CHOICES` until a row's logits have the same bits in every batch that is probed, and
    stays with the fastest when none does; "fast" takes these and probes them too. Without it they are taken and not probed.
    ``kernels`` "auto" runs the compiled ones (`engine.verify.native`) where they can be had, "torch" never.

    With ``hidden_layers`` each forward leaves the hidden states that enter these layers (`Taps`) in ``hidden``, per chunk.

    The loaded model is taken over: afterwards ``loaded.model`` cannot be used any more. Raises
    `UnsupportedArchitecture` when it cannot be run packed, in which case the model is as it was, and `ModelError` when there is
    no memory for a KV cache.
    """

    shares_prefixes = True

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        weights: Weights = "exact",
        numerics: Kernels | None = None,
        kernels: Literal["auto", "torch"] = "auto",
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
        hidden_layers: Sequence[int] = (),
    ):
        self.loaded = loaded
        self.hidden: Sequence[Tensor] = ()
        """Of the last forward, per chunk [n, H * number of layers]; empty where none are wanted."""
        self._taps = Taps(hidden_layers) if hidden_layers else None
        self._order: Sequence[int] = ()
        """How the chunks of the last forward were packed."""
        self._kernels = kernels
        self.device = torch.device(loaded.device)
        self.num_ids: int = loaded.model.get_input_embeddings().weight.shape[0]
        """Ids that have an embedding; those from ``vocab_size`` on are padding."""
        self.max_context = min(loaded.max_context, max_context or loaded.max_context, context_limit(loaded.config))
        self._weights = weights
        self._prepare_batch, self._block_size = attention_for(self.device)
        self._attention: Kernels = "fast"
        self._linears: list[Linear] = []
        self._masks: dict[int, Mask] = {}
        self.network: Literal["native", "dense", "generic"] = "native"
        """What runs: compiled kernels, the lean forward in torch's operations, or transformers' own code."""
        self.path_reason = f"the lean forward of {loaded.config.model_type} reproduces the plain one"
        self.graphs: GraphedForward | None = None
        """Steps of few tokens as recorded graphs, where the device has them."""
        self._network: Network | None = None
        """The forward over one batch, but for compiled kernels."""
        self._forward, bytes_per_token, reference = self._prepare()
        self.graphs = self._make_graphs(reference)
        num_blocks = affordable_blocks(
            loaded.name,
            bytes_per_token,
            self._block_size,
            self.max_context,
            self.device,
            kv_capacity_tokens,
            self._reserved_bytes,
        )
        self.cache = KVCache(num_blocks, self._block_size)
        self.numerics: Kernels = "fast"
        """Kernels in use."""
        self.row_invariance = RowInvariance(None, "not probed")
        """The verdict on them."""
        if numerics is not None:
            self._choose_kernels(numerics, reference)
        self._capture_first()
        self.step_times = self._measure_step_times()

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and measured step times."""
        return describe(
            self.loaded,
            self._weights,
            max_context=self.max_context,
            kv_capacity_tokens=self.cache.pool.num_blocks * self._block_size,
            kv_block_size=self._block_size,
            device=str(self.device),
            step_times=self.step_times,
            numerics=self.numerics,
            row_invariant=self.row_invariance.holds,
            row_invariance=self.row_invariance.verdict,
            path=self.network,
            path_reason=self.path_reason,
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [R, vocab_size] of the last ``num_logits`` tokens of every chunk, in the order of ``chunks``.

        The blocks for the new tokens must have been reserved (`KVCache.reserve`); afterwards the sequences hold them. A
        sequence may occur once.
        """
        return self._run(self._forward, self.cache, chunks)

    def _run(self, forward: Forward, cache: KVCache, chunks: Sequence[Chunk]) -> Tensor:
        self._order = range(len(chunks))
        logits = forward(cache, chunks)
        if self._taps is not None:
            self.hidden = self._taps.by_chunk([len(chunk.ids) for chunk in chunks], self._order)
        for chunk in chunks:
            chunk.sequence.ids.extend(chunk.ids)
        return logits[: sum(chunk.num_logits for chunk in chunks), : self.loaded.vocab_size]

    def _run_packed(self, network: Network, cache: KVCache, chunks: Sequence[Chunk]) -> Tensor:
        """As `Forward`, in torch's operations: by a graph where there is one for the step."""
        logits = None if self.graphs is None else self.graphs.forward(cache, chunks)
        if logits is not None:
            return logits
        batch, backend = self._prepare_batch(chunks, self._block_size, self.device, self._attention)
        self._order = cpu.plan_order(chunks)
        return network(AttentionState(batch, backend, cache, self.max_context, self._masks))

    # --- loading ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _prepare(self) -> tuple[Forward, int, Reference]:
        """Choose the forward that reproduces the loaded model: it, the KV cache's bytes per token, and what to reproduce."""
        model = self.loaded.model
        with architecture_errors(self.loaded):
            reference = plain_reference(self.loaded)
        lean: tuple[tuple[Literal["native", "dense"], Callable[[], Forward | None]], ...] = (
            ("native", self._native),
            ("dense", self._dense),
        )
        for self.network, make in lean:
            forward = make()
            if forward is None:
                continue
            error, bytes_per_token = self._error(forward, reference)
            if error <= self._max_error:
                model.model.layers = nn.ModuleList()
                model.lm_head = nn.Identity()
                return forward, bytes_per_token, reference
            logger.warning("%s: the %s forward is off by %.2g and is not used", self.loaded.name, self.network, error)
            self._linears.clear()
        self.network = "generic"
        self.path_reason = f"transformers' own layers reproduce the plain forward of {self.loaded.config.model_type} packed"
        self._check_packing(reference)
        with architecture_errors(self.loaded):
            replace_linears(model, self._make)
            replace_rms_norms(model)
            self._network = generic_forward(model)
            generic = partial(self._run_packed, self._network)
            error, bytes_per_token = self._error(generic, reference)
        if not error <= self._max_error:
            raise ModelError(f"{self.loaded.name}: with faster layers its logits are off by {error:.2g} of their spread")
        return generic, bytes_per_token, reference

    def _native(self) -> Forward | None:
        model = self.loaded.model
        has_form = self._weights in ("exact", "int8") and self._kernels == "auto" and NativeModel.supports(model)
        library = compiled_kernels() if has_form else None
        if library is None:
            return None
        dtype = torch.int8 if self._weights == "int8" else self.loaded.dtype
        return NativeModel(model, dtype, library, self.max_context, self._taps).forward

    def _dense(self) -> Forward | None:
        model = self.loaded.model
        if not DenseModel.supports(model):
            return None
        dtype = torch.float32 if self._weights == "int8" else self.loaded.dtype
        self._network = DenseModel(model, self._make, dtype, self._taps).forward
        return partial(self._run_packed, self._network)

    def _check_packing(self, reference: Reference) -> None:
        """Make our attention the model's, before anything else in it is changed. Raises `UnsupportedArchitecture`."""
        model = self.loaded.model
        before = model.config._attn_implementation
        try:
            with architecture_errors(self.loaded):
                model.set_attn_implementation(NAME)
                if self._taps is not None:
                    self._taps.hook(model)
                error, bytes_per_token = self._error(partial(self._run_packed, generic_forward(model)), reference)
            if bytes_per_token == 0:
                raise UnsupportedArchitecture(self.loaded, "its attention cannot be replaced")
            if not error <= largest_error(self.loaded.dtype, "exact"):
                raise UnsupportedArchitecture(
                    self.loaded, f"a packed forward differs from the plain one by {error:.2g} of the logits' spread"
                )
        except UnsupportedArchitecture:
            model.set_attn_implementation(before)
            raise

    def _make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        self._linears.append(MAKERS[self._weights](weight, bias))
        return self._linears[-1]

    @property
    def _max_error(self) -> float:
        return largest_error(self.loaded.dtype, self._weights)

    def _error(self, forward: Forward, reference: Reference, cache: KVCache | None = None) -> tuple[float, int]:
        """Error of packed steps over two sequences, in chunks and with a rollback, and the KV cache's bytes per token."""
        first, second = CachedSequence(), CachedSequence()
        cache = cache or self._small_cache()

        def step(first_ids: list[int], second_ids: list[int]) -> tuple[Tensor, Tensor]:
            chunks = [Chunk(first, first_ids, len(first_ids)), Chunk(second, second_ids, len(second_ids))]
            for chunk in chunks:
                cache.reserve(chunk.sequence, len(chunk.ids))
            logits = self._run(forward, cache, chunks)
            return logits[: len(first_ids)], logits[len(first_ids) :]

        (a, _), (b, _) = reference
        early = step(a[:9], b[:5])
        middle = step(b[:4], b[5:12])
        cache.truncate(first, 9)  # those four were wrong
        late = step(a[9:], b[12:])
        got = torch.cat([early[0], late[0], early[1], middle[1], late[1]])
        return relative_error(got, reference, self.loaded.vocab_size), cache.bytes_per_token

    def _small_cache(self) -> KVCache:
        return KVCache(8 + 256 // self._block_size, self._block_size)

    # --- graphs -------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _make_graphs(self, reference: Reference) -> GraphedForward | None:
        """Graphs that reproduce the loaded model too, where the device can record them."""
        make = RECORDERS.get(self.device.type)
        if make is None or self._network is None or self._prepare_batch is not cuda.prepare:
            return None
        if self._taps is not None:
            logger.warning(
                "%s: steps that leave hidden states to prediction heads are not recorded as graphs", self.loaded.name
            )
            return None
        self.graphs = GraphedForward(
            self.loaded.name,
            self._network,
            make(self.device),
            device=self.device,
            block_size=self._block_size,
            max_context=self.max_context,
            masks=self._masks,
        )
        cache = self._small_cache()
        self._error(self._forward, reference, cache)
        error, _ = self._error(self._forward, reference, cache)  # the same graphs once more, with other numbers
        if self.graphs.refusal is not None:
            return None
        if not error <= self._max_error:  # captured once, some number was taken for one that never changes
            logger.warning("%s: as graphs its steps are off by %.2g and are launched one by one", self.loaded.name, error)
            return None
        return self.graphs

    @property
    def _reserved_bytes(self) -> int:
        if self.graphs is None:
            return 0
        hidden_size: int = self.loaded.model.get_input_embeddings().weight.shape[1]
        return reserved_bytes(self.num_ids, hidden_size, self.loaded.dtype.itemsize)

    @torch.inference_mode()
    def _capture_first(self) -> None:
        """Capture what nearly every deployment needs, after a forward that makes the tensors of the KV cache."""
        if self.graphs is None:
            return
        sequence = CachedSequence()
        self.cache.reserve(sequence, 1)
        self.forward([Chunk(sequence, [0], 1)])
        self.cache.truncate(sequence, 0)
        self.graphs.capture(self.cache, FIRST_BUCKETS)

    # --- kernels ------------------------------------------------------------------------------------------------------------

    def _choose_kernels(self, numerics: Kernels, reference: Reference) -> None:
        """Use the first of `KERNEL_CHOICES` whose rows are invariant, else the fastest; keep the verdict."""
        verdicts: list[RowInvariance] = []
        choices = KERNEL_CHOICES if numerics == "invariant" and self.network != "native" else KERNEL_CHOICES[:1]
        for attention, linears in choices:
            self._use(attention, linears)
            if verdicts and not self._still_correct(reference):
                continue
            verdicts.append(self.probe_row_invariance())
            if verdicts[-1].holds is not False:
                self.numerics, self.row_invariance = numerics if verdicts[-1].holds else "fast", verdicts[-1]
                logger.info("%s: attention %s, linear layers %s", self.loaded.name, attention, linears)
                return
        self._use(*KERNEL_CHOICES[0])
        tried = ", nor with invariant kernels, so the fastest run" if len(choices) > 1 else ""
        self.row_invariance = RowInvariance(False, verdicts[0].verdict + tried)

    def _use(self, attention: Kernels, linears: Kernels) -> None:
        self._attention = attention
        for layer in self._linears:
            layer.invariant = linears == "invariant"
        if self.graphs is not None:
            self.graphs.forget()

    @torch.inference_mode()
    def _still_correct(self, reference: Reference) -> bool:
        error, _ = self._error(self._forward, reference)
        if error <= self._max_error:
            return True
        logger.warning("%s: the invariant kernels are off by %.2g and are not used", self.loaded.name, error)
        return False

    # --- measuring ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def probe_row_invariance(self) -> RowInvariance:
        """The verdict of `engine.verify.invariance.probe` on the kernels in use."""
        return probe(
            partial(self._run, self._forward),
            vocab_size=self.loaded.vocab_size,
            max_context=self.max_context,
            block_size=self._block_size,
        )

    def _measure_step_times(self) -> tuple[tuple[int, float], ...]:
        """(new tokens of one sequence, seconds), the median of up to three after a first one, within `STEP_BUDGET_S`."""
        room = min(self.max_context, self.cache.pool.num_blocks * self._block_size) - STEP_CONTEXT
        return median_step_times(self._time_step, room)

    def _time_step(self, size: int) -> float:
        sequence = CachedSequence([0] * STEP_CONTEXT)
        self.cache.reserve(sequence, size)
        started = time.perf_counter()
        self.forward([Chunk(sequence, [0] * size, size)])[0, 0].item()  # waits for the device
        elapsed = time.perf_counter() - started
        self.cache.truncate(sequence, 0)
        return elapsed


def describe(loaded: LoadedModel, weights: Weights, **own: Any) -> ModelInfo:
    """What a loaded model is on any path; ``own`` are the fields of `ModelInfo` that the path knows."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    return ModelInfo(
        name=loaded.name,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint,
        dtype=dtype if weights == "exact" else weights,
        dtype_reason=loaded.dtype_reason if weights == "exact" else f"{weights} copy of {dtype} weights",
        **own,
    )


def plain_reference(loaded: LoadedModel) -> Reference:
    """What every path must reproduce: the model's own logits, from a forward per text without a cache."""
    probes = [_random_ids(length, loaded.vocab_size, seed) for seed, length in enumerate((24, 17))]
    device = torch.device(loaded.device)
    logits = [loaded.model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in probes]
    return list(zip(probes, logits, strict=True))


def relative_error(got: Tensor, reference: Reference, vocab_size: int) -> float:
    """Root mean square error of logits [n, V] of both texts, relative to that of the centred reference."""
    expected = torch.cat([logits for _, logits in reference])[:, :vocab_size].float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    return float((got.float() - expected).square().mean().sqrt() / spread)


def largest_error(dtype: torch.dtype, weights: Weights) -> float:
    """What `relative_error` may be."""
    return MAX_ERROR[dtype] if weights == "exact" else MAX_QUANTISED_ERROR


def median_step_times(time_step: Callable[[int], float], room: int) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) for `STEP_SIZES` up to ``room``: medians of up to three after a first one, within `STEP_BUDGET_S`.

    A step is left out when twice the time of the one before it, of half the size, is more than what is left.
    """
    samples: dict[int, list[float]] = {size: [] for size in STEP_SIZES if size <= room}
    deadline = time.perf_counter() + STEP_BUDGET_S
    for size in [*samples] * 4:
        before = samples.get(size // 2, [0.0])
        if before and time.perf_counter() + 2 * before[-1] < deadline:
            samples[size].append(time_step(size))
    return tuple((size, median(times[1:] or times)) for size, times in samples.items() if times)


def generic_forward(model: Any) -> Network:
    """transformers' own forward of a model whose attention is ours."""
    keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(state: AttentionState) -> Tensor:
        batch = state.batch
        inputs = {
            "input_ids": batch.tokens.unsqueeze(0),
            "position_ids": batch.positions.unsqueeze(0),
            # Without a mask transformers would take the jumps in position_ids for packed training data.
            "attention_mask": torch.ones_like(batch.tokens).unsqueeze(0),
            "use_cache": False,
        }
        if keeps_rows:
            inputs["logits_to_keep"] = batch.logit_rows
        logits: Tensor = run_with(state, lambda: model(**inputs)).logits[0]
        return logits if keeps_rows else logits[batch.logit_rows]

    return forward


def attention_for(device: torch.device) -> tuple[Prepare, int]:
    """Attention for a device, and the block size that suits it."""
    if device.type != "cuda":
        return cpu.prepare, CPU_BLOCK_SIZE
    if cuda.has_paged_kernel():
        return cuda.prepare, cuda.BLOCK_SIZE
    logger.warning("torch %s has no attention over pages, so padded groups run, which are slower", torch.__version__)
    return cpu.prepare, cuda.BLOCK_SIZE


def context_limit(config: Any) -> int:
    """Context within which a token's computation depends on its own position only.

    Types that change them with the longest sequence of a forward ("dynamic", "longrope") would let requests change each other,
    and a sequence's cached keys would not fit its later queries. Llama 4 sharpens attention with the place in the forward, not
    the position, from ``floor_scale`` tokens on.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    changing = [
        entry.get("original_max_position_embeddings") or config.max_position_embeddings
        for entry in (parameters, *parameters.values())
        if isinstance(entry, dict) and entry.get("rope_type") in ("dynamic", "longrope")
    ]
    if getattr(config, "attn_temperature_tuning", None) and hasattr(config, "floor_scale"):
        changing.append(int(config.floor_scale) - 1)
    return min(changing, default=sys.maxsize)


@contextlib.contextmanager
def architecture_errors(loaded: LoadedModel) -> Iterator[None]:
    """An architecture may fail in a packed forward in any way; the user is told which it is."""
    try:
        yield
    except Exception as error:
        raise UnsupportedArchitecture(loaded, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

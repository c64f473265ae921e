"""Which way a loaded model runs, decided in one place: packed where its architecture allows it, else sequence by sequence."""

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from engine.errors import ModelError
from engine.models import LoadedModel
from engine.types import ModelInfo
from engine.verify.attention import Chunk, Kernels
from engine.verify.blocks import BlockPool, CachedSequence
from engine.verify.invariance import RowInvariance
from engine.verify.ragged import RaggedModel, UnsupportedArchitecture, Weights
from engine.verify.stateful import StatefulModel

logger = logging.getLogger(__name__)


class SequenceCache(Protocol):
    """Room for sequences, counted in tokens."""

    @property
    def pool(self) -> BlockPool:
        """The bookkeeping."""

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more tokens. Raises `OutOfBlocks` and changes nothing when there is none."""

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all but the first ``length`` tokens."""


class EngineModel(Protocol):
    """A causal language model as a function of chunks of sequences, whose cached tokens can be taken back."""

    @property
    def loaded(self) -> LoadedModel:
        """What was taken over."""

    @property
    def cache(self) -> SequenceCache:
        """Where the sequences are."""

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity, path and measured step times."""

    @property
    def num_ids(self) -> int:
        """Ids that have an embedding; those from ``vocab_size`` on are padding."""

    @property
    def max_context(self) -> int:
        """Tokens that one sequence may hold."""

    @property
    def numerics(self) -> Kernels:
        """Kernels in use."""

    @property
    def row_invariance(self) -> RowInvariance:
        """The verdict on them."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can take the blocks of another that begins with the same tokens."""

    @property
    def hidden(self) -> Sequence[Tensor]:
        """Hidden states that the last forward left, per chunk [n, H * number of layers]; empty where none are wanted."""

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [R, vocab_size] of the last ``num_logits`` tokens of every chunk, in the order of ``chunks``."""


def load_engine_model(
    loaded: LoadedModel,
    *,
    weights: Weights = "exact",
    numerics: Kernels | None = None,
    kernels: Literal["auto", "torch"] = "auto",
    kv_capacity_tokens: int | None = None,
    max_context: int | None = None,
    hidden_layers: Sequence[int] = (),
) -> EngineModel:
    """Take a loaded model over, by the first of the paths native, dense, generic, stateful that reproduces its plain forward.

    ``weights``, ``numerics``, ``kernels``, ``hidden_layers``: as `RaggedModel`; the stateful path knows only the weights.

    Raises `ModelError` when none does, when there is no memory for a KV cache, and when hidden states are wanted that the path
    cannot give.
    """
    model = _load(loaded, weights, numerics, kernels, kv_capacity_tokens, max_context, hidden_layers)
    info = model.info
    logger.info("%s: %s path: %s; room for %d tokens", loaded.name, info.path, info.path_reason, model.info.kv_capacity_tokens)
    return model


def _load(
    loaded: LoadedModel,
    weights: Weights,
    numerics: Kernels | None,
    kernels: Literal["auto", "torch"],
    kv_capacity_tokens: int | None,
    max_context: int | None,
    hidden_layers: Sequence[int],
) -> EngineModel:
    reason = state_of(loaded.model)
    if reason is None:
        try:
            return RaggedModel(
                loaded,
                weights=weights,
                numerics=numerics,
                kernels=kernels,
                kv_capacity_tokens=kv_capacity_tokens,
                max_context=max_context,
                hidden_layers=hidden_layers,
            )
        except UnsupportedArchitecture as error:
            reason = f"it cannot be packed: {error.reason}"
    if hidden_layers:
        raise ModelError(f"{loaded.name}: prediction heads need sequences in one packed forward, but {reason}")
    return StatefulModel(loaded, reason=reason, weights=weights, kv_capacity_tokens=kv_capacity_tokens, max_context=max_context)


def state_of(model: Any) -> str | None:
    """Why sequences would mix in a packed forward, if the model or its cache says that it folds the past into a state.

    The check on the loaded weights would find out too, but a short convolution changes logits by little, and bfloat16 allows
    for much.
    """
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} keeps a recurrent state"
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # configurations of some architectures do not describe their cache: then the check must tell
        return None
    names = sorted({type(layer).__name__ for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)})
    return f"its cache has layers of type {', '.join(names)}" if names else None

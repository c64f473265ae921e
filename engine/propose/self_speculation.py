"""The target's own int8 copy as its draft: no training, the same vocabulary, any architecture that the target may have."""

from typing import Literal

from engine.models import LoadedModel
from engine.propose.draft_model import DraftModel
from engine.sampling import DRAFT_PROBS


def build_self_int8(
    loaded: LoadedModel,
    *,
    top_n: int = DRAFT_PROBS,
    kv_capacity_tokens: int | None = None,
    max_context: int | None = None,
    prefix_cache: bool = True,
    kernels: Literal["auto", "torch"] = "auto",
) -> DraftModel:
    """Quantise a freshly loaded copy of the target, which is taken over. Raises `ModelError` as `DraftModel`."""
    return DraftModel(
        loaded,
        int8=True,
        top_n=top_n,
        kv_capacity_tokens=kv_capacity_tokens,
        max_context=max_context,
        prefix_cache=prefix_cache,
        kernels=kernels,
        name="self-int8",
    )

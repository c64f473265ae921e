"""The model whose distribution is served."""

from typing import Protocol

from engine.types import ModelInfo, VerifyReply, VerifyRequest


class TargetModel(Protocol):
    """Verifies drafts. Its state per sequence (KV, ids, sampling context) is soft: the caller can rebuild it."""

    @property
    def info(self) -> ModelInfo:
        """Sizes and identity, fixed after loading."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Run one ragged forward over all items and decide every draft by its request's acceptance rule.

        Returns one verdict per item in the same order. An item whose sequence is unknown, or known to less than
        ``base_length`` tokens, gets ``need_context`` and costs nothing. An item whose logits are not finite gets ``error``.
        """

"""Hidden states of the target over its texts, by the engine's own forward: a head learns from what it will be told."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from engine.distill.shards import Text
from engine.distill.states import states_path, write_states
from engine.errors import OutriderError
from engine.types import ModelInfo, ProposeReply, ProposeRequest, SamplingParams, SequenceContext, VerifyItem, VerifyRequest
from engine.verify.target import Target

STEP_TOKENS = 2048
"""In one forward, counted as the cache blocks that they take."""
_CONTEXT = SequenceContext(params=SamplingParams(temperature=0.0), prompt_length=1)


class Recorder:
    """A `HeadsBeside` that keeps what it is told and drafts nothing."""

    name = "recorder"

    def __init__(self, info: ModelInfo):
        self.info = info
        self.rows: dict[str, Tensor] = {}

    def committed(self, sequence_id: str, context: SequenceContext, ids: Sequence[int], hidden: Tensor) -> None:
        """Keep the rows of a text."""
        self.rows[sequence_id] = hidden.cpu()

    def forget(self, sequence_id: str) -> None:
        """Nothing is held beyond a forward."""

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Nothing."""
        return ProposeReply(round_id=request.round_id, proposals=())


class StateWriter:
    """Writes the states of shards, through a target that leaves hidden states and shares no prefixes."""

    def __init__(self, target: Target, folder: Path):
        self._target = target
        self._folder = folder
        self._recorder = Recorder(target.info)
        target.listen(self._recorder)

    def shard(self, index: int, texts: Sequence[Text], on_tokens: Callable[[int], None] = lambda count: None) -> None:
        """Compute and store those of one shard unless they are there. Raises `OutriderError` when they cannot be.

        ``on_tokens`` is told the number of new tokens after each forward.
        """
        if states_path(self._folder, index).is_file():
            return on_tokens(sum(len(text.tokens) for text in texts))
        rows: list[Tensor] = []
        for part in self._steps(texts):
            rows += self._forward(part)
            on_tokens(sum(len(text.tokens) for text in part))
        try:
            write_states(self._folder, index, rows)
        except OSError as error:
            raise OutriderError(f"--out: cannot write hidden states to {self._folder}: {error.strerror or error}") from None

    def _forward(self, texts: Sequence[Text]) -> list[Tensor]:
        names = tuple(f"text-{number}" for number in range(len(texts)))
        items = tuple(
            VerifyItem(sequence_id=name, base_length=0, tokens=tuple(text.tokens.tolist()), context=_CONTEXT, sample=False)
            for name, text in zip(names, texts, strict=True)
        )
        for verdict in self._target.verify(VerifyRequest(round_id=0, items=items)).verdicts:
            if verdict.error is not None:
                raise OutriderError(f"the target cannot read its own texts: {verdict.error}")
        self._target.verify(VerifyRequest(round_id=0, items=(), release=names))
        return [self._recorder.rows.pop(name) for name in names]

    def _steps(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """Texts in order, in parts that fit into the cache and into one forward; a longer text is a part of its own."""
        info = self._target.info
        most = min(STEP_TOKENS, info.kv_capacity_tokens) // info.kv_block_size
        part: list[Text] = []
        taken = 0
        for text in texts:
            blocks = -(-len(text.tokens) // info.kv_block_size)
            if part and taken + blocks > most:
                yield part
                part, taken = [], 0
            part.append(text)
            taken += blocks
        if part:
            yield part

"""Steps of few tokens as recorded graphs: one launch instead of hundreds, which take the host longer than the device.

A graph repeats the same work on the same memory, so every step of a `Bucket` writes its integers into one buffer and is padded
to the bucket's size. Rows of all sequences follow one another, as in any packed forward: a bucket bounds the sequences and the
sum of their rows, and one deep draft among many plain rows pads little.

Whether a row's bits depend on the bucket is decided as for any other batch, by the probe, which runs through here: Triton's
linear layers and the paged attention (one split; the same bounds on rows and keys in every bucket) sum a row in one order for
any number of rows. cuBLAS may choose another kernel for another bucket; then the probe finds it and the invariant ones run.
"""

import contextlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.transfer import host_words
from engine.verify.attention import AttentionState, Chunk, Mask
from engine.verify.attention.cuda import VarlenAttention
from engine.verify.attention.paged import PagedBatch, Sizes
from engine.verify.kv_cache import KVCache

logger = logging.getLogger(__name__)

Network = Callable[[AttentionState], Tensor]
Replay = Callable[[], None]
MAX_ROWS = 32
"""Most new rows of one sequence; longer chunks are prefill, whose products take longer than their launches."""
SEQUENCES = (1, 8, 64)
"""A sequence that is padding has no rows and costs next to nothing, so few sizes do."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of all sequences together. From a few hundred rows on a step is bound by arithmetic, which padding adds to."""


class Bucket(NamedTuple):
    """The size of a graph."""

    num_sequences: int
    num_rows: int


BUCKETS = tuple(
    Bucket(sequences, rows)
    for fewer, sequences in zip((0, *SEQUENCES), SEQUENCES, strict=False)
    for rows in ROWS
    if fewer < rows <= sequences * MAX_ROWS
)
"""All graphs that one KV cache can have."""
FIRST_BUCKETS = tuple(bucket for bucket in BUCKETS if bucket.num_sequences == 1 or bucket.num_rows <= bucket.num_sequences)
"""Captured at load: one sequence with any draft, since every request is alone at times, and one row of each of several, since
drafts end where batches grow. The others cost a pause of some forwards when they are first needed.
"""


def bucket_of(chunks: Sequence[Chunk]) -> Bucket | None:
    """The smallest bucket with room for a step, None where a chunk or the step is too long."""
    num_rows = sum(len(chunk.ids) for chunk in chunks)
    if len(chunks) > SEQUENCES[-1] or num_rows > ROWS[-1] or any(len(chunk.ids) > MAX_ROWS for chunk in chunks):
        return None
    return Bucket(smallest_of(SEQUENCES, len(chunks)), smallest_of(ROWS, num_rows))


def smallest_of(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending ``sizes`` that is at least ``wanted``."""
    return sizes[bisect_left(sizes, wanted)]


class Recorder(Protocol):
    """Records work for a device. Its recordings share memory: none may begin while another runs."""

    def record(self, run: Callable[[], None]) -> Replay:
        """What repeats the device's part of ``run`` on the same tensors; ``run`` itself is called several times.

        Raises what ``run`` raises, and `RuntimeError` when the device cannot record it.
        """


class CudaRecorder:
    """CUDA graphs with one pool of memory, as torch documents them: warm-up on a side stream, then the capture."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._anchor = torch.cuda.CUDAGraph()  # a pool that no graph uses any more cannot be used again
        with torch.cuda.graph(self._anchor, stream=self._stream):
            torch.zeros(1, device=device)

    def record(self, run: Callable[[], None]) -> Replay:
        """As `Recorder.record`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                run()  # libraries load kernels and allocate what they keep
                with _refusing_to_wait():
                    run()
        finally:  # also what a run began that broke off
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using the device.
        with torch.cuda.graph(graph, self._anchor.pool(), self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """An operation that waits for the device raises here, where nothing is broken by it, instead of in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""By type of device."""


class GraphedForward:
    """A packed forward by graphs, captured when they are first needed; one set per KV cache, whose memory they address.

    When something cannot be captured, nothing is captured from then on: `refusal` says why, and the caller runs its own
    forward.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        recorder: Recorder,
        *,
        device: torch.device,
        block_size: int,
        max_context: int,
        masks: dict[int, Mask],
    ):
        """``masks``: as in `AttentionState`."""
        self.device = device
        self.block_size = block_size
        self.max_context = max_context
        self.table_width = -(-max_context // block_size)
        self.refusal: str | None = None
        self._name = name
        self._network = network
        self._recorder = recorder
        self._masks = masks
        self._captured: WeakKeyDictionary[KVCache, dict[Bucket, Replay]] = WeakKeyDictionary()
        self._inputs = torch.empty(self._sizes(BUCKETS[-1]).num_words, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        """[`ROWS`[-1], V]: what all graphs write to, since an output of each would stay in memory."""

    def forward(self, cache: KVCache, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits [R, V] of the wanted rows (of one where none are), or None when the step has no graph."""
        bucket = bucket_of(chunks)
        if bucket is None or not cache.layers:  # the first forward over a cache makes its tensors, which stay
            return None
        replay = self._prepared(cache, bucket, chunks)
        if replay is None or self._logits is None:
            return None
        replay()
        # The next graph, of whatever bucket, writes to the same memory.
        return self._logits[: max(sum(chunk.num_logits for chunk in chunks), 1)].clone()

    def capture(self, cache: KVCache, buckets: Sequence[Bucket]) -> None:
        """Capture ahead of need; the cache has run a forward."""
        for bucket in sorted(buckets, reverse=True):  # the largest first: the others then fit into its memory
            self._prepared(cache, bucket, ())

    def forget(self) -> None:
        """Let go of all graphs: what they recorded is not what should run now."""
        self._captured.clear()

    def num_captured(self, cache: KVCache) -> int:
        """Graphs over ``cache``."""
        return len(self._captured.get(cache, ()))

    def run(self, batch: PagedBatch, cache: KVCache) -> Tensor:
        """The forward over a batch whose tensors stay where they are, as it can be recorded: logits [R, V].

        Raises `NoKernel` where the model needs another attention than the paged kernel's.
        """
        # The bounds are the same in all graphs, so that the kernel chooses the same tiles.
        backend = VarlenAttention(batch, self.block_size, max_rows=MAX_ROWS, max_keys=self.max_context)
        return self._network(AttentionState(batch, backend, cache, self.max_context, self._masks))

    def record(self, what: str, run: Callable[[], None]) -> Replay | None:
        """Record ``run``, or say once why that is not possible."""
        if self.refusal is not None:
            return None
        try:
            return self._recorder.record(run)
        except Exception as error:  # of the driver, of the allocator, of a model that looks at its data
            self.refusal = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            logger.warning(
                "%s: %s cannot be captured as a graph, so steps are launched one by one: %s", self._name, what, self.refusal
            )
            return None

    def _prepared(self, cache: KVCache, bucket: Bucket, chunks: Sequence[Chunk]) -> Replay | None:
        """The graph of a bucket, with its inputs in place."""
        sizes = self._sizes(bucket)
        graphs = self._captured.setdefault(cache, {})
        if bucket not in graphs and self.refusal is not None:
            return None
        host = host_words(sizes.num_words, self.device)
        PagedBatch.over(host, sizes).fill(chunks, range(len(chunks)), self.block_size, cache.scratch_block)
        inputs = self._inputs[: sizes.num_words]
        inputs.copy_(host, non_blocking=True)
        if bucket not in graphs:
            replay = self._capture(PagedBatch.over(inputs, sizes), cache, bucket)
            if replay is None:
                return None
            graphs[bucket] = replay
        return graphs[bucket]

    def _capture(self, batch: PagedBatch, cache: KVCache, bucket: Bucket) -> Replay | None:
        def run() -> None:
            logits = self.run(batch, cache)
            if self._logits is None:  # in a warm-up
                self._logits = logits.new_empty(ROWS[-1], logits.shape[1])
            self._logits[: len(logits)].copy_(logits)

        return self.record(f"a step of {bucket.num_rows} rows of {bucket.num_sequences} sequences", run)

    def _sizes(self, bucket: Bucket) -> Sizes:
        return Sizes(bucket.num_rows, bucket.num_rows, bucket.num_sequences, self.table_width)


def reserved_bytes(num_ids: int, hidden_size: int, item_bytes: int) -> int:
    """Memory that the graphs of a model take beside its KV cache, generously: they share it, so it is that of the largest.

    Per row three times the logits (of the network, as handed out, as all graphs share them), and activations: sixteen times the
    hidden size covers the residual, queries, keys, values, and gates of up to four times its width.
    """
    return ROWS[-1] * (3 * num_ids + 16 * hidden_size) * item_bytes

"""The compiled look at rows of logits: the same tokens as torch and numpy, to the last row."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import noise
from engine.accept.greedy import peaks
from engine.noise import Stream, gumbel, gumbel_argmax, row_keys
from engine.sampling import SampledSequence, decide, propose_tokens
from engine.types import SamplingParams
from engine.verify.native import build, rows

SIZES = (1, 7, 63, 64, 65, 128, 1000)
"""Rows shorter than a block, whole blocks, and rests of one."""


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if build.kernels() is None:
        pytest.skip("no C compiler, or no AVX-512: torch's operations run here")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A context in which torch and numpy decide."""
    with monkeypatch.context() as patch:
        yield patch


def in_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "loaded_kernels", lambda: None)


def bits(values: Tensor) -> list[int]:
    """Tells 0.0 from -0.0 and equates NaN with itself."""
    found: list[int] = values.view(torch.int32).tolist()
    return found


# --- the largest ------------------------------------------------------------------------------------------------------------

odd_values = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 3.4e38, 1e-40])


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(odd_values, min_size=1, max_size=200),
    start=st.sampled_from([-math.inf, -3.0, 5.0]),
    at=st.integers(0, 400),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_first_of_the_largest_whatever_the_values(values: list[float], start: float, at: int, dtype: torch.dtype) -> None:
    """Bug guarded: another one of equal maxima (zeros of either sign among them), a NaN or an infinity that is passed over, a
    row of -inf that has no token: draft and target would disagree, or a useless row would become a token."""
    row = torch.full((1, at + len(values)), start).to(dtype)
    row[0, at:] = torch.tensor(values).to(dtype)
    got = rows.largest(row)
    assert got is not None
    wanted = int(row.float().numpy().argmax())
    assert got[1].tolist() == [wanted]
    assert bits(got[0]) == bits(row[0, wanted].float()[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_of_many_rows_is_the_one_that_numpy_finds(
    dtype: torch.dtype, size: int, without_kernels: pytest.MonkeyPatch
) -> None:
    """Bug guarded: rows of a slice read as if they followed one another, a rest that fills no vector, a row that another thread
    writes over."""
    logits = (3 * torch.randn(700, size + 3, generator=torch.Generator().manual_seed(size))).round().to(dtype)
    views = (logits, logits[:, 1 : size + 1], logits[::3])
    got = [peaks(view) for view in views]
    assert all(rows.largest(view) is not None for view in views), "the kernel answers for all of them"
    in_torch(without_kernels)
    for view, (values, ids) in zip(views, got, strict=True):
        wanted_values, wanted_ids = peaks(view)
        assert ids.tolist() == wanted_ids.tolist()
        assert bits(values) == bits(wanted_values)


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2).t()]
)
def test_what_the_kernel_cannot_read_is_left_to_others(logits: Tensor) -> None:
    """Bug guarded: bits read as another dtype, or a column read as a row."""
    logits[1, 2] = 1.0
    assert rows.largest(logits) is None
    assert rows.draw(logits, None, torch.zeros(2, dtype=torch.int64)) is None
    assert peaks(logits)[1].tolist() == [0, 2]


def test_nothing_is_compiled_that_no_model_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: `kernels: torch` in the configuration, and a compiler is run for sampling."""
    monkeypatch.setattr(build, "load", lambda folder: pytest.fail("compiled"))
    build.kernels.cache_clear()
    assert build.loaded_kernels() is None
    assert rows.largest(torch.zeros(1, 5)) is None
    monkeypatch.undo()
    assert build.kernels() is not None
    assert rows.largest(torch.zeros(1, 5)) is not None


# --- draws ------------------------------------------------------------------------------------------------------------------


def logits_of_kind(kind: str, num_rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, size, generator=generator)
    if kind == "peaked":
        logits = 7.0 * logits
    elif kind == "certain":
        logits[torch.arange(num_rows), torch.randint(size, (num_rows,), generator=generator)] = 60.0
    elif kind == "two levels":  # everything that can win lies just outside the window
        logits = torch.where(logits > 3.0, 0.0, -noise._WINDOW - 0.01)
    elif kind == "forbidden tokens":
        logits[:, 1:-1] = -torch.inf
    elif kind == "flat":
        logits = torch.zeros(num_rows, size)
    elif kind == "far from zero":  # as a tiny temperature makes them: float32 holds whole numbers, float64 rounds the noise
        logits = 1e7 + (3 * logits).round()
    return logits


KINDS = ["normal", "peaked", "certain", "two levels", "forbidden tokens", "flat", "far from zero"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(3, 50_000), (300, 4_000), (2_000, 65), (2_000, 7), (3, 1)])
def test_the_compiled_draw_is_the_whole_one(kind: str, num_rows: int, size: int) -> None:
    """Bug guarded: a token that would have won is pruned, a hash or a temperature that differs in a bit: the draft on one
    machine and the target on another would draw different tokens."""
    logits = logits_of_kind(kind, num_rows, size)
    keys = row_keys(torch.arange(num_rows), torch.arange(num_rows) + 9, Stream.COUPLED)
    for temperatures in (None, torch.rand(num_rows, generator=torch.Generator().manual_seed(1)) * 2 + 0.05):
        scaled = logits if temperatures is None else logits / temperatures[:, None]
        whole = (gumbel(keys, torch.arange(size)) + scaled).argmax(dim=-1)
        assert torch.equal(gumbel_argmax(logits, keys, temperatures), whole)
        drawn = rows.draw(logits, temperatures, keys)
        assert drawn is not None
        tokens, sure = drawn
        assert torch.equal(tokens[sure], whole[sure]), "what is sure needs nobody else"


def test_the_lowest_temperature_that_samples() -> None:
    """Bug guarded: a quotient that leaves the window by rounding, or float32."""
    logits = logits_of_kind("normal", 500, 700)
    logits[:, 1::2] = logits[:, ::2]  # ties: the noise decides
    keys = row_keys(torch.arange(500), torch.arange(500), Stream.COUPLED)
    temperatures = torch.full((500,), 1.01e-5)
    whole = (gumbel(keys, torch.arange(700)) + logits / temperatures[:, None]).argmax(dim=-1)
    assert torch.equal(gumbel_argmax(logits, keys, temperatures), whole)


@pytest.mark.parametrize("kind", ["normal", "far from zero"])
def test_close_calls_are_decided_by_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: two scores that another library's logarithm may put into another order, decided by whichever is at hand."""
    logits = logits_of_kind(kind, 400, 300)
    keys = row_keys(torch.arange(400), torch.arange(400), Stream.COUPLED)
    if kind == "normal":  # a margin that many rows do not keep; far from zero some do not keep the real one
        monkeypatch.setattr(rows, "MARGIN", 0.05)
    drawn = rows.draw(logits, None, keys)
    assert drawn is not None
    asked: list[int] = []
    in_torch_only = noise._torch_argmax

    def wrong_on_purpose(logits: Tensor, keys: Tensor, temperatures: Tensor | None) -> Tensor:
        asked.append(len(logits))
        return in_torch_only(logits, keys, temperatures) + 1000

    monkeypatch.setattr(noise, "_torch_argmax", wrong_on_purpose)
    tokens, sure = gumbel_argmax(logits, keys), drawn[1]
    scores = (gumbel(keys, torch.arange(300)) + logits).sort(dim=-1, descending=True).values
    margin = rows.MARGIN * (1 + logits.amax(dim=-1).abs())
    is_close = scores[:, 0] - scores[:, 1] <= margin
    assert torch.equal(~sure, is_close)
    assert torch.equal(tokens >= 1000, is_close)
    assert asked == [int(is_close.sum())]
    assert 0 < asked[0] < 400


# --- decisions --------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "coupled": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_tokens": {"min_tokens": 50},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_decisions_do_not_depend_on_who_looked(options: str, dtype: torch.dtype, without_kernels: pytest.MonkeyPatch) -> None:
    """Bug guarded: a draft with a compiler and a target without one make different texts; a broken row that one of them lets
    through."""
    generator = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(20 * 3, 500, generator=generator)).round().to(dtype)
    logits[7, 3], logits[20, 9], logits[33] = math.nan, math.inf, -math.inf
    params = [SamplingParams(seed=i, max_tokens=100, **OPTIONS[options]) for i in range(20)]  # type: ignore[arg-type]
    first = [SampledSequence(own, 1, [5, 9, 4]) for own in params]
    drafted = [SampledSequence(own, 1, [5, 9, 4, i, 1], (i, 1)) for i, own in enumerate(params)]

    def answers() -> tuple[object, ...]:
        return decide(logits, drafted, (0,)), propose_tokens(logits[::3], first, (0,)), propose_tokens(logits[7:], first, (0,))

    compiled = answers()
    in_torch(without_kernels)
    assert compiled == answers()

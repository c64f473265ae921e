"""The random bits: the same everywhere, uniform, independent. Statistical tests use fixed keys, so they cannot fail by chance:
their false-alarm probability is that of the keys chosen here, and is stated for whoever changes them."""

import math

import pytest
import torch
from torch import Tensor

from engine import noise
from engine.noise import Stream, argmax_among, gumbel, gumbel_argmax, row_keys, signed64, uniform

MASK = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
EDGES = (0, 1, 2, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, MASK)


def mix(z: int) -> int:
    """SplitMix64's finaliser, on unsigned Python integers."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def unmix(z: int) -> int:
    """The inverse of `mix`."""
    z = z ^ (z >> 31) ^ (z >> 62)
    z = (z * pow(MIX_2, -1, 1 << 64)) & MASK
    z = z ^ (z >> 27) ^ (z >> 54)
    z = (z * pow(MIX_1, -1, 1 << 64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


def key_of(seed: int, position: int, stream: int) -> int:
    return mix(mix(seed + GOLDEN * (stream + 1) & MASK) ^ (position * GOLDEN & MASK))


def uniform_of(key: int, token: int) -> float:
    return ((mix(key + (token + 1) * GOLDEN & MASK) >> 12) + 0.5) / 2**52


def keys_tensor(seeds: list[int], positions: list[int], stream: Stream = Stream.COUPLED) -> Tensor:
    return row_keys(torch.tensor([signed64(seed) for seed in seeds]), torch.tensor(positions), stream)


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Probability of counts at least as far from ``expected`` by chance (upper tail of the chi-square distribution)."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2), statistic / 2))


# --- the same bits everywhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", Stream)
def test_equals_plain_integers(stream: Stream) -> None:
    """Bug guarded: arithmetic instead of logical shifts, or overflow that does not wrap: other bits on another device or
    backend, and a text that changes with the machine."""
    generator = torch.Generator().manual_seed(1)
    seeds = [*EDGES, *torch.randint(-(1 << 63), (1 << 63) - 1, (200,), generator=generator).tolist()]
    positions = [(17 * i) % 5000 for i in range(len(seeds))]
    ids = [0, 1, 2, 49151, 151935, (1 << 31) - 1]
    keys = keys_tensor(seeds, positions, stream)
    wanted = [key_of(seed & MASK, position, stream) for seed, position in zip(seeds, positions, strict=True)]
    assert [key & MASK for key in keys.tolist()] == wanted
    assert uniform(keys, torch.tensor(ids)).tolist() == [[uniform_of(key, token) for token in ids] for key in wanted]


def test_known_values() -> None:
    """Bug guarded: a refactoring of generator and reference together changes every seeded text that users have kept."""
    assert [stream.value for stream in (Stream.COUPLED, Stream.DRAFT, Stream.ACCEPT, Stream.RESAMPLE)] == [0, 1, 2, 3]
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF, "the first output of SplitMix64 from seed 0, as published"
    assert uniform(keys_tensor([42], [7]), torch.tensor([0, 1])).tolist() == [[0.026196035681798846, 0.8935444464595316]]
    last = uniform(keys_tensor([MASK], [123456], Stream.RESAMPLE), torch.tensor([151935]))
    assert last.tolist() == [[0.3614180720820136]]


def test_ids_per_row_are_the_same_as_ids_for_all() -> None:
    """Bug guarded: noise on the surviving candidates of a row differs from the noise of the same tokens in the whole
    vocabulary."""
    keys = keys_tensor([1, 2, 3], [5, 6, 7])
    everything = uniform(keys, torch.arange(100))
    ids = torch.tensor([[3, 99, 0], [50, 51, 52], [7, 7, 8]])
    assert torch.equal(uniform(keys, ids), everything.gather(1, ids))
    assert torch.equal(gumbel(keys, ids), gumbel(keys, torch.arange(100)).gather(1, ids))


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Bug guarded: in-place mixing that leaks into the inputs, or into another row."""
    seeds, positions = torch.arange(50), torch.arange(50) * 3
    seeds_before, positions_before = seeds.clone(), positions.clone()
    keys = row_keys(seeds, positions, Stream.DRAFT)
    keys_before = keys.clone()
    together = gumbel(keys, torch.arange(300))
    assert torch.equal(seeds, seeds_before)
    assert torch.equal(positions, positions_before)
    assert torch.equal(keys, keys_before)
    for i in (0, 17, 49):
        alone = gumbel(row_keys(seeds[i : i + 1], positions[i : i + 1], Stream.DRAFT), torch.arange(300))
        assert torch.equal(alone[0], together[i])


def test_signed64_keeps_the_bits() -> None:
    """Bug guarded: a seed of the upper half raises, or meets the noise of another seed."""
    assert [signed64(value) & MASK for value in EDGES] == list(EDGES)
    assert all(-(1 << 63) <= signed64(value) < 1 << 63 for value in EDGES)


# --- never infinite ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 1, (1 << 12) - 1, 1 << 12, 1 << 63, MASK - (1 << 12), MASK], ids=hex)
def test_the_most_extreme_bits_give_finite_noise(bits: int) -> None:
    """Bug guarded: u = 0 or u = 1 gives an infinite Gumbel value, and with a probability of zero NaN. The keys are computed
    backwards from the bits, since no search would find them."""
    token = 5
    key = signed64(unmix(bits) - (token + 1) * GOLDEN)
    u = uniform(torch.tensor([key]), torch.tensor([token]))
    assert 0.0 < u.item() < 1.0
    assert u.item() == ((bits >> 12) + 0.5) / 2**52
    assert math.isfinite(gumbel(torch.tensor([key]), torch.tensor([token])).item())


# --- uniform and independent ------------------------------------------------------------------------------------------------

FALSE_ALARM = 1e-4
"""Of each chi-square test below, under the choice of keys."""


def axis(name: str, count: int = 1 << 16) -> Tensor:
    """Uniforms in a row along one axis of the key, everything else fixed."""
    line = torch.arange(count)
    zeros = torch.zeros_like(line)
    if name == "token":
        return uniform(keys_tensor([3], [9]), line)[0]
    seeds = {"position": zeros + 11, "seed": line, "distant seed": line * 0x5DEECE66D}.get(name, zeros)
    return uniform(row_keys(seeds, line if name == "position" else zeros + 9, Stream.COUPLED), torch.tensor([7]))[:, 0]


AXES = ["token", "position", "seed", "distant seed"]


@pytest.mark.parametrize("name", AXES)
def test_uniform_along_every_axis(name: str) -> None:
    """Bug guarded: some values come up more often, so that a token is drawn more often than its probability."""
    counts = torch.histc(axis(name), bins=256, min=0.0, max=1.0)
    assert chi_square_p(counts, torch.full((256,), (1 << 16) / 256, dtype=torch.float64)) > FALSE_ALARM


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbours_are_independent(name: str, distance: int) -> None:
    """Bug guarded: noise of neighbouring tokens, positions or seeds is correlated, which biases joint distributions only."""
    u = axis(name)
    cells = (u[:-distance] * 16).long() * 16 + (u[distance:] * 16).long()
    counts = torch.bincount(cells, minlength=256).double()
    assert chi_square_p(counts, torch.full((256,), counts.sum().item() / 256, dtype=torch.float64)) > FALSE_ALARM


def test_the_tests_above_see_correlation() -> None:
    """Bug guarded: a chi-square test without teeth. Every second value copied from its neighbour must be found."""
    u = axis("token").clone()
    u[1::16] = u[::16]
    cells = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    counts = torch.bincount(cells, minlength=256).double()
    assert chi_square_p(counts, torch.full((256,), counts.sum().item() / 256, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("other", [Stream.DRAFT, Stream.ACCEPT, Stream.RESAMPLE])
def test_streams_are_disjoint(other: Stream) -> None:
    """Bug guarded: draft and resampling share noise, which biases the ratio test although each of them alone looks right."""
    seeds, positions = torch.arange(300), torch.arange(300) % 7
    rows = {stream: uniform(row_keys(seeds, positions, stream), torch.arange(200)).flatten() for stream in Stream}
    for stream in Stream:
        if stream is other:
            continue
        assert not torch.isin(rows[other], rows[stream]).any()
        correlation = torch.corrcoef(torch.stack([rows[other], rows[stream]]))[0, 1].item()
        assert abs(correlation) < 4.0 / math.sqrt(60_000), "four standard deviations: false alarm 6e-5"


def test_gumbel_has_its_moments() -> None:
    """Bug guarded: a logarithm too many or a sign; mean is Euler's constant, variance π²/6, P(G < 0) = 1/e."""
    values = gumbel(keys_tensor(list(range(256)), [1] * 256), torch.arange(512)).flatten()
    n = values.numel()
    assert values.mean().item() == pytest.approx(0.5772156649, abs=5 * math.pi / math.sqrt(6 * n))
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=5 * math.sqrt(4.4 / n))
    assert (values < 0).double().mean().item() == pytest.approx(math.exp(-1), abs=5 * 0.48 / math.sqrt(n))


def test_the_largest_of_noisy_logits_follows_softmax() -> None:
    """Bug guarded: Gumbel-max with the engine's own noise does not draw from the distribution it is given."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    noise = gumbel(keys_tensor(list(range(100_000)), [3] * 100_000), torch.arange(5))
    counts = torch.bincount((p.log() + noise).argmax(dim=1), minlength=5).double()
    assert chi_square_p(counts, p * 100_000) > FALSE_ALARM


# --- draws ------------------------------------------------------------------------------------------------------------------


def logits_of_kind(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        logits = 7.0 * logits
    elif kind == "certain":
        logits[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] = 60.0
    elif kind == "two levels":  # everything that can win lies just outside the window
        logits = torch.where(logits > 3.0, 0.0, -noise._WINDOW - 0.01)
    elif kind == "forbidden tokens":
        logits[:, 1:-1] = -torch.inf
    elif kind == "ties":
        logits = (2 * logits).round()
    elif kind == "flat":
        logits = torch.zeros(rows, vocab)
    return logits


@pytest.mark.parametrize("kind", ["normal", "peaked", "certain", "two levels", "forbidden tokens", "ties", "flat"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 50_000), (300, 4_000), (2_000, 7), (3, 1)])
def test_the_pruned_draw_is_the_whole_one(kind: str, rows: int, vocab: int) -> None:
    """Bug guarded: a token that would have won is pruned, which changes a text once in thousands of tokens."""
    logits, keys = logits_of_kind(kind, rows, vocab), row_keys(torch.arange(rows), torch.arange(rows) + 9, Stream.COUPLED)
    whole = (gumbel(keys, torch.arange(vocab)) + logits).argmax(dim=-1)
    assert torch.equal(gumbel_argmax(logits, keys), whole)
    assert torch.equal(gumbel_argmax(logits.double() - 5.0, keys), whole)


def test_pruning_only_lets_too_much_through() -> None:
    """Bug guarded: the bound on the random bits is rounded the wrong way, so that a token is lost once in 2^52 draws: every
    hash whose noise reaches a bound passes, and hardly any other one."""
    keys = row_keys(torch.arange(400), torch.arange(400), Stream.COUPLED)
    values = gumbel(keys, torch.arange(1000))
    for bound in (0.6, 2.0, 5.0, 7.5):
        passed = noise._bits_at_least(noise._raw_bits(keys, 1000), torch.full((400,), bound, dtype=torch.float64))
        assert torch.equal(passed, values >= bound)
    own = values.amax(dim=1)
    assert own.max() > 12
    assert noise._bits_at_least(noise._raw_bits(keys, 1000), own).any(dim=1).all(), "the bound itself is let through"


def test_the_best_of_flat_scores() -> None:
    """Bug guarded: the winner of a row is taken from its neighbour, a tie is decided by the order, an empty row gets id 0."""
    scores = torch.tensor([1.0, 3.0, 3.0, -2.0, 5.0], dtype=torch.float64)
    ids, rows = torch.tensor([4, 9, 2, 7, 8]), torch.tensor([0, 0, 0, 2, 3])
    assert argmax_among(scores, ids, rows, 5).tolist() == [2, -1, 7, 8, -1]

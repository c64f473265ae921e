"""The statistical test: drafted tokens of many seeds, drawn through real rounds, against the target's exact distribution."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from deployments.lossless.play import ChosenDepth, Played, UniformSource, play
from deployments.lossless.reference import LogitsOf, distribution
from engine.errors import OutriderError
from engine.propose.base import DraftSource
from engine.propose.from_text import TextSource
from engine.types import SAMPLING_RULES, GenerateRequest, SamplingParams
from engine.verify.base import TargetModel

FALSE_ALARM = 1e-6
"""Per p-value: how often a correct engine fails by chance, for a choice of seeds."""
FIRST_SEED = 1_000_000
SETTINGS: dict[str, float] = {"temperature": 1.3, "top_k": 4, "top_p": 0.95}
"""Few outcomes, so that most are expected often enough to be a cell of their own."""
PREFIXES = ("I", "The", "My favourite", "Once upon a time", "In the morning we", "Yesterday")
"""Short, because every seed prefills one; the one whose next token is the least certain is used."""
NUM_TESTED = 2
"""Tokens that are tested together: the second and the third of the text, since the first comes with the prefill."""
LEAST_EXPECTED = 5.0
NUM_UNIFORM = 8
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """How one rule fared with one draft."""

    rule: str
    draft: str
    num_samples: int
    num_cells: int
    p_first: float
    """Chi-square of the first drafted token."""
    p_joint: float
    """Of both drafted tokens together."""
    distance: float
    """Total variation between the frequencies of the pairs and their probabilities."""
    distance_by_chance: float
    """What that is for independent draws, on average."""
    acceptance: float | None

    @property
    def passes(self) -> bool:
        """Whether neither p-value is below `FALSE_ALARM`."""
        return min(self.p_first, self.p_joint) >= FALSE_ALARM


@dataclass(slots=True)
class Exact:
    """The distribution that the tested tokens must have, after one prompt."""

    prompt_ids: Tokens
    pairs: dict[Tokens, float] = field(default_factory=dict)
    likely: Tokens = ()
    """The tokens that are most often one of the tested."""

    @property
    def entropy(self) -> float:
        """Of the pair, in nats."""
        return -sum(p * math.log(p) for p in self.pairs.values() if p > 0)


def exact_distribution(prompts: Mapping[str, Sequence[int]], logits_of: LogitsOf) -> tuple[str, Exact]:
    """The prompt whose first token is the least certain, and the exact joint distribution of the two tokens after that.

    Raises `OutriderError` when no prompt leaves anything to chance.
    """
    params = SamplingParams(**SETTINGS)  # type: ignore[arg-type]
    rows = logits_of(list(prompts.values()))
    firsts = {name: distribution(row, params) for name, row in zip(prompts, rows, strict=True)}
    name = max(firsts, key=lambda key: -sum(p * math.log(p) for p in firsts[key].values()))
    prompt = tuple(prompts[name])
    texts: dict[Tokens, float] = {(token,): p for token, p in firsts[name].items()}
    for _ in range(NUM_TESTED):
        texts = _extended(prompt, texts, params, logits_of)
    exact = Exact(prompt)
    single: dict[int, float] = defaultdict(float)
    for tokens, p in texts.items():
        exact.pairs[tokens[1:]] = exact.pairs.get(tokens[1:], 0.0) + p
        for token in tokens[1:]:
            single[token] += p
    exact.likely = tuple(sorted(single, key=single.__getitem__, reverse=True)[:NUM_UNIFORM])
    if len(exact.pairs) < 2:
        raise OutriderError(f"no statistical test: after '{name}' the target leaves no choice")
    return name, exact


def _extended(prompt: Tokens, texts: dict[Tokens, float], params: SamplingParams, logits_of: LogitsOf) -> dict[Tokens, float]:
    rows = logits_of([prompt + tokens for tokens in texts])
    return {
        (*tokens, token): mass * p
        for (tokens, mass), row in zip(texts.items(), rows, strict=True)
        for token, p in distribution(row, params).items()
    }


class Statistics:
    """Draws seeds through rounds of depth 1 and 2, in turns: the second tested token is a draft token or a bonus token."""

    def __init__(self, target: TargetModel, exact: Exact, num_seeds: int, *, row_invariant: bool):
        """``row_invariant``: no outcome can cross the edge of a filter by rounding, so an impossible one is proof."""
        self.target = target
        self.exact = exact
        self.num_seeds = num_seeds
        self.row_invariant = row_invariant

    def tests(self, source: DraftSource | None, *, quick: bool) -> list[tuple[str, Callable[[], Sampled]]]:
        """Every rule with the configured draft, if it is a model, and a uniform one (not in quick runs that have a model)."""
        sources: list[DraftSource] = [] if source is None or isinstance(source, TextSource) else [source]
        if not quick or not sources:
            sources.append(UniformSource(self.exact.likely))
        return [
            (f"{rule}, {one.name} draft", partial(self.sample, rule, one, self.num_seeds))
            for one in sources
            for rule in SAMPLING_RULES
        ]

    def control(self) -> Sampled:
        """A draft that reports a fair draw and always offers the same token, under the ratio test: this must be found."""
        biased = UniformSource(self.exact.likely, pick=lambda tokens: tokens[0])
        return self.sample("rejection", biased, min(self.num_seeds, 200))

    def sample(self, rule: str, source: DraftSource, num_seeds: int) -> Sampled:
        """Play `num_seeds` short requests."""
        requests = [self._request(rule, i) for i in range(num_seeds)]
        played = play(self.target, source, requests, ChosenDepth(_depth))
        self._check(played)
        counts = Counter(text.ids[1 : 1 + NUM_TESTED] for text in played.texts.values())
        firsts: dict[Tokens, float] = {}
        for tokens, p in self.exact.pairs.items():
            firsts[tokens[:1]] = firsts.get(tokens[:1], 0.0) + p
        first_counts: Counter[Tokens] = Counter()
        for tokens, count in counts.items():
            first_counts[tokens[:1]] += count
        p_joint, num_cells = chi_square(counts, self.exact.pairs, strict=self.row_invariant)
        return Sampled(
            rule=rule,
            draft=source.name,
            num_samples=num_seeds,
            num_cells=num_cells,
            p_first=chi_square(first_counts, firsts, strict=self.row_invariant)[0],
            p_joint=p_joint,
            distance=_distance(counts, self.exact.pairs),
            distance_by_chance=_distance_by_chance(self.exact.pairs, num_seeds),
            acceptance=played.accepted.total() / played.drafted.total() if played.drafted.total() else None,
        )

    def _request(self, rule: str, index: int) -> GenerateRequest:
        # One token comes with the prefill, `_depth` draft tokens and one more from the round after it.
        depth = _depth(str(index))
        params = SamplingParams(seed=FIRST_SEED + index, rule=rule, max_tokens=depth + 2, ignore_eos=True, **SETTINGS)  # type: ignore[arg-type]
        return GenerateRequest(request_id=str(index), prompt_ids=self.exact.prompt_ids, params=params)

    def _check(self, played: Played) -> None:
        error = next((text.error for text in played.texts.values() if text.error is not None), None)
        if error is not None:
            raise OutriderError(f"a request of the statistical test failed: {error}")


def _depth(request_id: str) -> int:
    return 1 + int(request_id) % 2


def chi_square(counts: Counter[Tokens], probabilities: Mapping[Tokens, float], *, strict: bool) -> tuple[float, int]:
    """Pearson's test of counts against probabilities that sum to 1: (p-value, cells).

    Outcomes expected less than `LEAST_EXPECTED` times share a cell. An outcome that cannot happen is proof (p = 0) when
    ``strict``, else one of the rare.
    """
    total = counts.total()
    impossible = [outcome for outcome in counts if outcome not in probabilities]
    if impossible and strict:
        return 0.0, len(probabilities)
    probabilities = {**probabilities, **dict.fromkeys(impossible, 0.0)}
    cells = sorted(((total * p, counts[outcome]) for outcome, p in probabilities.items()), reverse=True)
    large = [cell for cell in cells if cell[0] >= LEAST_EXPECTED]
    rest = cells[len(large) :]
    if rest:
        pooled = sum(wanted for wanted, _ in rest), sum(seen for _, seen in rest)
        if pooled[0] < LEAST_EXPECTED and large:
            last = large.pop()
            pooled = pooled[0] + last[0], pooled[1] + last[1]
        large.append(pooled)
    if len(large) < 2:
        return 1.0, len(large)
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), len(large)


def _distance(counts: Counter[Tokens], probabilities: Mapping[Tokens, float]) -> float:
    total = counts.total()
    return sum(abs(counts[outcome] / total - probabilities.get(outcome, 0.0)) for outcome in {*counts, *probabilities}) / 2


def _distance_by_chance(probabilities: Mapping[Tokens, float], num_samples: int) -> float:
    """Mean of the same for independent draws: counts that are expected often are normal, rare ones are Poisson."""
    total = 0.0
    for p in probabilities.values():
        mean = num_samples * p
        normal = math.sqrt(2 / math.pi * mean * (1 - p))
        total += min(normal, 2 * mean) / num_samples
    return total / 2

"""How often a real pair's outcomes are among the prepared ones. Counted in one process: nothing here depends on time."""

from collections import Counter
from dataclasses import dataclass, field

from deployments.bench.prompts import PROMPTS
from engine.build import build_local_engine
from engine.config import OutriderConfig
from engine.errors import OutriderError
from engine.scheduler import FixedDepth
from engine.types import GenerateRequest, SamplingParams

DEPTH, FAN_OUT = 3, 3
KINDS = ("recovery", "bonus", "plain")


@dataclass
class HitRate:
    """Outcomes of rounds at temperature 1 under `coupled`, by kind."""

    target: str
    draft: str
    depth: int = DEPTH
    fan_out: int = FAN_OUT
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0

    @property
    def rounds(self) -> int:
        """Rounds times requests for which outcomes had been prepared; not those in which the draft had to catch up first."""
        return sum(self.hits[kind] + self.misses[kind] for kind in KINDS)

    @property
    def overall(self) -> float | None:
        """Share of those whose outcome was among them."""
        return self.hits.total() / self.rounds if self.rounds else None

    def of(self, kind: str) -> float | None:
        """The same for one of `KINDS`."""
        tries = self.hits[kind] + self.misses[kind]
        return self.hits[kind] / tries if tries else None


def measure_hit_rate(config: OutriderConfig, prompts_per_kind: int, num_tokens: int) -> HitRate:
    """Prompts of all kinds, three seeds each, together in one batch."""
    engine = build_local_engine(config)
    chat = engine.tokenizer.chat_template is not None
    requests = [
        GenerateRequest(
            request_id=f"{kind} {index} {seed}",
            prompt_ids=tuple(engine.encode(text, chat=chat)),
            params=SamplingParams(temperature=1.0, rule="coupled", seed=seed, max_tokens=num_tokens, ignore_eos=True),
        )
        for kind, texts in PROMPTS.items()
        for index, text in enumerate(texts[:prompts_per_kind])
        for seed in range(3)
    ]
    rate = HitRate(engine.info.name, engine.source_name or "")
    driver = engine.driver(FixedDepth(DEPTH, fan_out=FAN_OUT))
    for request in requests:
        driver.add(request)
    while driver.scheduler.running or driver.scheduler.waiting:
        result = driver.step()
        failed = next((delta.error for delta in result.deltas if delta.error is not None), None)
        if failed is not None:
            raise OutriderError(failed)
        rate.hits.update(result.report.hits)
        rate.misses.update(result.report.misses)
        rate.drafted += result.report.num_drafted
        rate.accepted += result.report.num_accepted
    return rate

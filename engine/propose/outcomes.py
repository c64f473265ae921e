"""The speculation cache: drafts that were prepared for what the target might answer.

Beside every verify a source may be told to prepare. What it was told is noted here (`OutcomeCache.expect`), its answer is kept
(`store`), and when the next round begins the committed tokens decide which of the prepared drafts is the right one (`take`).
Nothing here trusts the source: an answer counts only where it was asked for, and only the outcome that came true is looked at.

A prepared draft is as good as one that is asked for now: it follows the same tokens, and its noise is that of the same
committed length. It stays so when the target was lost or the request was preempted in between, since only committed tokens are
compared.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.propose.checks import is_valid_draft, known_reason
from engine.types import Outcome, Prepared, PrepareItem, PrepareReply

MAX_ENDED = 4096
"""Requests that ended while an answer was under way: so many are remembered, so that it surprises nobody when it comes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was found for a request: a prepared draft, or how it was missed, or nothing where nothing had been prepared."""

    kind: str | None = None
    """Of the outcome (recovery, bonus, plain); of a miss also late or unprepared; None = no draft was to be prepared."""
    outcome: Outcome | None = None
    reason: str | None = None
    """Why the source prepared nothing of use."""


@dataclass(slots=True)
class Stored:
    """What became of an answer."""

    believed: list[Prepared] = field(default_factory=list)
    """Those whose ``known_length`` tells something new: they answer a question, even if it is one of an older round."""
    num_unexpected: int = 0
    """Sequences that nobody asked about, or that were answered before."""


@dataclass(slots=True)
class _Expected:
    """One request's question and the answer to it."""

    round_id: int
    since: int
    """Round of the request's first question: an older answer is about another request of the same id."""
    base_length: int
    """Committed tokens that the source was believed to hold when it was asked."""
    committed: int
    """Tokens that were committed then."""
    draft: tuple[int, ...]
    depth: int
    fan_out: tuple[int, ...]
    answer: Prepared | None = None
    taken: bool = False

    def asked_in(self, round_id: int) -> bool:
        """Whether an answer of this round may be one to this request: not if it has come before."""
        return self.since <= round_id < self.round_id or (round_id == self.round_id and self.answer is None)

    def tells_nothing(self, answer: Prepared) -> bool:
        """Whether the source only repeats what it was believed to know, as in the name of one that is busy with older work:
        what that says about its progress is newer, whichever is read first."""
        return answer.reason is not None and answer.known_length == self.base_length > 0

    def accepted(self, ids: Sequence[int]) -> int | None:
        """How many tokens of the draft became ``ids`` before one more token did; None where they are no outcome of this."""
        accepted = len(ids) - self.committed - 1
        if not 0 <= accepted <= len(self.draft) or tuple(ids[self.committed : -1]) != self.draft[:accepted]:
            return None
        return accepted

    def kind(self, accepted: int) -> str:
        if not self.draft:
            return "plain"
        return "recovery" if accepted < len(self.draft) else "bonus"


class OutcomeCache:
    """What one lane's source has been told to prepare, and what it prepared."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._expected: dict[str, _Expected] = {}
        self._ended: dict[str, None] = {}

    @property
    def outstanding(self) -> bool:
        """Whether an answer may still come."""
        return bool(self._ended) or any(expected.answer is None for expected in self._expected.values())

    def expect(self, round_id: int, item: PrepareItem) -> None:
        """Note a question that is sent now; an older one of the same request is not of use any more."""
        earlier = self._expected.get(item.sequence_id)
        since = earlier.since if earlier is not None else round_id
        committed = item.base_length + len(item.tokens)
        self._expected[item.sequence_id] = _Expected(
            round_id, since, item.base_length, committed, item.draft, item.depth, item.fan_out
        )

    def store(self, reply: PrepareReply) -> Stored:
        """Keep an answer, in whatever order answers come, and find out what in it was asked for."""
        stored = Stored()
        for prepared in reply.prepared:
            expected = self._expected.get(prepared.sequence_id)
            if expected is not None and expected.asked_in(reply.round_id):
                if not expected.tells_nothing(prepared):
                    stored.believed.append(prepared)
                if reply.round_id == expected.round_id:
                    expected.answer = prepared
            elif prepared.sequence_id in self._ended:
                del self._ended[prepared.sequence_id]
            else:
                stored.num_unexpected += 1
        return stored

    def awaits(self, request_id: str, ids: Sequence[int]) -> bool:
        """Whether a draft after ``ids`` may still come."""
        expected = self._expected.get(request_id)
        if expected is None or expected.answer is not None or expected.taken or not expected.fan_out:
            return False
        return expected.accepted(ids) is not None

    def take(self, request_id: str, ids: Sequence[int]) -> Taken:
        """The draft that was prepared to follow ``ids``, prompt and committed tokens. A draft is handed out once."""
        expected = self._expected.get(request_id)
        if expected is None or expected.taken or not expected.fan_out:
            return Taken()
        accepted = expected.accepted(ids)
        if accepted is None:
            return Taken()
        expected.taken = True
        if expected.answer is None:
            return Taken("late")
        answer, expected.answer = expected.answer, Prepared(sequence_id=request_id)
        return self._found(expected, answer, accepted, ids[-1])

    def forget(self, request_id: str) -> None:
        """The request ended. An answer that is under way is expected to come and is of no use."""
        expected = self._expected.pop(request_id, None)
        if expected is not None and expected.answer is None:
            self._ended[request_id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def lose_answers(self, request_ids: Collection[str] | None = None) -> None:
        """The source that was asked is gone (None: for all requests). What it prepared before stays good."""
        for request_id in list(self._expected) if request_ids is None else request_ids:
            if request_id in self._expected and self._expected[request_id].answer is None:
                del self._expected[request_id]
            self._ended.pop(request_id, None)
        if request_ids is None:
            self._ended.clear()

    def _found(self, expected: _Expected, answer: Prepared, accepted: int, token: int) -> Taken:
        if answer.reason is not None and not answer.outcomes:
            return Taken("unprepared", reason=known_reason(answer.reason))
        outcomes = [outcome for outcome in answer.outcomes if outcome.accepted == accepted]
        fitting = [outcome for outcome in outcomes if outcome.token == token]
        if len(outcomes) > expected.fan_out[accepted] or len(fitting) > 1:
            return Taken("unprepared", reason="invalid_draft")
        if not fitting:
            return Taken(expected.kind(accepted))
        (outcome,) = fitting
        if not is_valid_draft(outcome.tokens, outcome.probs, expected.depth, self._vocab_size):
            return Taken("unprepared", reason="invalid_draft")
        return Taken(expected.kind(accepted), outcome)

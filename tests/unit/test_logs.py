"""The lines of a request in its lane, and the formats they are written in."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from deployments import logs
from deployments.journal import Journal
from deployments.logs import SERVE_LOGGER, serve_options, set_up_actor, set_up_replica, tell
from engine.config import LoggingConfig
from engine.errors import InvalidRequest
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams, StepReport

SECRET_IDS = (1234567, 7654321)


class Lines:
    """What was written to standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """What the actor's loggers write; the loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in (SERVE_LOGGER, *logs.OWN_PACKAGES)]
    before = [(logger, list(logger.handlers), logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield Lines(capsys)
    for logger, handlers, own, level, propagate in before:
        own[:] = handlers
        logger.handlers, logger.level, logger.propagate = own, level, propagate


def request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "cmpl-1-0",
        "prompt_ids": SECRET_IDS,
        "params": SamplingParams(),
        "log_id": "http-1",
    }
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def delta(num_rounds: int, *, depth: int = 0, reason: FinishReason | None = None, **more: object) -> Delta:
    return Delta(
        request_id="cmpl-1-0",
        token_ids=SECRET_IDS,
        num_output_tokens=2 * num_rounds,
        num_rounds=num_rounds,
        num_drafted=5,
        num_accepted=3,
        depth=depth,
        finish_reason=reason,
        **more,  # type: ignore[arg-type]
    )


def report(**changes: object) -> StepReport:
    fields: dict[str, object] = dict.fromkeys(
        ("round_id", "batch_size", "num_waiting", "num_target_tokens", "num_prefill_tokens"), 1
    )
    fields |= dict.fromkeys(("num_committed", "num_drafted", "num_accepted"), 1)
    return StepReport(**{**fields, **changes})  # type: ignore[arg-type]


def parsed(lines: Lines) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_request_is_told_when_it_starts_and_when_it_ends(lines: Lines) -> None:
    """Bug guarded: the id that a client was told being nowhere in the lane's log, or figures of another request beside it."""
    set_up_actor(LoggingConfig(format="json"), "router")
    now = [10.0]
    losses = [0]
    journal = Journal(None, lambda: losses[0], lambda: now[0])
    with journal.open(request(output_ids=(7,))) as entry:
        now[0] = 10.5
        entry.saw(delta(1))
        journal.round_done(report())
        entry.saw(delta(2, depth=3))
        journal.round_done(report(fallbacks={"late": 2}))
        entry.saw(delta(3))
        losses[0] = 1
        journal.round_done(report(fallbacks={"late": 2}))
        now[0] = 12.0
        entry.saw(delta(4, reason=FinishReason.STOP))
        journal.round_done(report())
    started, ended = parsed(lines)
    assert (started["event"], ended["event"]) == ("request started", "request ended")
    assert started["request_id"] == ended["request_id"] == "http-1"
    assert (started["prompt_tokens"], started["resumed_tokens"]) == (2, 1)
    told = {key: ended[key] for key in ("reason", "tokens", "rounds", "drafted", "accepted", "plain_rounds", "target_losses")}
    assert told == {
        "reason": "stop",
        "tokens": 8,
        "rounds": 4,
        "drafted": 5,
        "accepted": 3,
        "plain_rounds": 2,
        "target_losses": 1,
    }
    assert ended["fallbacks"] == {"late": 1}
    assert (ended["first_token_s"], ended["seconds"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("error", "reason", "level"),
    [
        (asyncio.CancelledError(), "cancelled", "INFO"),
        (InvalidRequest("the prompt: a secret", "prompt"), "invalid", "INFO"),
        (RuntimeError("a secret"), "RuntimeError", "WARNING"),
    ],
)
def test_every_end_is_told_and_no_text(lines: Lines, error: BaseException, reason: str, level: str) -> None:
    """Bug guarded: a request that disappears from the log when it is cancelled; messages that quote what a user wrote."""
    set_up_actor(LoggingConfig(format="json"), "router")
    with pytest.raises(type(error)), Journal().open(request()):
        raise error
    ended = parsed(lines)[-1]
    assert (ended["reason"], ended["levelname"]) == (reason, level)
    assert "secret" not in lines.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_token_is_ever_logged(lines: Lines, form: str) -> None:
    """Bug guarded: prompts or answers in logs, which outlive the request and are read by others; ids are text, too."""
    set_up_actor(LoggingConfig(format=form, level="DEBUG"), "router")  # type: ignore[arg-type]
    journal = Journal()
    with journal.open(request()) as entry:
        entry.saw(delta(1, reason=FinishReason.ERROR, error="bad_logits"))
        journal.round_done(report())
    assert not any(str(token) in lines.getvalue() for token in SECRET_IDS)
    assert "http-1" in lines.getvalue()
    assert "bad_logits" in lines.getvalue()


def test_what_our_modules_log_goes_where_the_lines_of_serve_go(lines: Lines) -> None:
    """Bug guarded: warnings of the engine that no file of the replica has, and a level that they do not heed."""
    logging.getLogger(SERVE_LOGGER).handlers[:] = [logging.StreamHandler(first := io.StringIO())]
    logging.getLogger(SERVE_LOGGER).setLevel("WARNING")
    set_up_replica()
    logging.getLogger("engine.drivers").info("unheard")
    logging.getLogger("engine.drivers").warning("target lost")
    logging.getLogger(SERVE_LOGGER).handlers[:] = [logging.StreamHandler(again := io.StringIO())]  # Serve sets up anew
    logging.getLogger("deployments.wire").warning("refused")
    assert first.getvalue() == "target lost\n"
    assert again.getvalue() == "refused\n"


def test_text_lines_have_the_facts_and_the_id(lines: Lines) -> None:
    """Bug guarded: facts that only JSON lines have."""
    set_up_actor(LoggingConfig(), "target")
    tell(
        logging.getLogger(SERVE_LOGGER), logging.INFO, "ended", "http-1", tokens=3, why={"late": 2}, absent=None, share=0.123456
    )
    line = lines.getvalue().strip()
    assert line.endswith("target http-1 -- ended tokens=3 why=late:2 share=0.1235")


def test_serves_own_settings_stay_unless_ours_are_changed() -> None:
    """Bug guarded: a ``logging_config`` of the Serve file that is overruled by defaults of ours."""
    assert serve_options(LoggingConfig()) == {}
    assert serve_options(LoggingConfig(), access_log=False) == {"logging_config": {"enable_access_log": False}}
    told = serve_options(LoggingConfig(format="json", level="DEBUG"))
    assert told == {"logging_config": {"encoding": "JSON", "log_level": "DEBUG", "enable_access_log": True}}

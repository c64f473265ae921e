"""What processes log, and as what: text or JSON lines, with the id of the request that a line belongs to.

Serve's own logging config does it for replicas; the target is a plain actor, and gets a handler of ours. Neither prompts nor
answers are ever logged: a line holds ids, counts, times and reasons.
"""

import json
import logging
import sys
from contextvars import ContextVar
from typing import Any

from engine.config import LoggingConfig

SERVE_LOGGER = "ray.serve"
OWN_PACKAGES = ("engine", "autoscale", "deployments")
_PLAIN = (int, float, dict)
_TEXT_FORMAT = "%(levelname)s %(asctime)s %(component)s -- %(message)s"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request that is being answered, as in the header ``x-request-id``; empty outside of one."""


def serve_options(section: LoggingConfig, *, access_log: bool = True) -> dict[str, Any]:
    """Options for a deployment. Nothing for the defaults, so that a ``logging_config`` of Serve's own is not overruled."""
    changed = section != LoggingConfig()
    if not changed and access_log:
        return {}
    own = {"encoding": section.format.upper(), "log_level": section.level} if changed else {}
    return {"logging_config": {**own, "enable_access_log": access_log}}


def set_up_replica() -> None:
    """In a Serve replica: what our modules log goes where Serve's lines go, in the same format and from the same level on."""
    _share_handlers(logging.getLogger(SERVE_LOGGER))


def set_up_actor(section: LoggingConfig, component: str) -> None:
    """In an actor that Serve does not know: to standard error, which Ray keeps in a file of that worker."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(component) if section.format == "json" else _Text(component))
    logger = logging.getLogger(SERVE_LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(section.level)
    _share_handlers(logger)


def tell(logger: logging.Logger, level: int, event: str, name: str = "", **facts: Any) -> None:
    """Log what happened: ``event key=value ...`` as text, and as JSON the facts as fields of their own.

    ``name`` is the id of the request. Facts that are None are left out.
    """
    if not logger.isEnabledFor(level):
        return
    told = {key: value if isinstance(value, _PLAIN) else str(value) for key, value in facts.items() if value is not None}
    text = " ".join([event, *(f"{key}={_as_text(value)}" for key, value in told.items())])
    logger.log(level, "%s", text, extra={"event": event, **({"request_id": name} if name else {}), **told}, stacklevel=2)


def _share_handlers(source: logging.Logger) -> None:
    """The very list, so that our modules follow when Serve sets up its logger anew."""
    for package in OWN_PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = source.handlers
        logger.propagate = False
        logger.setLevel(source.level)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{count}" for key, count in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Text(logging.Formatter):
    def __init__(self, component: str):
        super().__init__(_TEXT_FORMAT, defaults={"component": component})

    def format(self, record: logging.LogRecord) -> str:
        name = getattr(record, "request_id", "")
        line = super().format(record)
        return line.replace(" -- ", f" {name} -- ", 1) if name else line


class _JsonLines(logging.Formatter):
    """The fields that Ray's own JSON lines have, and the facts."""

    def __init__(self, component: str):
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            "component_name": self._component,
            **{key: value for key, value in record.__dict__.items() if key not in _STANDARD},
        }
        if record.exc_info:
            line["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(line)


_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "component"}

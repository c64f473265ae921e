"""Errors that a user can act on. Each names the field that is wrong and what to do."""


class OutriderError(Exception):
    """Base of all errors whose message is written for the user; the command line prints it without a traceback."""


class ConfigError(OutriderError):
    """The configuration or a command's argument is wrong."""


class ModelError(OutriderError):
    """A model cannot be loaded or does not fit its role."""


class InvalidRequest(OutriderError):
    """A request is refused before any model sees it. ``field`` is the name in the request body, or None."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class Overloaded(OutriderError):
    """The waiting queue is full. ``retry_after_s`` is a hint for the client."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s

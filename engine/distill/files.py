"""Errors of the disk, whatever library writes."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


@contextmanager
def disk_errors(raised: type[Exception] = SafetensorError) -> Iterator[None]:
    """Around a write by a library that has an exception of its own, ``raised``, for a full disk: it becomes an OSError.

    torch's says nothing of a disk ("unexpected pos 704 vs 598"), so the message asks.
    """
    try:
        yield
    except raised as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"{reason}; is the disk full?") from error

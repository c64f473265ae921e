"""Server-sent events, as our own clients read them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

_DATA = b"data: "


def read_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream until its ``[DONE]``.

    Not by httpx's own lines: those also end at characters that a text may hold, such as U+2028.
    """
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA + b"{"):
                yield json.loads(line[len(_DATA) :])

"""Our own clients' reading of streams."""

import json

import httpx
import pytest

from deployments.sse import read_events

TEXT = "one\u2028two\u0085three\nfour"
STREAM = (
    f': keep-alive\n\ndata: {json.dumps({"text": TEXT}, ensure_ascii=False)}\n\ndata: {{"n": 2}}\n\ndata: [DONE]\n\n'.encode()
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_end_at_line_feeds_only(size: int) -> None:
    """Bug guarded: a text with U+2028 or U+0085 in it, or a chunk that ends in the middle of a character, is no JSON."""
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iter(pieces)))
    with httpx.Client(transport=transport) as client, client.stream("GET", "http://test") as response:
        assert list(read_events(response)) == [{"text": TEXT}, {"n": 2}]

"""Frames that are queued together travel together: no sockets here, only the queue and the way back."""

import asyncio

import msgspec

from deployments.wire import MAX_FRAME_BYTES, PROTOCOL_VERSION, _frame, _parts, _Writer


def make_frames(count: int, size: int = 3) -> list[bytes]:
    answers = [msgspec.msgpack.decode(msgspec.msgpack.encode({"value": "x" * size})) for _ in range(count)]
    return [msgspec.msgpack.encode((PROTOCOL_VERSION, call, "item", answer)) for call, answer in enumerate(answers)]


async def written(frames: list[bytes], max_frame_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """The messages that a writer makes of frames that were queued before it ran."""
    messages: list[bytes] = []
    done = asyncio.Event()

    async def write(message: bytes) -> None:
        messages.append(message)
        if sum(len(_parts(m, max_frame_bytes)) for m in messages) == len(frames):
            done.set()

    writer = _Writer(write, max_frame_bytes)
    for frame in frames:
        await writer.put(frame)
    task = asyncio.create_task(writer.run())
    await done.wait()
    task.cancel()
    return messages


async def test_a_round_of_answers_is_one_message() -> None:
    """Bug guarded: a write per answer, 0.2 ms each, kept the router of a batch of 256 busy for longer than the round."""
    frames = make_frames(256)
    (message,) = await written(frames)
    assert list(_parts(message, MAX_FRAME_BYTES)) == frames


async def test_large_frames_travel_alone_and_in_order() -> None:
    """Bug guarded: joined messages beyond the size limit, which the other side refuses; frames that overtake each other."""
    frames = [*make_frames(2), *make_frames(1, size=400), *make_frames(2)]
    messages = await written(frames, max_frame_bytes=512)
    assert [part for message in messages for part in _parts(message, 512)] == frames
    assert len(messages) == 3
    assert all(len(message) <= 512 for message in messages)


def test_a_single_frame_is_its_own_message() -> None:
    """Bug guarded: a frame that merely carries the word, or that cannot be read, taken for several."""
    frame = _frame(1, "item", None, MAX_FRAME_BYTES)
    assert _parts(frame, MAX_FRAME_BYTES) == (frame,)
    for data in (b"", b"\xc1$joined", msgspec.msgpack.encode((PROTOCOL_VERSION, 0, "$joined", 5)), b"$joined"):
        assert _parts(data, MAX_FRAME_BYTES) == (data,)

"""Event-stream messages, as botocore reads them."""

from __future__ import annotations

import pytest
from botocore.eventstream import ChecksumMismatch, EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from lorahost.bedrock import frames

KINDS = st.sampled_from(["chunk", "messageStart", "contentBlockDelta", "metadata"])


def read(data: bytes, cuts: list[int]) -> list[tuple[dict[str, object], bytes]]:
    """All messages in `data`, fed to botocore in pieces of the given sizes, the last one repeated."""
    buffer = EventStreamBuffer()
    found = []
    while data:
        size = cuts.pop() if len(cuts) > 1 else cuts[0]
        buffer.add_data(data[:size])
        data = data[size:]
        found += [(message.headers, message.payload) for message in buffer]
    return found


@given(
    st.lists(st.tuples(KINDS, st.binary(max_size=300)), min_size=1, max_size=6),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_messages_survive_any_cut(messages: list[tuple[str, bytes]], cuts: list[int]) -> None:
    data = b"".join(frames.event(kind, payload) for kind, payload in messages)
    assert read(data, cuts) == [
        ({":event-type": kind, ":content-type": "application/json", ":message-type": "event"}, payload)
        for kind, payload in messages
    ]


def test_an_exception_says_so_in_its_headers() -> None:
    [(headers, payload)] = read(frames.exception("throttlingException", b"{}"), [9])
    assert headers[":message-type"] == "exception"
    assert headers[":exception-type"] == "throttlingException"
    assert payload == b"{}"


@given(st.data())
def test_botocore_refuses_a_message_with_one_byte_changed(data: st.DataObject) -> None:
    message = bytearray(frames.event("chunk", b'{"bytes":"aGk="}'))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= data.draw(st.integers(1, 255))
    buffer = EventStreamBuffer()
    buffer.add_data(bytes(message))
    with pytest.raises(ChecksumMismatch):
        next(buffer)


def test_headers_may_hold_any_text() -> None:
    headers = {"name": "värde ☃", "empty": ""}
    [(found, _)] = read(frames.message(frames.encode_headers(headers), b""), [3])
    assert found == headers

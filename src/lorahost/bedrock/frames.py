"""AWS event-stream framing: each event is one binary message with checksums over its head and the whole.

A message is `u32 length | u32 headers' length | u32 CRC of these 8 bytes | headers | payload | u32 CRC of all before`,
big-endian; a header is `u8 name's length | name | u8 7 (string) | u16 value's length | value`.
"""

from __future__ import annotations

import functools
import struct
from zlib import crc32

CONTENT_TYPE = "application/vnd.amazon.eventstream"
STRING = 7
_LENGTHS = struct.Struct(">II")
_CRC = struct.Struct(">I")
_OVERHEAD = _LENGTHS.size + 2 * _CRC.size


def event(kind: str, payload: bytes) -> bytes:
    """The message of one event; `kind` is the union member, `payload` its JSON."""
    return message(_event_headers(kind), payload)


def exception(name: str, payload: bytes) -> bytes:
    """The message of one modelled exception; `name` is the union member, `payload` its JSON."""
    return message(_exception_headers(name), payload)


def message(headers: bytes, payload: bytes) -> bytes:
    """One message around encoded headers."""
    lengths = _LENGTHS.pack(_OVERHEAD + len(headers) + len(payload), len(headers))
    before = b"".join((lengths, _CRC.pack(crc32(lengths)), headers, payload))
    return before + _CRC.pack(crc32(before))


def encode_headers(headers: dict[str, str]) -> bytes:
    """String headers as they stand in a message."""
    parts = []
    for name, value in headers.items():
        raw_name, raw = name.encode(), value.encode()
        parts.append(struct.pack(f">B{len(raw_name)}sBH{len(raw)}s", len(raw_name), raw_name, STRING, len(raw), raw))
    return b"".join(parts)


@functools.cache
def _event_headers(kind: str) -> bytes:
    return encode_headers({":event-type": kind, ":content-type": "application/json", ":message-type": "event"})


@functools.cache
def _exception_headers(name: str) -> bytes:
    return encode_headers({":exception-type": name, ":content-type": "application/json", ":message-type": "exception"})

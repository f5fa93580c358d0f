"""Events are found however a stream is split, and a damaged or endless one is refused (R-RT-8)."""

from __future__ import annotations

import pytest

from penstock.backends.remote import frames
from penstock.backends.remote.event_stream import EventStreamFrames
from penstock.backends.remote.frames import Event, Frames, NdjsonFrames, SseFrames
from penstock.protocol.errors import EngineLost
from tests.backends.remote.scripted_server import message


def read(parser: Frames, *parts: bytes) -> list[Event]:
    found = [event for part in parts for event in parser.push(part)]
    return [*found, *parser.end()]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_server_sent_events_in_any_split(end: str) -> None:
    lines = [": keep-alive", "", "event: a", 'data: {"é": "日本"}', "", "data:1", "data: 2", "id: 7", "", "data: last"]
    stream = end.join(lines).encode()
    wanted = [Event("a", '{"é": "日本"}'.encode()), Event("", b"1\n2"), Event("", b"last")]
    for at in range(len(stream) + 1):
        assert read(SseFrames(), stream[:at], stream[at:]) == wanted, at
    assert read(SseFrames(), *(stream[at : at + 1] for at in range(len(stream)))) == wanted


def test_lines_of_json_in_any_split() -> None:
    stream = '{"a": "日"}\r\n\n{"b": 2}\n{"c": 3}'.encode()
    wanted = [Event("", '{"a": "日"}'.encode()), Event("", b'{"b": 2}'), Event("", b'{"c": 3}')]
    for at in range(len(stream) + 1):
        assert read(NdjsonFrames(), stream[:at], stream[at:]) == wanted, at


@pytest.mark.parametrize("make", [SseFrames, NdjsonFrames])
def test_an_endless_line_is_cut_off(make: type[Frames], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LONGEST", 1000)
    with pytest.raises(EngineLost):
        read(make(), *([b"data: " + b"x" * 100] * 20))


def test_an_endless_event_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LONGEST", 1000)
    with pytest.raises(EngineLost):
        read(SseFrames(), *([b"data: " + b"x" * 100 + b"\n"] * 20))


EMPTY = bytes.fromhex("000000100000000005c248eb7d98c8ff")
PAYLOAD = bytes.fromhex("0000001d00000000fd528c5a") + b"{'foo':'bar'}" + bytes.fromhex("c3653936")
"""Messages of the test suite that Amazon publishes with the format."""


def test_binary_messages_that_amazon_publishes() -> None:
    assert read(EventStreamFrames(), EMPTY, PAYLOAD) == [Event("", b""), Event("", b"{'foo':'bar'}")]


def test_binary_messages_in_any_split() -> None:
    stream = message({"a": "日"}, event_type="messageStart") + message({"b": 1}, event_type="messageStop")
    wanted = [Event("messageStart", b'{"a": "\\u65e5"}'), Event("messageStop", b'{"b": 1}')]
    for at in range(len(stream) + 1):
        assert read(EventStreamFrames(), stream[:at], stream[at:]) == wanted, at


def test_a_damaged_binary_message_is_never_used() -> None:
    stream = message({"text": "hello"}, event_type="contentBlockDelta")
    for at in range(len(stream)):
        damaged = stream[:at] + bytes((stream[at] ^ 0x10,)) + stream[at + 1 :]
        with pytest.raises(EngineLost):
            read(EventStreamFrames(), damaged)
    for at in range(1, len(stream)):
        with pytest.raises(EngineLost):  # cut off in the middle
            read(EventStreamFrames(), stream[:at])


def test_headers_of_all_types_are_passed_over() -> None:
    import struct
    import zlib

    head = b"".join(
        bytes((1,)) + name + bytes((kind,)) + value
        for name, kind, value in (
            (b"a", 0, b""),
            (b"b", 1, b""),
            (b"c", 2, b"\x01"),
            (b"d", 3, b"\x00\x01"),
            (b"e", 4, bytes(4)),
            (b"f", 5, bytes(8)),
            (b"g", 6, b"\x00\x02hi"),
            (b"h", 8, bytes(8)),
            (b"i", 9, bytes(16)),
        )
    )
    prelude = struct.pack(">II", 16 + len(head), len(head))
    whole = prelude + struct.pack(">I", zlib.crc32(prelude)) + head
    assert read(EventStreamFrames(), whole + struct.pack(">I", zlib.crc32(whole))) == [Event("", b"")]

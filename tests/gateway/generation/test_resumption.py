"""Streams with event ids: what the header may say, and what a resumed stream leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.resumption import NumberedEvents
from tests.gateway.conftest import Serving

pytestmark = pytest.mark.asyncio


class Plain:
    def event(self, piece: Piece) -> bytes:
        return f"data: {piece.text}{'!' if piece.finish_reason else ''}\n\n".encode()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (0, b"id: s.3\ndata: abc\n\nid: s.5\ndata: de\n\nid: s.5\ndata: !\n\n"),
        (2, b"id: s.3\ndata: c\n\nid: s.5\ndata: de\n\nid: s.5\ndata: !\n\n"),
        (3, b"id: s.5\ndata: de\n\nid: s.5\ndata: !\n\n"),
        (5, b"id: s.5\ndata: !\n\n"),
    ],
)
async def test_events_go_on_behind_the_last_one_seen(seen: int, expected: bytes) -> None:
    renderer: Any = Plain()
    numbered = NumberedEvents("s", seen, renderer)
    pieces = [Piece(0, "abc"), Piece(0, "de"), Piece(0, "", finish_reason="stop")]
    assert b"".join(map(numbered.event, pieces)) == expected


async def test_the_header_is_honoured_or_refused(serving: Serving) -> None:
    async with serving() as running:
        for headers, body, status in (
            ({}, {"stream": True}, 200),
            ({"last-event-id": "new"}, {"stream": True}, 200),
            ({"last-event-id": "new"}, {"stream": False}, 400),
            ({"last-event-id": "new"}, {"stream": True, "n": 2}, 400),
            ({"last-event-id": "new"}, {"stream": True, "logprobs": True}, 400),
            ({"last-event-id": "x"}, {"stream": True}, 400),
            ({"last-event-id": "0" * 32 + ".3"}, {"stream": True}, 404),
        ):
            request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
            reply = await running.client.post("/v1/chat/completions", json=request, headers=headers)
            assert reply.status_code == status, (headers, body, reply.text)
            ids = [line for line in reply.text.splitlines() if line.startswith("id: ")]
            assert bool(ids) == (status == 200 and bool(headers))

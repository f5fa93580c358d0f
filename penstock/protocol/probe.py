"""Whether an engine answers: for probes of Kubernetes, Compose and people.

The question is an empty `Count`, which an engine answers between two steps, from memory, whoever asks; so a probe is
not registered as a gateway and leaves nothing behind. Importing this is cheap: no torch.
"""

from __future__ import annotations

import time
import uuid

import zmq

from penstock.protocol.codec import decode_from_engine, encode
from penstock.protocol.messages import Count, Counted
from penstock.protocol.transport import CurveClient


def answers(endpoint: str, curve: CurveClient | None = None, within_s: float = 8.0) -> bool:
    """Whether the engine at `endpoint` answers within so many seconds. One that still loads does not."""
    question = f"probe-{uuid.uuid4().hex[:8]}"
    deadline = time.monotonic() + within_s
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    try:
        if curve is not None:
            curve.apply(socket)
        socket.connect(endpoint)
        socket.send(encode(Count(question, [])))
        while (left := deadline - time.monotonic()) > 0:
            if socket.poll(int(1000 * left)):
                reply = decode_from_engine(socket.recv())
                if isinstance(reply, Counted) and reply.question == question:
                    return True
        return False
    finally:
        socket.close()
        context.term()

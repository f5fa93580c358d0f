"""Messages to bytes and back (MessagePack).

Decoding checks every field's type, so a malformed frame is a `ProtocolError` here and not a failure further in.
Encoders and decoders are created once: creating them is expensive, calling them is cheap.
"""

from __future__ import annotations

import msgspec

from penstock.errors import PenstockError
from penstock.protocol.messages import FromEngine, ToEngine


class ProtocolError(PenstockError):
    """A frame is not a message of this protocol."""


_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    try:
        return _to_engine.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message for an engine: {error}") from error


def decode_from_engine(frame: bytes) -> FromEngine:
    try:
        return _from_engine.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message from an engine: {error}") from error

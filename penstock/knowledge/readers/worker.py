"""The child process that reads documents: frames of msgpack on standard input and output.

Files are untrusted. Whatever one of them does to a parser (endless loops, gigabytes of memory, a crash), it
does to this process, which has limits and is replaced; and parsing does not hold the gateway's GIL.
"""

from __future__ import annotations

import resource
import sys
from typing import BinaryIO

import msgspec

from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers.blocks import Extracted
from penstock.knowledge.readers.media import read

MEMORY = 2 * 2**30
HEADER = 8


class Task(msgspec.Struct, array_like=True):
    body: bytes
    media_type: str
    charset: str = ""


class Result(msgspec.Struct, array_like=True):
    extracted: Extracted | None
    error: str = ""


def frame(message: Task | Result) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER, "big") + data


def work(task: Task) -> Result:
    try:
        return Result(read(task.body, task.media_type, task.charset))
    except UnreadableDocument as error:
        return Result(None, str(error))
    except MemoryError:
        return Result(None, "The document needs too much memory to be read.")


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    decoder = msgspec.msgpack.Decoder(Task)
    while header := requests.read(HEADER):
        task = decoder.decode(requests.read(int.from_bytes(header, "big")))
        replies.write(frame(work(task)))
        replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)

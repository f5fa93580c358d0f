"""The child process that reads documents, whole or cut into chunks: frames of msgpack on standard input and output.

Files are untrusted. Whatever one of them does to a parser (endless loops, gigabytes of memory, a crash), it
does to this process, which has limits and is replaced; and parsing and counting tokens do not hold the gateway's GIL.
A document is a task, then its bytes; the answer is one result after another until `last`, each with a few chunks or a
piece of the text, so that the gateway never has much to decode at once.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.knowledge.chunker import Count, chunk
from penstock.knowledge.entities import Chunk, UnreadableDocument
from penstock.knowledge.readers.media import read
from penstock.knowledge.terms import words

MEMORY = 2 * 2**30
NICENESS = 10
"""Documents wait for whoever talks to a model."""
HEADER = 8
CHUNKS_PER_RESULT = 256
TEXT_PER_RESULT = 2**20
"""Characters."""


class Task(msgspec.Struct, array_like=True):
    size: int
    """Bytes of the document, which follow."""
    media_type: str
    charset: str
    name: str
    tokenizer: str
    """The folder of the tokenizer that counts; empty: words are counted."""
    chunk_tokens: int
    overlap_tokens: int
    most_chunks: int
    whole: bool = False
    """The text is wanted, not chunks of it."""
    seconds: float = 20.0
    """Of processor time: this process is killed by SIGPROF when they are over."""


class Result(msgspec.Struct, array_like=True):
    chunks: list[Chunk]
    error: str = ""
    last: bool = True
    text: str = ""


def frame(message: Task | Result) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER, "big") + data


@cache
def counter(tokenizer: str) -> Count:
    if not tokenizer:
        return lambda text: len(words(text))
    from penstock.text.encoder import load_encoder_text

    return load_encoder_text(Path(tokenizer)).count


def work(task: Task, body: bytes) -> Iterator[Result]:
    try:
        found = read(body, task.media_type, task.charset)
        if task.whole:
            for start in range(0, len(found.text), TEXT_PER_RESULT):
                yield Result([], last=False, text=found.text[start : start + TEXT_PER_RESULT])
            yield Result([])
            return
        chunks = chunk(
            found,
            counter(task.tokenizer),
            most=task.chunk_tokens,
            overlap=task.overlap_tokens,
            name=task.name,
            most_chunks=task.most_chunks,
        )
    except UnreadableDocument as error:
        yield Result([], str(error))
        return
    except MemoryError:
        yield Result([], "The document needs too much memory to be read.")
        return
    while chunks:
        some, chunks = chunks[:CHUNKS_PER_RESULT], chunks[CHUNKS_PER_RESULT:]
        yield Result(some, last=False)
    yield Result([])


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(NICENESS)
    decoder = msgspec.msgpack.Decoder(Task)
    while header := requests.read(HEADER):
        task = decoder.decode(requests.read(int.from_bytes(header, "big")))
        body = requests.read(task.size)
        signal.setitimer(signal.ITIMER_PROF, task.seconds)
        for result in work(task, body):
            replies.write(frame(result))
        replies.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)

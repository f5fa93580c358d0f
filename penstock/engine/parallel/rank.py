"""A worker rank: loads its part of the model and runs it when rank 0 says so, until rank 0 is gone.

Started by `launch` as `python -m penstock.engine.parallel.rank FD`, with one end of a socket. It decides nothing: no
scheduling, no sampling. If it fails it reports why and exits; rank 0 then gives up the whole engine.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from penstock.engine.backends.backend import Backend
from penstock.engine.parallel.channel import Forward, receive
from penstock.engine.parallel.decoder import Stage
from penstock.engine.parallel.launch import Report, Setup
from penstock.engine.parallel.member import Member
from penstock.engine.process import die_with_parent
from penstock.engine.startup.part import Part, Phases, load_part
from penstock.errors import PenstockError

EXIT_FAILED = 1


class Worker(Member):
    """A worker's membership: rank 0 sends it what was agreed on."""

    def __init__(self, setup: Setup, connection: Connection) -> None:
        super().__init__(setup.place, setup.store, setup.config.watchdog_s)
        self._connection = connection

    def meet(self, backend: Backend) -> None:
        self._connection.send(Report())
        super().meet(backend)

    def least(self, count: int) -> int:
        self._connection.send(Report(count))
        agreed: int = self._connection.recv()
        return agreed


@torch.inference_mode()
def serve(part: Part, stage: Stage, connection: Connection) -> None:
    """Run steps until rank 0 closes the connection."""
    device, dtype = part.kv.device, part.decoder.embedding.dtype
    width = -(-part.max_model_len // part.kv.block_size)
    tables = torch.zeros(part.max_running + 1, width, dtype=torch.int32, device=device)
    while True:
        try:
            message = receive(connection)
        except (EOFError, ConnectionError):
            return
        if isinstance(message, Forward):
            rows, columns, blocks = torch.from_numpy(message.cells).to(device, non_blocking=True)
            tables[rows, columns] = blocks.to(torch.int32)
            token_ids = torch.from_numpy(message.token_ids).to(device, non_blocking=True)
            stage.forward(token_ids, message.batch(tables), part.kv)
        else:
            stage.head(torch.empty(message.count, part.model.hidden_size, dtype=dtype, device=device))


def run(connection: Connection) -> int:
    """Load, serve, and return the exit code."""
    try:
        setup: Setup = connection.recv()
        member = Worker(setup, connection)
        part = load_part(setup.config, setup.checkpoint, Phases(None), member)
        serve(part, Stage(part.decoder, member.groups), connection)
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        on_purpose = isinstance(error, PenstockError)
        if not on_purpose:
            traceback.print_exc()
        with suppress(OSError):  # rank 0 may be gone too
            problem = str(error) if on_purpose else f"{type(error).__name__}: {error}"
            connection.send(Report(problem=problem, on_purpose=on_purpose))
        return EXIT_FAILED
    return 0


def main() -> int:
    die_with_parent()
    # Signals are for rank 0; the others exit with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return run(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking NCCL's groups down can wait for peers that are gone

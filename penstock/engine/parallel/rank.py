"""A worker rank: loads its part of the model and runs it when rank 0 says so, until rank 0 is gone.

Started by `child` as `python -m penstock.engine.parallel.rank FD...`, with one end of a socket, and of another in an
engine that spans machines. It decides nothing: no scheduling, no sampling. If it fails it reports why and exits; rank 0
then gives up the whole engine. A call that is refused (a `PenstockError`) is answered with the reason, and the rank
goes on.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.engine.backends.host_memory import is_host
from penstock.engine.backends.interface import Ints
from penstock.engine.kv.mover import BlockMover
from penstock.engine.models.decoder import Decoder
from penstock.engine.parallel import plain
from penstock.engine.parallel.adapters import FollowingAdapters
from penstock.engine.parallel.blocks import BLOCKS, STATES, rank_slots
from penstock.engine.parallel.channel import Call, Capture, Forward, Head, Move, Replay, Reply, Report, receive
from penstock.engine.parallel.data import shares_of
from penstock.engine.parallel.decoder import Arriving, Stage, part_of
from penstock.engine.parallel.experts import HeldExperts
from penstock.engine.parallel.files import file_handlers
from penstock.engine.parallel.link import Link
from penstock.engine.parallel.member import Member
from penstock.engine.parallel.rendezvous import Rendezvous
from penstock.engine.parallel.setup import Setup
from penstock.engine.parallel.site_parts import cache_parts
from penstock.engine.process import die_with_parent
from penstock.engine.runner.follower import Follower, FollowerResources
from penstock.engine.sleep.rank import RankSleep
from penstock.engine.speculative.head_setup import distant_tap
from penstock.engine.speculative.setup import Draft, load_draft
from penstock.engine.startup.kept_files import mark_weights
from penstock.engine.startup.offload import open_tiers
from penstock.engine.startup.part import Part, Phases, load_part
from penstock.errors import PenstockError, ReplicaLost

EXIT_FAILED = 1
Step = Forward | Head | Move | Replay | Capture
Message = Step | Call
log = logging.getLogger(__name__)


class Worker(Member):
    """A worker's membership: rank 0 sends it what was agreed on."""

    def __init__(self, setup: Setup, connection: Connection, link: Connection | None) -> None:
        linked = None if link is None else Link(link, setup.place.rank, setup.generation)
        super().__init__(setup.place, Rendezvous.of(setup.config, setup.folder, linked, setup.generation))
        self._connection = connection

    def _announce(self) -> None:
        plain.send(self._connection, Report())

    def agree(self, choices: Mapping[str, Any]) -> None:
        plain.send(self._connection, Report(choices=dict(choices)))

    def least(self, count: int, of: str = "") -> int:
        plain.send(self._connection, Report(count))
        agreed: int = plain.receive(self._connection)
        return agreed


class ServedModel:
    """One model's part on this rank, and the block tables of its sequences."""

    def __init__(self, part: Part, stage: Stage) -> None:
        self.part = part
        self.stage = stage
        self.adapted: dict[tuple[bool, bool], Stage] = {}
        """By whether the adapters of a step are narrow, and whether some touch linears that few do."""
        self.altered: Stage | None = None
        if part.adapters is not None:
            plain = part.adapters.decoder
            decoders = (
                ((False, False), plain),
                ((True, False), part.adapters.narrow or plain),
                ((False, True), part.adapters.further or plain),
            )
            self.adapted = {key: Stage(one, stage.groups, stage.shares) for key, one in decoders}
            if part.adapters.altered is not None:
                self.altered = Stage(part.adapters.altered, stage.groups, stage.shares)
        self.device = part.kv.device
        width = -(-part.max_model_len // part.kv.block_size)
        self.tables = torch.zeros(part.max_running + 1, width, dtype=torch.int32, device=self.device)

    @cached_property
    def follower(self) -> Follower:
        """Runs the steps that rank 0 has captured."""
        part, adapters, groups = self.part, self.part.adapters, self.stage.groups

        def of(decoder: Decoder | None) -> Decoder | None:
            return None if decoder is None else part_of(Stage(decoder, groups))

        return part.backend.follower(
            FollowerResources(
                part_of(self.stage),
                part.kv,
                self.tables,
                part.max_model_len,
                part.max_running,
                lora=None if adapters is None else adapters.kernel,
                adapted=None if adapters is None else of(adapters.decoder),
                narrow=None if adapters is None else of(adapters.narrow),
                further=None if adapters is None else of(adapters.further),
                altered=None if adapters is None else of(adapters.altered),
            )
        )

    def _note(self, cells: Ints) -> None:
        """Bring the block tables up to date."""
        if cells.shape[1]:
            rows, columns, blocks = torch.from_numpy(cells).to(self.device, non_blocking=True)
            self.tables[rows, columns] = blocks.to(torch.int32)

    def replay(self, message: Replay) -> None:
        self._note(message.cells)
        self.follower.replay(message.kind, message.shape, message.inputs)

    def expect(self, message: Forward) -> Arriving | None:
        """Begin to receive what a step needs from the stage before this one."""
        shares = self.stage.shares
        own = message if shares is None else shares.of(message).message
        return self.stage.expect(len(own.token_ids), self.device)

    def forward(self, message: Forward, arriving: Arriving | None) -> None:
        token_ids = torch.from_numpy(message.token_ids).to(self.device, non_blocking=True)
        share = None if self.stage.shares is None else self.stage.shares.of(message)
        own = message if share is None else share.message
        self._note(own.cells)
        batch = own.batch(self.tables) if share is None else share.batch(self.tables)
        self._stage_of(own).forward(token_ids, batch, self.part.kv, arriving)

    def start_over(self) -> None:
        """Another rank is lost, and with it what all had computed."""
        altered = () if self.altered is None else (self.altered,)
        for stage in (self.stage, *self.adapted.values(), *altered):
            stage.start_over()
        self.tables.zero_()

    def _stage_of(self, message: Forward) -> Stage:
        """The stage that runs a step, with the adapters of its tokens or without any."""
        adapters = self.part.adapters
        if adapters is None or message.adapter_slots is None:
            return self.stage
        adapters.kernel.begin(message.adapter_slots.astype(np.int32))
        if message.altered and self.altered is not None:
            return self.altered
        return self.adapted[message.narrow, message.further]

    def head(self, message: Head) -> None:
        shape, dtype = (message.count, self.part.model.hidden_size), self.part.decoder.embedding.dtype
        stage, adapters = self.stage, self.part.adapters
        if message.adapter_slots is not None and adapters is not None:
            adapters.kernel.begin_head(message.adapter_slots.astype(np.int32))
            stage = self.adapted[False, True]
        stage.head(torch.empty(shape, dtype=dtype, device=self.device))


class RankServer:
    """Does what rank 0 says, in its order: steps of the models, and calls."""

    def __init__(self, models: list[ServedModel], connection: Connection) -> None:
        self.models = models
        """The target, and the draft model where there is one."""
        self.handlers: dict[str, Callable[..., Any]] = {}
        """What calls may name. A handler that returns a future is answered when that is done."""
        self.mover: BlockMover | None = None
        self.state_mover: BlockMover | None = None
        """For the host tier, where there is one."""
        self.member: Member | None = None
        """Where this rank outlives others that are lost: its membership, to be renewed."""
        self._adrift = False
        """Another rank is lost: steps are dropped until all meet again."""
        self._connection = connection
        self._sends = threading.Lock()
        self.handlers["regroup"] = self._regroup
        self.handlers |= RankSleep(self, models[0].part.backend, self.handlers).handlers

    @torch.inference_mode()
    def serve(self) -> None:
        """Until rank 0 closes the connection."""
        waiting: deque[tuple[Message, Arriving | None]] = deque()
        # Receives for the steps to come are begun before the next one is run, so that it hides their time. Not on
        # devices, where a receive that waits takes room from the layers.
        ahead = is_host(self.models[0].device)
        while True:
            try:
                while not waiting or (ahead and not self._adrift and self._connection.poll()):
                    waiting.append(self._expect(receive(self._connection)))
            except (EOFError, ConnectionError):
                return
            message, arriving = waiting.popleft()
            if isinstance(message, Call):
                self._answer(message)
            elif not self._adrift:
                failure = self._try(message, arriving)
                if failure is not None:
                    # Transfers that were begun hold their connection, and so the other end of it.
                    arriving, waiting = None, deque((message, None) for message, _ in waiting)
                    self._drift(failure)

    def _run(self, message: Step, arriving: Arriving | None) -> None:
        if isinstance(message, Forward):
            self.models[message.model].forward(message, arriving)
        elif isinstance(message, Replay):
            self.models[message.model].replay(message)
        elif isinstance(message, Capture):
            self.models[message.model].follower.capture(message.kind, message.shape)
        elif isinstance(message, Head):
            self.models[message.model].head(message)
        else:
            mover = self.state_mover if message.states else self.mover
            assert mover is not None
            mover.run(message.transfers)

    def _try(self, message: Step, arriving: Arriving | None) -> str | None:
        """Run a step; what failed, where this rank outlives it."""
        try:
            self._run(message, arriving)
        except (RuntimeError, ConnectionError, TimeoutError, ReplicaLost) as error:  # of collectives: a member is gone
            if self.member is None:
                raise
            return str(error)
        return None

    def _drift(self, failure: str) -> None:
        """Let go of the others. Rank 0 knows whether one of them is lost, and makes all meet again or leaves."""
        assert self.member is not None
        log.warning("%s: a step failed, waiting for rank 0: %s", self.member.place, failure)
        self._adrift = True
        for model in self.models:
            model.start_over()
        self.member.groups.drop()

    def _regroup(self, generation: int) -> None:
        """Meet the other ranks again, with nothing of the steps before."""
        assert self.member is not None
        for model in self.models:
            model.start_over()
        self.member.groups.renew(generation)
        self._adrift = False

    def _expect(self, message: Message) -> tuple[Message, Arriving | None]:
        if self._adrift or not isinstance(message, Forward):
            return message, None
        return message, self.models[message.model].expect(message)

    def _answer(self, call: Call) -> None:
        try:
            value = self.handlers[call.name](*call.args)
        except PenstockError as error:
            self._reply(Reply(call.number, problem=str(error)))
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda done: self._reply(_outcome(call.number, done)))
        else:
            self._reply(Reply(call.number, value))

    def _reply(self, reply: Reply) -> None:
        with self._sends, suppress(OSError):  # rank 0 may be gone; `serve` notices
            plain.send(self._connection, reply)


def _outcome(number: int, done: Future[Any]) -> Reply:
    error = done.exception()
    if error is None:
        return Reply(number, done.result())
    return Reply(number, problem=str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}")


def _load(setup: Setup, member: Worker) -> list[ServedModel]:
    """This rank's part of the target, and of the draft model if it has one."""
    draft = load_draft(setup.config, setup.checkpoint, Phases(None), member)
    part = load_part(
        setup.config,
        setup.checkpoint,
        Phases(None),
        member,
        backend=None if draft is None else draft.backend,
        beside=0 if draft is None else draft.block_bytes,
        tap=distant_tap(setup.config, setup.checkpoint, member),
    )
    models = [ServedModel(part, Stage(part.decoder, member.groups, shares_of(member.place, part.kv, part.max_running)))]
    if isinstance(draft, Draft) and draft.member is not None:
        models.append(ServedModel(draft.sized_like(part), Stage(draft.part.decoder, draft.member.groups)))
    return models


def run(connection: Connection, link: Connection | None = None, find_adapter: Callable[[str], Path] = Path) -> int:
    """Load, serve, and return the exit code. `link`: for tensors to and from ranks on other machines. `find_adapter`:
    see `Engine.load`."""
    member: Worker | None = None
    models: list[ServedModel] = []
    try:
        setup = Setup.receive(connection)
        member = Worker(setup, connection, link)
        before = mark_weights(setup.config)
        models = _load(setup, member)
        part = models[0].part
        tiers = open_tiers(setup.config, part, member, before)
        server = RankServer(models, connection)
        server.member = member if setup.config.rank_restarts else None
        if tiers is not None:
            server.mover, server.state_mover = tiers.mover, tiers.state_mover
            for kind, file in ((BLOCKS, tiers.file), (STATES, tiers.state_file)):
                if file is not None:
                    server.handlers |= file_handlers(file, kind)
        for slots in rank_slots(cache_parts(part, setup.place), setup.place, part.kv, part.backend.block_mover):
            server.handlers |= slots.handlers()
        server.handlers |= HeldExperts(part.decoder, part.model, member.place).handlers
        if part.adapters is not None:
            server.handlers |= FollowingAdapters(part.adapters, find_adapter).handlers()
        try:
            server.serve()
        finally:
            if tiers is not None:
                tiers.close()
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        known = isinstance(error, PenstockError)
        if not known:
            traceback.print_exc()
        with suppress(OSError):  # rank 0 may be gone too
            problem = str(error) if known else f"{type(error).__name__}: {error}"
            plain.send(connection, Report(problem=problem, on_purpose=known and not isinstance(error, ReplicaLost)))
        return EXIT_FAILED
    finally:
        for model in models:
            model.start_over()
        if member is not None:
            member.leave()
    return 0


def main(find_adapter: Callable[[str], Path] = Path) -> NoReturn:
    """The process of a rank."""
    die_with_parent()
    # Signals are for rank 0; the others exit with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, *links = (Connection(int(number)) for number in sys.argv[1:])
    code = run(control, links[0] if links else None, find_adapter)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking NCCL's groups down can wait for peers that are gone


if __name__ == "__main__":
    main()

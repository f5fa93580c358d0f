"""A machine's side of running ranks of an engine elsewhere: joins rank 0, starts the ranks it is given, passes on what
they say, and joins again when the engine is gone.

The ranks are child processes like those that rank 0 starts on its own machine. They live as long as the connection:
when it is lost they are killed, because the engine they belong to cannot go on without them. One that ends earlier is
started again when rank 0 says so.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from penstock.engine.config import EngineConfig
from penstock.engine.loading.digest import CheckpointDigest, checkpoint_digest
from penstock.engine.parallel.child import connection_pair, describe_exit, start_rank
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.machines import RankProcess
from penstock.engine.parallel.setup import Setup
from penstock.engine_host.switch import Port, Switch
from penstock.errors import ConfigError
from penstock.protocol.address import is_loopback
from penstock.protocol.codec import ProtocolError
from penstock.protocol.ranks import (
    BEAT_S,
    SILENCE_S,
    Bye,
    Ended,
    Frame,
    Join,
    Joined,
    Refused,
    Restart,
    decode_struct,
    destination,
    pack,
    pack_struct,
    unpack,
)
from penstock.protocol.transport import CurveClient, public_key, set_heartbeats

log = logging.getLogger("penstock.engine")

_HELLO_S = 10.0
"""How long rank 0 may take to answer."""
_RETRY_S = 0.5, 5.0
"""Pause before joining again: at first, and at most."""
_BAD_HANDSHAKES = 3
"""So many in a row are no accident."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a machine brings along."""

    machine: str
    model: Path
    draft_model: Path | None = None
    device: str | None = None
    """In place of the engine's own setting."""
    threads: int | None = None

    def local(self, config: EngineConfig) -> EngineConfig:
        """The engine's configuration as it is here."""
        return dataclasses.replace(
            config,
            model=str(self.model),
            draft_model=None if self.draft_model is None else str(self.draft_model),
            device=self.device or config.device,
            devices=() if self.device else config.devices,
            threads=self.threads,
        )


def start_child(link: Connection) -> tuple[RankProcess, Connection]:
    """A rank's process, and the connection to it."""
    return start_rank(link, "penstock.engine_host.rank_child")


class _NotYet(Exception):
    """Rank 0 is not there, or does not want this machine now."""


class RankHost:
    """Joins one engine, again and again."""

    def __init__(
        self,
        endpoint: str,
        offer: Offer,
        curve: CurveClient | None = None,
        *,
        silence_s: float = SILENCE_S,
        start: Callable[[Connection], tuple[RankProcess, Connection]] = start_child,
    ) -> None:
        host = endpoint.removeprefix("tcp://").rpartition(":")[0]
        if not endpoint.startswith("tcp://") or not host:
            raise ConfigError(f"{endpoint}: where the engine listens is tcp://HOST:PORT")
        if curve is None and not is_loopback(host):
            raise ConfigError(
                f"{endpoint} is another machine, so the connection needs keys: --curve-key, --curve-engine"
            )
        self._endpoint = endpoint
        self._offer = offer
        self._curve = curve
        self._silence_s = silence_s
        self._start = start
        self._stop = threading.Event()
        self._session: _Session | None = None

    def run(self, *, once: bool = False) -> None:
        """Until stopped, or refused for good (`ConfigError`). `once`: until the first engine is gone."""
        model = checkpoint_digest(self._offer.model)
        draft = None if self._offer.draft_model is None else checkpoint_digest(self._offer.draft_model)
        pause, said, failures = _RETRY_S[0], "", 0
        while not self._stop.is_set():
            session = self._session = _Session(self, model, draft)
            try:
                session.run()
                pause, said, failures = _RETRY_S[0], "", 0
                log.info("%s: %s; the ranks here have stopped", self._endpoint, session.over)
                if once:
                    return
            except _NotYet as why:
                failures = failures + 1 if session.bad_handshake else 0
                if failures >= _BAD_HANDSHAKES:
                    raise ConfigError(str(why)) from None
                if str(why) != said:
                    said = str(why)
                    log.info("%s: %s; trying again", self._endpoint, said)
            finally:
                session.close()
            self._stop.wait(pause)
            pause = min(2 * pause, _RETRY_S[1])

    def stop(self) -> None:
        """From any thread, or a signal handler."""
        self._stop.set()
        if self._session is not None:
            self._session.leave(f"{self._offer.machine} was told to stop")


@dataclass(slots=True)
class _Rank:
    process: RankProcess
    control: Port
    data: Port


def _place(config: EngineConfig, rank: int) -> Place:
    return Place(rank, config.tensor_parallel, config.pipeline_parallel, config.attention_parallel == "data")


class _Session:
    """One connection to rank 0."""

    def __init__(self, host: RankHost, model: CheckpointDigest, draft: CheckpointDigest | None) -> None:
        self._host = host
        self._offer = host._offer
        self._endpoint = host._endpoint
        self._join = Join(self._offer.machine, version("penstock"), model, draft)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 300)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection is a new session
        set_heartbeats(self._socket, host._silence_s)
        if host._curve is not None:
            host._curve.apply(self._socket)
        self._switch = Switch(self._socket)
        self._deadline: float | None = time.monotonic() + _HELLO_S
        self._folder: Path | None = None
        self._ranks: dict[int, _Rank] = {}
        self._running = 0
        self._error: Exception | None = None
        self.bad_handshake = False
        self.over = ""
        """Why it ended."""

    def run(self) -> None:
        """Until the engine is gone. `_NotYet` when it does not take this machine now, `ConfigError` when never."""
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{self._endpoint}: {error.strerror}") from error
        self._put(pack_struct(self._join))
        self._switch.run(self._frames, self._event, self._tick, BEAT_S)
        if self._error is not None:
            raise self._error

    def leave(self, reason: str) -> None:
        """From any thread."""

        def end() -> None:
            self._put(pack_struct(Bye(reason)))
            self._end(reason)

        self._switch.call(end)

    def close(self) -> None:
        self._switch.close()
        for rank in self._ranks.values():
            rank.process.kill()
            rank.process.wait()
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        self._socket.close()
        self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, reason: str, error: Exception | None = None) -> None:
        if not self.over:
            self.over, self._error = reason, error
            self._switch.stop()

    def _put(self, frames: list[bytes]) -> None:
        with suppress(zmq.ZMQError):  # the monitor tells when the connection is gone
            self._socket.send_multipart(frames, zmq.DONTWAIT)

    def _tick(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._end("no answer", _NotYet("nobody answers"))

    def _event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert self._host._curve is not None
            key = public_key(self._host._curve.secret_key)
            self._refused(f"this machine's public key {key} is not among those that may join (placement.curve_clients)")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self.bad_handshake = True
            self._end("handshake", _NotYet("the engine there has another public key than this machine was given"))
        elif event == zmq.EVENT_DISCONNECTED:
            lost = "the connection was lost"
            self._end(lost, None if self._ranks else _NotYet(lost))
        elif event == zmq.EVENT_CLOSED:
            self._end("nobody", _NotYet("no engine waits there"))

    def _refused(self, reason: str) -> None:
        self._end("refused", ConfigError(f"{self._endpoint} refused {self._offer.machine}: {reason}"))

    def _frames(self, frames: list[bytes]) -> None:
        try:
            frame, rank, content = unpack(frames)
            if frame == Frame.STRUCT:
                self._struct(content)
            elif frame == Frame.DATA:
                self._route(content)
            elif rank in self._ranks:
                self._about(rank, frame, content)
        except ProtocolError as error:
            self._end(str(error), ConfigError(f"{self._endpoint}: {error}"))

    def _about(self, number: int, frame: Frame, content: bytes) -> None:
        rank = self._ranks[number]
        if frame == Frame.CONTROL:
            rank.control.send(content)
        elif frame == Frame.CLOSE:
            self._switch.detach(rank.control)
            self._watch(number)
        elif frame == Frame.KILL:
            rank.process.kill()

    def _struct(self, content: bytes) -> None:
        message = decode_struct(content)
        if isinstance(message, Joined) and not self._ranks:
            self._deadline = None
            self._launch(message)
        elif isinstance(message, Restart) and message.rank in self._ranks:
            self._start_again(message)
        elif isinstance(message, Refused) and message.final:
            self._refused(message.reason)
        elif isinstance(message, Refused):
            self._end("refused", _NotYet(message.reason))
        elif isinstance(message, Bye):
            self._end(message.reason)

    def _launch(self, joined: Joined) -> None:
        config = self._offer.local(joined.config)
        places = [_place(config, rank) for rank in joined.ranks]
        log.info("%s: joined as %s with %s", self._endpoint, self._offer.machine, ", ".join(map(str, places)))
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        for place in places:
            self._start_rank(Setup(config, None, place, self._folder))

    def _start_rank(self, setup: Setup) -> None:
        rank = setup.place.rank
        ours, theirs = connection_pair()
        process, connection = self._host._start(theirs)
        control = self._switch.attach(connection, self._from_rank(rank), partial(self._watch, rank))
        data = self._switch.attach(ours, self._route, lambda: None)
        self._ranks[rank] = _Rank(process, control, data)
        control.send(setup.encode())

    def _start_again(self, message: Restart) -> None:
        assert self._folder is not None
        config = self._offer.local(message.config)
        place, lost = _place(config, message.rank), self._ranks[message.rank]
        log.info("%s: %s is started again", self._endpoint, place)
        for port in (lost.control, lost.data):
            self._switch.detach(port)
        lost.process.kill()
        lost.process.wait()
        if lost.process.stdin is not None:
            lost.process.stdin.close()
        self._start_rank(Setup(config, None, place, self._folder, message.generation))

    def _from_rank(self, rank: int) -> Callable[[bytes], None]:
        return lambda message: self._put(pack(Frame.CONTROL, rank, message))

    def _route(self, message: bytes) -> None:
        """To a rank here, or to rank 0, which knows where the others are."""
        to = destination(message)
        if to in self._ranks:
            self._ranks[to].data.send(message)
        else:
            self._put(pack(Frame.DATA, to, message))

    def _watch(self, rank: int) -> None:
        """Once its connection is closed, all that it said has been passed on: tell rank 0 when it has ended."""
        process = self._ranks[rank].process

        def wait() -> None:
            code = process.wait()
            self._switch.call(lambda: self._ended(rank, process, code or 0))

        threading.Thread(target=wait, name=f"rank {rank}", daemon=True).start()

    def _ended(self, rank: int, process: RankProcess, code: int) -> None:
        if self._ranks[rank].process is not process:
            return  # another was started in its place
        self._put(pack_struct(Ended(rank, code, f"{self._offer.machine}: {describe_exit(code)}")))

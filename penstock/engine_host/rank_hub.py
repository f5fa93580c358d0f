"""Rank 0's side of ranks on other machines: listens, admits the machines of the placement, passes messages on.

A machine is admitted when its key is (CURVE), and it runs the same version with the same checkpoint, and the placement
names it, and nobody has joined in its place. All else is refused with a sentence, there and in the log here. Messages
between two other machines go through this one. A machine that closes its connection, or falls silent, is lost at once
with all its ranks: rank 0 then reads the end of every connection to it, and the engine ends like with any lost rank.
With `rank_restarts` a rank whose machine is still there is started again, and the others are told meanwhile.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection

import zmq

from penstock.engine.config import LOCAL, EngineConfig
from penstock.engine.loading.digest import CheckpointDigest, checkpoint_digest
from penstock.engine.parallel.child import connection_pair
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.link import interruption
from penstock.engine_host.switch import Port, Switch
from penstock.errors import ConfigError, ReplicaLost
from penstock.protocol.codec import ProtocolError
from penstock.protocol.ranks import (
    BEAT_S,
    RANK_PROTOCOL,
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
from penstock.protocol.transport import CurveServer, Listener, public_key

log = logging.getLogger("penstock.engine")

_EXIT_LOST = 1
_LOOP_S = 10.0
"""How long the loop may take for something small."""
_REMIND_S = 60.0
Progress = Callable[[str, float], None]


@dataclass(slots=True)
class _Machine:
    """One that has joined."""

    identity: bytes
    name: str
    ranks: list[int]


class FarRank:
    """A rank on another machine; see `engine.parallel.machines.RemoteRank`."""

    pid = 0
    stdin = None

    def __init__(self, connection: Connection, kill: Callable[[], None]) -> None:
        self.connection = connection
        self.ended = ""
        self.replaceable = True
        self._kill = kill
        self._code: int | None = None
        self._gone = threading.Event()

    def end(self, code: int, reason: str, replaceable: bool) -> None:
        self.replaceable = self.replaceable and replaceable
        if not self._gone.is_set():
            self._code, self.ended = code, reason
            self._gone.set()

    def poll(self) -> int | None:
        return self._code if self._gone.is_set() else None

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._gone.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self._code

    def kill(self) -> None:
        self._kill()


@dataclass(slots=True)
class _Board:
    """Who is where. Belongs to the loop's thread, except that `joined` is read by others."""

    joined: dict[str, _Machine] = field(default_factory=dict)
    control: dict[int, Port] = field(default_factory=dict)
    """Of the ranks on other machines."""
    data: dict[int, Port] = field(default_factory=dict)
    """Of the ranks here."""


class RankHub:
    """Meets the other machines of one engine, for one of its starts; implements `Machines`."""

    def __init__(
        self,
        endpoint: str,
        curve: CurveServer | None,
        *,
        join_s: float,
        progress: Progress | None = None,
        source: str = "SOURCE",
        silence_s: float = SILENCE_S,
    ) -> None:
        """`join_s`: how long the machines may take. `source`: the model, for the command that is shown."""
        self._listener = Listener(endpoint, curve=curve, send_limit=0, silence_s=silence_s, on_stranger=self._stranger)
        self.endpoint = self._listener.endpoint
        self._curve = curve
        self._join_s = join_s
        self._progress = progress
        self._source = source
        self._switch = Switch(self._listener.socket)
        self._board = _Board()
        self._ranks: dict[int, FarRank] = {}
        self._links: dict[int, Connection] = {}
        self._given: set[int] = set()
        """Ranks here that have got their links."""
        self._changed = threading.Condition()
        self._config: EngineConfig | None = None
        self._digests: tuple[CheckpointDigest, CheckpointDigest | None] | None = None
        self._beaten = 0.0
        self._generation = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def gather(self, config: EngineConfig) -> None:
        """See `Machines`."""
        self._config = config
        draft = None if config.draft_model is None else checkpoint_digest(config.draft_model)
        self._digests = checkpoint_digest(config.model), draft
        for rank in range(config.ranks):
            if config.machine(rank) == LOCAL:
                self._attach_link(rank)
            else:
                self._attach_rank(rank)
        self._thread = threading.Thread(target=self._run, name="ranks on other machines", daemon=True)
        self._thread.start()
        self._await(sorted(set(config.machines) - {LOCAL}))

    def _attach_link(self, rank: int) -> None:
        ours, theirs = connection_pair()
        self._links[rank] = ours
        self._board.data[rank] = self._switch.attach(theirs, self._route, lambda: None)

    def _attach_rank(self, rank: int) -> None:
        ours, theirs = connection_pair()
        self._ranks[rank] = FarRank(ours, self._sender(Frame.KILL, rank))
        on_message, on_end = self._forwarder(rank), self._sender(Frame.CLOSE, rank)
        self._board.control[rank] = self._switch.attach(theirs, on_message, on_end)

    def rank(self, rank: int) -> FarRank:
        return self._ranks[rank]

    def link(self, rank: int) -> Connection:
        """See `Machines`."""

        def renew() -> None:
            self._switch.detach(self._board.data[rank])
            self._attach_link(rank)

        if rank in self._given:
            self._in_loop(renew)
        self._given.add(rank)
        return self._links[rank]

    def interrupt(self, generation: int) -> None:
        """See `Machines`."""
        self._switch.call(lambda: self._interrupt(generation))

    def begin(self, generation: int) -> None:
        """See `Machines`."""

        def set_generation() -> None:
            self._generation = generation

        self._in_loop(set_generation)

    def restart(self, rank: int, config: EngineConfig, generation: int) -> FarRank:
        """See `Machines`."""

        def begin() -> None:
            self._attach_rank(rank)
            if self._machine(rank) is None:
                self._ended(rank, _EXIT_LOST, "its machine is lost", replaceable=False)
            self._tell(rank, pack_struct(Restart(rank, config, generation)))

        self._in_loop(begin)
        return self._ranks[rank]

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Have the loop do something, and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            act()
            done.set_result(None)

        self._switch.call(run)
        try:
            done.result(_LOOP_S)
        except TimeoutError:
            raise ReplicaLost("the connections to other machines are closed") from None

    def close(self) -> None:
        """Idempotent."""

        def leave() -> None:
            for machine in self._board.joined.values():
                self._send(machine, pack_struct(Bye("the engine has stopped")))

        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._switch.call(leave)
            self._switch.stop()
            self._thread.join()
        self._switch.close()
        self._listener.close()
        for connection in self._links.values():
            connection.close()

    # Waiting for machines: the caller's thread.

    def _await(self, names: list[str]) -> None:
        begin = time.monotonic()
        reminded = float("-inf")
        with self._changed:
            while missing := [name for name in names if name not in self._board.joined]:
                waited = time.monotonic() - begin
                if waited > self._join_s:
                    raise ConfigError(
                        f"{self._whom(missing)} did not join within {self._join_s:g} s: {self._hint(missing)}"
                    )
                if waited - reminded > _REMIND_S:
                    reminded = waited
                    log.info("waiting for %s to join: %s", self._whom(missing), self._hint(missing))
                if self._progress is not None:
                    self._progress(f"waiting for {', '.join(missing)}", 1 - len(missing) / len(names))
                self._changed.wait(min(1.0, self._join_s - waited))

    def _whom(self, names: list[str]) -> str:
        return ", ".join(f"{name} with {_listed(self._places(name))}" for name in names)

    def _places(self, name: str) -> list[Place]:
        assert self._config is not None
        grid = self._config.tensor_parallel, self._config.pipeline_parallel
        return [Place(rank, *grid) for rank, machine in enumerate(self._config.machines) if machine == name]

    def _hint(self, names: list[str]) -> str:
        port = self.endpoint.rpartition(":")[2]
        keys = "" if self._curve is None else " --curve-key FILE --curve-engine FILE"
        command = f"penstock join tcp://THIS-MACHINE:{port} --as {names[0]} --model {self._source}{keys}"
        return f"run `{command}` there" + (
            "" if self._curve is None else f"; this engine's public key is {public_key(self._curve.secret_key)}"
        )

    # The loop.

    def _run(self) -> None:
        self._switch.run(self._frames, self._event, self._tick, BEAT_S)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            for machine in list(self._board.joined.values()):
                self._send(machine, pack(Frame.BEAT))

    def _event(self, event: int) -> None:
        if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            log.warning(
                "%s: refused a connection that did not use this engine's public key: check the file that "
                "--curve-engine names on the machine that joins",
                self.endpoint,
            )

    def _stranger(self, key: str) -> None:
        log.warning("%s: refused a machine whose public key %s is not among those that may join", self.endpoint, key)

    def _frames(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        sender = next((machine for machine in self._board.joined.values() if machine.identity == identity), None)
        try:
            frame, rank, content = unpack(rest)
            if frame == Frame.STRUCT:
                self._struct(identity, sender, content)
            elif sender is not None and frame == Frame.CONTROL and rank in sender.ranks:
                self._board.control[rank].send(content)
            elif sender is not None and frame == Frame.DATA:
                self._route(content)
        except ProtocolError as error:
            if sender is None:
                self._refuse(identity, "a machine", Refused(f"{error}; is it the same version of Penstock?"))
            else:
                self._lost(sender, str(error))

    def _struct(self, identity: bytes, sender: _Machine | None, content: bytes) -> None:
        message = decode_struct(content)
        if isinstance(message, Join):
            refused = self._problem(message)
            if refused is not None:
                self._refuse(identity, message.machine, refused)
            else:
                self._admit(identity, message.machine)
        elif sender is not None and isinstance(message, Bye):
            self._lost(sender, message.reason)
        elif sender is not None and isinstance(message, Ended) and message.rank in sender.ranks:
            self._ended(message.rank, message.code, message.reason, replaceable=True)

    def _problem(self, join: Join) -> Refused | None:
        assert self._config is not None and self._digests is not None
        ours = version("penstock")
        if (join.protocol, join.package) != (RANK_PROTOCOL, ours):
            return Refused(
                f"it runs Penstock {join.package} (rank protocol {join.protocol}), this engine {ours} (rank protocol "
                f"{RANK_PROTOCOL}): install the same version on both"
            )
        known = sorted(set(self._config.machines) - {LOCAL})
        if join.machine not in known:
            return Refused(f"no rank is placed on {join.machine!r}: the placement names {', '.join(known)}")
        model, draft = self._digests
        for what, here, there in (("model", model, join.model), ("draft model", draft, join.draft)):
            if here is not None and there is None:
                return Refused(f"this engine has a {what}: give its source (--draft-model)")
            if here is not None and there is not None and (difference := here.difference(there)):
                return Refused(f"its {what} is not this engine's: it has {difference}; use the same checkpoint")
        if join.machine in self._board.joined:
            return Refused(f"{join.machine} has joined already", final=False)
        return None

    def _refuse(self, identity: bytes, name: str, refused: Refused) -> None:
        log.warning("%s: refused %s: %s", self.endpoint, name, refused.reason)
        self._put(identity, pack_struct(refused))

    def _admit(self, identity: bytes, name: str) -> None:
        assert self._config is not None
        ranks = [place.rank for place in self._places(name)]
        if any(self._ranks[rank].poll() is not None for rank in ranks):
            self._refuse(identity, name, Refused("this engine has lost ranks and is about to end", final=False))
            return
        machine = _Machine(identity, name, ranks)
        if self._put(identity, pack_struct(Joined(self._config, ranks))):
            log.info("%s has joined with %s", name, _listed(self._places(name)))
            with self._changed:
                self._board.joined[name] = machine
                self._changed.notify_all()

    def _route(self, message: bytes) -> None:
        """To the rank that it is for."""
        to = destination(message)
        port = self._board.data.get(to)
        if port is not None:
            port.send(message)
        elif (machine := self._machine(to)) is not None:
            self._send(machine, pack(Frame.DATA, to, message))

    def _machine(self, rank: int) -> _Machine | None:
        return next((machine for machine in self._board.joined.values() if rank in machine.ranks), None)

    def _forwarder(self, rank: int) -> Callable[[bytes], None]:
        return lambda message: self._tell(rank, pack(Frame.CONTROL, rank, message))

    def _sender(self, frame: Frame, rank: int) -> Callable[[], None]:
        """Sends `frame` about a rank to its machine; from any thread."""
        return lambda: self._switch.call(lambda: self._tell(rank, pack(frame, rank)))

    def _tell(self, rank: int, frames: list[bytes]) -> None:
        machine = self._machine(rank)
        if machine is not None:
            self._send(machine, frames)

    def _send(self, machine: _Machine, frames: list[bytes]) -> None:
        if not self._put(machine.identity, frames):
            self._lost(machine, "the connection is lost")

    def _put(self, identity: bytes, frames: list[bytes]) -> bool:
        try:
            self._listener.socket.send_multipart([identity, *frames], zmq.DONTWAIT)
        except zmq.ZMQError:  # it has no connection any more: closed, or no heartbeat for too long
            return False
        return True

    def _lost(self, machine: _Machine, reason: str) -> None:
        if self._board.joined.pop(machine.name, None) is None:
            return
        log.warning("%s is lost: %s", machine.name, reason)
        for rank in machine.ranks:
            self._ended(rank, _EXIT_LOST, f"{machine.name}: {reason}", replaceable=False)

    def _ended(self, rank: int, code: int, reason: str, *, replaceable: bool) -> None:
        """Whoever waits for this rank is woken: by the end of its connection, or where others outlive it by a
        message."""
        assert self._config is not None
        replaceable = replaceable and self._config.rank_restarts > 0
        self._ranks[rank].end(code, reason, replaceable)
        self._switch.detach(self._board.control[rank])
        if replaceable:
            self._interrupt(self._generation)
            return
        for port in self._board.data.values():
            self._switch.detach(port)

    def _interrupt(self, generation: int) -> None:
        assert self._config is not None
        for rank in range(self._config.ranks):
            self._route(interruption(rank, generation))


def _listed(places: list[Place]) -> str:
    return ", ".join(map(str, places))

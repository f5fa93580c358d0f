"""An engine behind a socket: one thread that receives, steps and sends, and nothing else.

Invariants: the loop never blocks while the engine has work, whatever gateways do; it blocks on the socket when
there is none; no message, however malformed, ends it. A step that raises fails the requests that were running;
if the engine cannot continue after that, `run` returns non-zero and the supervisor starts a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import zmq

from penstock.engine.encoder.request import EncodeOutput
from penstock.engine.request import Delta, EngineLoad, EngineState, Request, StepOutput
from penstock.engine_host.adapters import AdapterNews, operate
from penstock.engine_host.erasures import Erasures
from penstock.engine_host.handover.endpoint import HandoverEndpoint
from penstock.engine_host.interfaces import BeginsPrompts, EncoderLike, EngineLike, Sleeper
from penstock.engine_host.pacer import Pacing
from penstock.engine_host.peers import BACKLOG_LIMIT, Peers
from penstock.engine_host.placements import Placements
from penstock.engine_host.progress import Progress
from penstock.engine_host.quiet_time import QuietTime, save, settle
from penstock.engine_host.sleep_cycle import SleepCycle
from penstock.engine_host.tally import Tally
from penstock.engine_host.watchdog import Watchdog
from penstock.errors import ReplicaLost
from penstock.protocol.codec import ProtocolError, decode_to_engine
from penstock.protocol.messages import (
    ASLEEP,
    DRAINING,
    HEARTBEAT_S,
    NOT_REGISTERED,
    RESUMED_ELSEWHERE,
    Abort,
    AdapterResult,
    Adapters,
    Claim,
    Claimed,
    Count,
    Counted,
    Drain,
    Encode,
    Erase,
    Erased,
    Goodbye,
    Hello,
    Leaving,
    LoadAdapter,
    PinAdapter,
    Placed,
    Pull,
    Ready,
    Shutdown,
    Sleep,
    Step,
    Stopped,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wake,
)
from penstock.protocol.transport import Listener
from penstock.protocol.versions import OLDEST_VERSION, PLACED_SINCE, PROTOCOL_VERSION, answer

EXIT_FAILED = 1
_ARRIVED = int(zmq.POLLIN)
"""A plain integer: combining enumeration flags is slow."""
RECEIVE_LIMIT = 1024
"""Messages received between two steps, so that a flood of them cannot delay running requests."""
FAILURE_LIMIT = 3
"""Steps that may fail in a row before the engine is given up."""
STARVED_S = 0.001
"""Pause after two steps without progress, so that waiting for memory does not burn a core."""

SETTLE_S = 0.005
"""How often to go on with saving what outlives the engine, while there is no work."""
LOOK_S = 0.001
"""How often to see whether a step is over, while the next one can wait."""

log = logging.getLogger("penstock.engine")


class EngineServer:
    """Serves `engine` on `listener` until told to stop. `run` is the whole life of an engine process."""

    def __init__(
        self,
        engine: EngineLike,
        listener: Listener,
        *,
        sleeper: Sleeper | None = None,
        state: EngineState = "awake",
        watchdog: Watchdog | None = None,
        pacing: Pacing | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        backlog_limit: int = BACKLOG_LIMIT,
    ) -> None:
        self._listener = listener
        self._socket = listener.socket
        self._poller = zmq.Poller()
        self._poller.register(listener.socket, zmq.POLLIN)
        self._peers = Peers(listener.socket, backlog_limit=backlog_limit, pacing=pacing)
        self._handovers = HandoverEndpoint(self._poller, listener.socket, listener.secret_key)
        self._tally = Tally()
        self._placements = Placements()
        self._erasures = Erasures()
        self._use(engine)
        self._announce_found()
        self._sleep = SleepCycle(sleeper, state, lambda told: self._peers.tell_all(told, time.monotonic()))
        self._progress = Progress(watchdog)
        self._adapter_news = AdapterNews(heartbeat_s)
        self._heartbeat_s = heartbeat_s
        self._stop_reason: str | None = None
        self._at_once = False
        self._drain_until: float | None = None
        self._said_leaving = False
        self._quiet = QuietTime()
        self._failures = 0
        self._complained_at = float("-inf")

    def _use(self, engine: EngineLike) -> None:
        self._engine = engine
        if isinstance(engine, BeginsPrompts):
            engine.on_begun = self._tell_begun

    def stop(self, reason: str = "shut down", *, at_once: bool = False) -> None:
        """Leave the loop soon; safe from a signal handler or another thread. `at_once`: nothing more is saved."""
        self._at_once = self._at_once or at_once
        self._stop_reason = self._stop_reason or reason

    def fail(self, reason: str) -> None:
        """Leave the loop soon with a failure, so that the engine is restarted; safe like `stop`."""
        self._failures = FAILURE_LIMIT
        self.stop(reason)

    def _lost(self, error: ReplicaLost) -> None:
        log.critical("the engine is lost: %s", error)
        self.fail(str(error))

    def drain(self, limit_s: float = float("inf")) -> None:
        """Accept nothing new, finish running requests (for at most `limit_s`), then leave; safe like `stop`."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + limit_s

    def run(self) -> int:
        """The loop; returns the process's exit code."""
        self._progress.start()
        try:
            while self._stop_reason is None:
                if self._engine.has_work:
                    self._quiet.ended()
                    self._receive(STARVED_S if self._progress.starved else 0.0)
                    self._linger()
                    self._step()
                else:
                    self._progress.idle()
                    self._peers.release(self._engine.load_snapshot, time.monotonic())
                    # Waking up takes tens of microseconds; polling instead would take a core from others.
                    self._receive(self._rest_s())
                self._after_step()
        finally:
            self._handovers.close()
            self._progress.stop()
        log.info("engine stops: %s", self._stop_reason)
        self._peers.release(self._engine.load_snapshot, time.monotonic())
        self._peers.tell_all(Stopped(self._stop_reason), time.monotonic())
        if not self._failures:
            save(self._engine, hurry=lambda: self._at_once)
        return EXIT_FAILED if self._failures else 0

    def _rest_s(self) -> float:
        """How long to wait for messages while there is no work. The time is used to save, and to prepare further steps,
        but not while blocks are handed over, which does not break that off."""
        patience = self._handovers.patience(self._heartbeat_s)
        if self._settle() or self._erasures.open:
            patience = min(patience, SETTLE_S)
        if self._drain_until is not None or self._handovers.busy:
            return patience
        return self._quiet.use(self._engine, patience, self._is_wanted)

    def _announce_found(self) -> None:
        """Blocks found on disk count as sent to the engine: gateways then send prompts that begin with them here."""
        persistence = getattr(self._engine, "persistence", None)
        if persistence is not None:
            self._placements.add_found(persistence.names, self._engine.info.num_blocks)

    def _settle(self) -> bool:
        try:
            return settle(self._engine)
        except ReplicaLost as error:
            self._lost(error)
            return False

    def _is_wanted(self) -> bool:
        """Whether a message has come, or a signal."""
        if self._stop_reason is not None or self._drain_until is not None:
            return True
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _ARRIVED)

    def _linger(self) -> None:
        """Take in what comes until the next step must be launched; see `Engine.spare_s`, which is asked again and
        again: the device may be done earlier than expected."""
        spare = getattr(self._engine, "spare_s", None)  # only some run ahead
        catch_up = getattr(self._engine, "catch_up", None)
        while spare is not None and self._stop_reason is None and (left := spare()) >= LOOK_S:
            if catch_up is None or not catch_up(left):
                self._receive(LOOK_S)

    def _receive(self, wait_s: float) -> None:
        if wait_s > 0 and not self._poller.poll(int(wait_s * 1000)):
            return
        for _ in range(RECEIVE_LIMIT):
            # Checked first: the exception of a receive that finds nothing costs more than a message.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _ARRIVED:
                return
            identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames where one was expected")
                self._handle(identity, decode_to_engine(frames[0]))
            except ProtocolError as error:
                self._complain(identity, error)
            except Exception:  # one message's fault must not end the requests of all
                log.exception("a message from %r could not be handled", identity)

    def _handle(self, identity: bytes, message: ToEngine) -> None:
        peer = self._peers.get(identity)
        match message:
            case Submit(request):
                self._submit(identity, request.request_id, partial(self._begin, request))
            case Encode(texts):
                if isinstance(self._engine, EncoderLike):
                    self._submit(identity, texts.request_id, partial(self._engine.encode, texts))
                else:
                    self._refuse(identity, texts.request_id, "this engine generates; it does not encode texts")
            case Abort(request_id, resumable):
                if peer is not None and request_id in peer.requests:
                    if resumable:
                        self._tally.broken_off(request_id)
                    self._abort(request_id)
            case Pull():
                if peer is not None:
                    self._handovers.pull(identity, message)
            case Placed():
                if peer is not None:
                    self._placements.add(message.placements, self._engine.info.num_blocks)
                    self._peers.tell_placed(message, peer, time.monotonic())
            case Count(question, charges):
                counted = Counted(question, self._tally.of(charges))
                if peer is None and not charges:
                    self._peers.reply(identity, counted)  # a probe, which asks only whether there is an answer
                else:
                    self._answer(identity, counted)
            case Claim(question, charge, request):
                self._claim(identity, question, charge, request)
            case Erase(question, owner):
                self._erasures.begin(self._engine, question, owner, lambda erased: self._answer(identity, erased))
            case LoadAdapter() | UnloadAdapter() | PinAdapter():
                operate(self._engine, message, lambda result: self._answer(identity, result))
            case Hello(gateway, version):
                if peer is None:
                    self._register(identity, gateway, version)
            case Goodbye():
                if peer is not None:
                    for request_id in peer.requests:
                        self._tally.release(request_id)
                    self._peers.give_up(peer, "says goodbye")
            case Sleep():
                self._sleep.ask_to_sleep(self._engine.info)
            case Wake():
                self._wake()
            case Drain():
                self.drain()
            case Shutdown():
                self.stop("told to shut down")

    def _register(self, identity: bytes, gateway: str, version: int) -> None:
        spoken = answer(version)
        ready = Ready(self._engine.info, spoken, self._sleep.state)
        if version != spoken:
            # The answer says what is spoken here, so that the other side can propose it or report why it cannot.
            log.log(
                logging.ERROR if version < OLDEST_VERSION else logging.INFO,
                "gateway %s proposes protocol %d; this engine speaks %d to %d",
                gateway, version, OLDEST_VERSION, PROTOCOL_VERSION,
            )  # fmt: skip
            self._peers.reply(identity, ready)
            return
        log.info("gateway %s connected", gateway)
        peer = self._peers.register(identity, gateway, version)
        self._peers.send(peer, ready, time.monotonic())
        if version >= PLACED_SINCE:
            for remembered in self._placements.messages():
                self._peers.send(peer, remembered, time.monotonic())
        if self._engine.adapters is not None:
            self._peers.send(peer, Adapters(self._engine.adapters.statuses()), time.monotonic())

    def _submit(self, identity: bytes, request_id: str, run: Callable[[], None]) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._refuse(identity, request_id, f"{NOT_REGISTERED}: this engine has restarted; say hello first")
        elif self._drain_until is not None:
            self._refuse(identity, request_id, f"{DRAINING}: the engine is shutting down")
        elif self._sleep.state != "awake":
            self._refuse(identity, request_id, f"{ASLEEP}: this model is not awake")
        elif (owner := self._peers.owner(request_id)) is not None:
            log.error("request id %s is already running for gateway %s", request_id, owner.name)
            if owner is not peer:
                self._refuse(identity, request_id, "this request id is already running")
        else:
            self._peers.own(peer, request_id)
            self._accept(request_id, run)

    def _accept(self, request_id: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            log.exception("request %s was not accepted", request_id)
            self._fail([request_id], f"the engine did not accept the request: {error}")

    def _begin(self, request: Request) -> None:
        self._peers.release(self._engine.load_snapshot, time.monotonic())
        resumable = request if request.resumable_by else None
        self._tally.begin(request.request_id, already=len(request.produced), request=resumable)
        if not self._handovers.begin(self._engine, request):
            self._engine.submit(request)

    def _abort(self, request_id: str) -> None:
        if self._handovers.cancel(request_id):
            self._deliver([Delta(request_id, finish_reason="abort")], self._engine.load_snapshot())
        else:
            self._engine.abort(request_id)

    def _claim(self, identity: bytes, question: str, charge: str, request: Request) -> None:
        """Answer a claim, after everything that its gateway has been sent. A request that still runs has a client that
        came back on another connection: it is stopped, and the gateway of the old one told."""
        self._peers.release(self._engine.load_snapshot, time.monotonic())
        claimed = self._tally.claim(question, charge, request)
        running = claimed.request_id
        if claimed.running and (owner := self._peers.owner(running)) is not None:
            self._peers.disown(running)
            self._refuse(owner.identity, running, f"{RESUMED_ELSEWHERE}: its client has come back")
            self._tally.broken_off(running)
            self._abort(running)
        self._answer(identity, claimed)

    def _step(self) -> None:
        self._progress.step_begins()
        try:
            output = self._engine.step()
        except ReplicaLost as error:
            self._lost(error)
            return
        except Exception as error:
            self._recover(error)
            return
        self._failures = 0
        if output is not None:
            self._deliver(output.deltas, output.load)
            if isinstance(output, EncodeOutput):
                self._peers.deliver_encodings(output.encodings, output.load, time.monotonic())
        load = output.load if output is not None else self._engine.load_snapshot()
        self._progress.step_ended(self._engine, load, has_results=output is not None)

    def _recover(self, error: Exception) -> None:
        """Fail the running requests and see whether the engine can continue without them."""
        self._failures += 1
        running = self._peers.requests
        log.exception("a step failed; failing the %d running requests", len(running))
        self._fail(running, f"the engine failed while running this request: {error}")
        try:
            for request_id in running:
                self._abort(request_id)
        except Exception:
            log.exception("the engine cannot abort its requests")
            self._failures = FAILURE_LIMIT
        if self._failures >= FAILURE_LIMIT:
            self.stop("its steps keep failing")

    def _after_step(self) -> None:
        now = time.monotonic()
        self._peers.heartbeat(self._engine.load_snapshot, now, self._heartbeat_s)
        if (adapters := self._adapter_news.due(self._engine.adapters, now)) is not None:
            self._peers.tell_all(Adapters(adapters), now)
        if self._peers.lost:
            for request_id in self._peers.lost:
                self._tally.broken_off(request_id)
                self._abort(request_id)
            self._peers.lost.clear()
        if self._handovers.open:
            self._hand_over()
        if self._erasures.open:
            self._erase()
        idle = not self._engine.has_work and not self._handovers.busy and not self._erasures.open
        if self._sleep.state == "drowsy" and idle and self._peers.flushed:
            self._fall_asleep()
        if self._drain_until is not None:
            if not self._said_leaving:
                self._said_leaving = True
                self._peers.tell_all(Leaving(), now)
            if idle and self._peers.flushed:
                self.stop("drained")
            elif now > self._drain_until:
                self.stop("the time to drain is over")

    def _hand_over(self) -> None:
        try:
            requests = self._handovers.advance(self._engine, lambda id: self._peers.owner(id) is not None)
        except ReplicaLost as error:
            self._lost(error)
            return
        self._tell_begun(self._handovers.take_begun())
        for request in requests:
            self._accept(request.request_id, partial(self._engine.submit, request))

    def _erase(self) -> None:
        try:
            self._erasures.advance()
        except ReplicaLost as error:
            self._lost(error)

    def _fall_asleep(self) -> None:
        begin = time.monotonic()
        self._handovers.close()
        self._placements.clear()
        try:
            self._use(self._sleep.put_to_sleep(self._engine))
            self._sleep.asleep(self._engine.info)
        except Exception:
            log.exception("the engine could not be put to sleep")
            self.fail("it could not be put to sleep")
            return
        log.info("asleep after %.1f s", time.monotonic() - begin)

    def _wake(self) -> None:
        slept = self._sleep.state == "sleeping"
        if slept:
            self._progress.pause()
        self._use(self._sleep.wake(self._engine))
        if slept and self._sleep.state == "awake":
            self._quiet.begin_anew()
            self._announce_found()

    def _deliver(self, deltas: list[Delta], load: EngineLoad) -> None:
        """Count first: tokens were produced even if their gateway never receives them."""
        self._handovers.settle(deltas)
        self._tally.add(deltas)
        self._peers.deliver(deltas, load, time.monotonic())

    def _tell_begun(self, request_ids: list[str]) -> None:
        if request_ids:
            self._peers.tell_begun(request_ids, time.monotonic())

    def _answer(self, identity: bytes, result: AdapterResult | Counted | Claimed | Erased) -> None:
        peer = self._peers.get(identity)
        if peer is not None:
            self._peers.send(peer, result, time.monotonic())

    def _fail(self, request_ids: list[str], why: str) -> None:
        deltas = [Delta(request_id, finish_reason="error", error=why) for request_id in request_ids]
        self._deliver(deltas, self._engine.load_snapshot())

    def _refuse(self, identity: bytes, request_id: str, why: str) -> None:
        delta = Delta(request_id, finish_reason="error", error=why)
        message = Step(StepOutput([delta], self._engine.load_snapshot()))
        peer = self._peers.get(identity)
        if peer is None:
            self._peers.reply(identity, message)
        else:
            self._peers.send(peer, message, time.monotonic())

    def _complain(self, identity: bytes, error: ProtocolError) -> None:
        """Log a malformed message, at most once a second."""
        now = time.monotonic()
        if now - self._complained_at >= 1.0:
            self._complained_at = now
            log.warning("dropped a malformed message from %r: %s", identity, error)

"""The other ranks of an engine, as rank 0 sees them: it starts them, sends them steps, watches and stops them.

Each is a child process with a socket to rank 0. Invariants: no rank outlives rank 0 (see `engine.process`); when one
dies, or a step fails on any of them, the engine as a whole is lost (`ReplicaLost`), because the others wait inside a
collective and their caches no longer agree. The supervisor starts it again. With `rank_restarts` a rank that dies is
replaced alone (`Ranks.restart`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.engine.config import LOCAL, EngineConfig
from penstock.engine.parallel import plain
from penstock.engine.parallel.channel import Call, Report
from penstock.engine.parallel.child import describe_exit, start_rank
from penstock.engine.parallel.handle import LEAVE_S, RankHandle
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.link import Link
from penstock.engine.parallel.machines import Machines
from penstock.engine.parallel.member import KV_BLOCKS, Member
from penstock.engine.parallel.rendezvous import Rendezvous
from penstock.engine.parallel.setup import Setup
from penstock.errors import ConfigError, PenstockError, ReplicaLost

EXIT_RANK_LOST = 72
_GRACE_S = 3.0
"""How long rank 0 may take to exit after another rank died; it may hang in a collective."""
_SIGN_S = 1.0
"""How long to look for a rank that is gone, after a failure that may have another reason."""
_EXIT_S = 30.0
"""How long a rank that is to be replaced may take to exit: a large one takes seconds to give back its memory."""


class Ranks(Member):
    """Rank 0's membership, and its handles of all the others."""

    def __init__(self, config: EngineConfig, checkpoint: object | None, machines: Machines | None = None) -> None:
        """`machines`: how to reach those that `config` names."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        place = Place(0, config.tensor_parallel, config.pipeline_parallel, config.attention_parallel == "data")
        self._machines = machines if config.spans_machines else None
        self._ranks: list[RankHandle] = []
        self._lost: str | None = None
        self._closing = False
        self._calls = itertools.count()
        self._checkpoint = checkpoint
        self.restarts = config.rank_restarts
        """How often ranks may be started again, in all."""
        self._restarts_left = config.rank_restarts
        self._choices: Mapping[str, Any] = {}
        self._agreed: list[tuple[str, int]] = []
        """What `least` came to, each time that the ranks asked each other."""
        self._begin_watch: Callable[[RankHandle], None] | None = None
        self.died = False
        """A rank is gone that can be started again; see `restart`."""
        self.generation = 0
        """How often ranks were started again."""
        self._restarting = False
        self.when_lost: list[Callable[[], None]] = []
        """Called before a lost rank is replaced."""
        self.after_restart: list[Callable[[], None]] = []
        """Called between steps, once all ranks are there again."""
        self._sends = threading.Lock()
        """Calls may come from other threads than the steps (reading an adapter); every rank gets them in one order."""
        self._restarted = threading.Condition(self._sends)
        """Notified when a restart is over, or none will come."""
        try:
            if config.spans_machines:
                self._gather_machines(config, checkpoint)
            self._config = config
            link = None if self._machines is None else Link(self._machines.link(0), 0)
            super().__init__(place, Rendezvous.of(config, self._folder, link))
            for rank in range(1, place.world):
                self._ranks.append(self._start(config, replace(place, rank=rank)))
            for other in self._ranks:
                if other.remote is None:  # those are told by the process that starts them
                    other.connection.send_bytes(Setup(config, checkpoint, other.place, self._folder).encode())
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _gather_machines(self, config: EngineConfig, checkpoint: object | None) -> None:
        if self._machines is None:
            raise ConfigError(f"ranks are placed on {', '.join(config.machines)}; this engine knows no other machine")
        if checkpoint is not None:
            raise ConfigError("ranks on other machines read a checkpoint of their own; this one exists in memory only")
        self._machines.gather(config)

    def _start(self, config: EngineConfig, place: Place) -> RankHandle:
        if config.machine(place.rank) == LOCAL:
            return _spawn(place, None if self._machines is None else self._machines.link(place.rank))
        assert self._machines is not None
        remote = self._machines.rank(place.rank)
        return RankHandle(place, remote, remote.connection, remote)

    def _announce(self) -> None:
        self._gather()

    def agree(self, choices: Mapping[str, Any]) -> None:
        self._choices = choices
        for other, report in zip(self._ranks, self._gather(), strict=True):
            self._compare(other, report)

    def _compare(self, other: RankHandle, report: Report) -> None:
        for name, here in self._choices.items():
            there = report.choices.get(name)
            if there != here:
                raise ConfigError(
                    f"{other.place} has chosen {name}: {there} and rank 0 {here}, on other hardware; set {name}"
                )

    def least(self, count: int, of: str = "") -> int:
        count = min([count, *(report.count for report in self._gather())])
        for other in self._ranks:
            plain.send(other.connection, count)
        self._agreed.append((of, count))
        return count

    def tell(self, message: bytes, below: int) -> None:
        """One message to every rank whose number is smaller."""
        with self._sends:
            for other in self._ranks[: below - 1]:
                other.connection.send_bytes(message)

    def call(self, name: str, *args: Any) -> list[Future[Any]]:
        """Have every other rank do something between two steps; what it came to on each, as they answer. A refusal is a
        `ConfigError` in the future; a rank that fails otherwise is lost. Any thread may call."""
        return self.call_each(name, itertools.repeat(args, len(self._ranks)))

    def call_some(self, ranks: Collection[int], name: str, *args: Any) -> list[Future[Any]]:
        """The same of some ranks, in their order."""
        asked = [other.place.rank in ranks for other in self._ranks]
        answers = self.call_each(name, [args if one else None for one in asked])
        return [answer for answer, one in zip(answers, asked, strict=True) if one]

    def call_each(self, name: str, args: Iterable[tuple[Any, ...] | None]) -> list[Future[Any]]:
        """The same with arguments for each of them, in the order of their ranks; None: that one is not asked."""
        number, last, encoded, answers = next(self._calls), None, b"", list[Future[Any]]()
        try:
            with self._sends:
                if self._restarting:
                    raise ReplicaLost("a rank is being started again")
                for other, own in zip(self._ranks, args, strict=True):
                    if own is None:
                        answers.append(Future())
                        answers[-1].set_result(None)
                        continue
                    if own is not last:
                        encoded, last = Call(number, name, own).encode(), own
                    answers.append(self._ask(other, number, encoded))
        except OSError as error:
            raise ReplicaLost(self.why_lost() or "a rank is gone") from error
        return answers

    def _ask(self, other: RankHandle, number: int, encoded: bytes) -> Future[Any]:
        answer: Future[Any] = Future()
        other.calls[number] = answer
        self._listen(other)
        other.connection.send_bytes(encoded)
        return answer

    def _listen(self, other: RankHandle) -> None:
        if other.reader is None:
            read = threading.Thread(target=self._read, args=(other,), name=f"replies of {other.place}", daemon=True)
            other.reader = read
            read.start()

    def listen(self) -> None:
        """Once all have started: notice when a rank reports a failure or hangs up, before its process is gone."""
        with self._sends:
            for other in self._ranks:
                self._listen(other)

    def _read(self, other: RankHandle) -> None:
        """Hand replies to those who asked, until the rank is gone."""
        with suppress(EOFError, OSError):
            while True:
                reply = plain.receive(other.connection)
                if isinstance(reply, Report):
                    other.last_words = reply.problem
                elif reply.problem:
                    other.calls.pop(reply.number).set_exception(ConfigError(f"{other.place}: {reply.problem}"))
                else:
                    other.calls.pop(reply.number).set_result(reply.value)
        with self._sends:
            unanswered = list(other.calls.values())
        for answer in unanswered:
            answer.set_exception(ReplicaLost(f"{other.place} is gone"))

    @contextmanager
    def lost_if_it_fails(self) -> Iterator[None]:
        """After a failure in a step that all ranks run, they cannot go on together."""
        try:
            yield
        except Exception as error:
            raise ReplicaLost(self.why_lost() or f"a step over all ranks failed: {error}") from error

    def watch(self, on_lost: Callable[[str], None], *, exit_after_s: float | None = _GRACE_S) -> None:
        """Call `on_lost` (from a thread) when a rank dies, and end this process if it is still here a while later."""

        def wait(other: RankHandle) -> None:
            other.process.wait()
            with self._sends:
                if self._closing or other.replaced:
                    return
                generation, restarts = self.generation, self._restarts_left > 0 and other.replaceable
                self.died = self.died or restarts
            if restarts:
                if self._machines is not None:
                    self._machines.interrupt(generation)
                return
            on_lost(self.why_lost() or f"{other.place} is gone")
            if exit_after_s is not None:
                time.sleep(exit_after_s)
                os._exit(EXIT_RANK_LOST)

        def begin(other: RankHandle) -> None:
            threading.Thread(target=wait, args=(other,), name=f"rank {other.place.rank}", daemon=True).start()

        self._begin_watch = begin
        for other in self._ranks:
            begin(other)

    @property
    def restartable(self) -> bool:
        """Whether a rank is gone, and may be started again."""
        return (
            self._restarts_left > 0 and self.why_lost() is not None and all(other.replaceable for other in self._ranks)
        )

    def await_restart(self, generation: int) -> bool:
        """After a call has failed: wait until all ranks are there again, as a later generation than the one in which
        it was made. False when that will not happen. Not for the thread that takes the steps."""
        while not self._closing:
            restartable = self.restartable
            with self._restarted:
                if self.generation != generation:
                    return True
                if not self._restarting and not restartable:
                    return False
                self._restarted.wait(0.5)
        return False

    def restart(self) -> Future[None]:
        """Start the ranks that are gone once more. They load their parts; the others keep theirs and meet them again.
        What all had in their caches is lost. Nothing else may be asked of them before the future is done."""
        done: Future[None] = Future()
        with self._sends:
            self._restarting = True
            self._restarts_left -= 1
            gone = [other for other in self._ranks if other.process.poll() is not None]
            for other in gone:
                other.replaced = True
        generation, fresh = self.generation + 1, list[RankHandle]()

        def failed(error: Exception) -> None:
            with self._restarted:
                self._restarting, self._restarts_left = False, 0
                self._restarted.notify_all()
            done.set_exception(ReplicaLost(f"a lost rank could not be replaced: {error}"))

        def work() -> None:
            try:
                self._restart(fresh, generation)
                with self._restarted:
                    self._restarting, self.generation = False, generation
                    self._restarted.notify_all()
            except Exception as error:
                failed(error)
            else:
                done.set_result(None)

        try:
            # Here and not in the thread: a child leaves with the thread that started it.
            fresh += self._start_again(gone, generation)
        except (OSError, ReplicaLost) as error:
            failed(error)
            return done
        for forget in self.when_lost:
            forget()
        threading.Thread(target=work, name="restart of a rank", daemon=True).start()
        return done

    def _start_again(self, gone: list[RankHandle], generation: int) -> Iterator[RankHandle]:
        if self._machines is not None:
            self._machines.interrupt(self.generation)
            self._machines.begin(generation)
        # As many KV blocks as before, whatever is free now.
        config = replace(self._config, num_blocks=dict(self._agreed)[KV_BLOCKS] - 1)
        for lost in gone:
            lost.hang_up()
            if lost.remote is not None:
                assert self._machines is not None
                remote = self._machines.restart(lost.place.rank, config, generation)
                new = RankHandle(lost.place, remote, remote.connection, remote)
            else:
                new = self._start(config, lost.place)
            self._ranks[lost.place.rank - 1] = new
            if new.remote is None:
                new.connection.send_bytes(Setup(config, self._checkpoint, new.place, self._folder, generation).encode())
            yield new

    def _restart(self, fresh: list[RankHandle], generation: int) -> None:
        self.groups.drop()  # those that wait for this one notice
        for new in fresh:
            self._hear(new)  # it is up
        number = next(self._calls)
        message = Call(number, "regroup", (generation,)).encode()
        with self._sends:
            answers = [self._ask(other, number, message) for other in self._ranks if other not in fresh]
        self.groups.renew(generation)
        for answer in answers:
            answer.result()
        for new in fresh:
            self._compare(new, self._hear(new))
            for what, agreed in self._agreed:
                if self._hear(new).count < agreed:
                    problem = f"has no room for {agreed} {what} any more" if what else "loads otherwise than before"
                    raise ReplicaLost(f"{new.place} {problem}")
                plain.send(new.connection, agreed)
            if self._begin_watch is not None:
                self._begin_watch(new)
        self.listen()
        with self._sends:  # as whoever notices a death
            self._lost, self.died = None, any(other.process.poll() is not None for other in self._ranks)

    def close(self, grace_s: float = LEAVE_S) -> None:
        """Stop every rank; those that have not exited after `grace_s` are killed."""
        self._closing = True
        with self._restarted:
            self._restarted.notify_all()
        for other in self._ranks:
            other.hang_up()
            if other.process.stdin is not None:
                other.process.stdin.close()
        deadline = time.monotonic() + grace_s
        for other in self._ranks:
            try:
                other.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
        if self._machines is not None:
            self._machines.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._ranks]

    def _gather(self) -> list[Report]:
        return [self._hear(other) for other in self._ranks]

    def _hear(self, other: RankHandle) -> Report:
        """What a rank reports while it starts."""
        try:
            report: Report = plain.receive(other.connection)
        except (EOFError, OSError):
            raise ReplicaLost(self.why_lost() or f"{other.place} ended while starting") from None
        if report.problem:
            failed, why = self._failure((other, report)) or (other, report)
            raise failed.blamed(why)
        return report

    def loss(self, error: Exception) -> PenstockError:
        failed = self._failure()
        if failed is not None:
            other, report = failed
            return other.blamed(report)
        return ReplicaLost(self.why_lost() or f"another rank is gone: {error}")

    def _failure(self, found: tuple[RankHandle, Report] | None = None) -> tuple[RankHandle, Report] | None:
        """Why ranks have failed while starting, of all that they report; `found`: what one has reported.
        One that has lost another fails too, perhaps earlier than the other can say why."""
        deadline = time.monotonic() + 1.0
        while (found is None or not found[1].on_purpose) and time.monotonic() < deadline:
            for other in self._ranks:
                report = other.next_report()
                if report is not None and report.problem and (found is None or report.on_purpose):
                    found = other, report
            time.sleep(0.02)
        return found

    def why_lost(self) -> str | None:
        """Which rank is gone, and its last report. Ranks that are leaving are waited for where they can be replaced."""
        began = time.monotonic()
        while self._lost is None:
            gone = next((other for other in self._ranks if other.process.poll() is not None), None)
            leaving = self._replaces and any(other.leaving and other.process.poll() is None for other in self._ranks)
            patience = _EXIT_S if leaving else _SIGN_S if gone is None else 0.0
            if time.monotonic() - began < patience:
                time.sleep(0.02)
            elif gone is None:
                break
            else:
                code = gone.process.poll()
                assert code is not None
                ended = describe_exit(code) if gone.remote is None else gone.remote.ended
                self._lost = f"{gone.place} is gone ({ended}){gone.last_report()}"
        return self._lost

    @property
    def _replaces(self) -> bool:
        return self._restarts_left > 0 and not self._closing


def _spawn(place: Place, link: Connection | None = None) -> RankHandle:
    return RankHandle(place, *start_rank(link))

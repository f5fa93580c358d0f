"""Adapters as the scheduler sees them: whether a sequence may start, and in which slot.

A sequence that names an adapter may wait twice: until the adapter is in host memory (kept with its entry), then until a
slot is free (kept here, by adapter). Waiting sequences are out of the scheduler's queue, so they do not hold up others,
and return to it at their old place. Slots are given in scheduling order; so that busy adapters cannot keep others out
for ever, a sequence that has waited `PATIENCE_S` for a slot holds back later ones that use adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from penstock.engine.adapters.loader import Read
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.registry import RETRY_S, AdapterEntry, AdapterRegistry, Done
from penstock.engine.adapters.slots import SlotTable
from penstock.engine.adapters.spec import (
    ADAPTER_FAILED,
    ADAPTER_UNKNOWN,
    AdapterLoad,
    AdapterSpec,
    AdapterStatus,
    name_problem,
)
from penstock.engine.kv.block_hash import root_name
from penstock.engine.request import TOKENS_UNKNOWN, TOO_LONG
from penstock.engine.sequence import Sequence
from penstock.errors import ConfigError

PATIENCE_S = 1.0
MOVES_PER_STEP = 2
"""Copies into slots between two steps: bounds how long running sequences are delayed."""
_LOADER_WAIT_S = 0.002
_NO_TOKEN = f"{TOKENS_UNKNOWN}: the adapter does not have all of the prompt's and the allowed; it has those up to"


class AdapterPool:
    """AdapterRegistry, slots and the sequences between them. Belongs to the engine's thread."""

    def __init__(
        self,
        specs: Iterable[AdapterSpec],
        read: Read,
        *,
        slots: int,
        host_slots: int,
        dropped: Callable[[LoadedAdapter], None] | None = None,
        unreadable: Collection[LoadedAdapter] = (),
        vocabulary: int = 0,
        room: int = 0,
    ) -> None:
        """`dropped` is called with adapters that leave host memory. `unreadable`: those that other ranks have lost for
        good, by and by. `vocabulary`, `room`: the model's tokens, and those
        that adapters may have behind them."""
        self.room = room
        self._vocabulary = vocabulary
        self.slots = SlotTable(slots)
        self.registry = AdapterRegistry(specs, read, host_slots, self._drop)
        self._dropped = dropped
        self._unreadable = unreadable
        self._entries: dict[Sequence, AdapterEntry] = {}
        """The entry that each sequence with an adapter holds."""
        self._slotless: OrderedDict[LoadedAdapter, dict[Sequence, None]] = OrderedDict()
        self._lost: dict[Sequence, str] = {}
        """Sequences that cannot have their adapter, and why; `poll` returns them."""
        self._since: dict[Sequence, float] = {}
        """When each waiting sequence first found no slot; the first entry has waited longest."""

    def preload(self) -> None:
        """Start to read the pinned adapters before they are asked for."""
        for entry in self.registry:
            if entry.pinned:
                self.registry.want(entry)

    # For clients and operators.

    def version(self, name: str) -> str | None:
        """Which weights a name stands for now; None while they are not in memory."""
        entry = self.registry.get(name)
        return None if entry is None or entry.adapter is None else entry.adapter.version

    def problem(self, name: str, now: float) -> str | None:
        """Why a request for `name` cannot be taken, or None."""
        entry = self.registry.get(name)
        if entry is None:
            return f"{ADAPTER_UNKNOWN} {name!r}"
        if entry.state == "failed" and now - entry.failed_at < RETRY_S:
            return f"{ADAPTER_FAILED}: {entry.error.replace(entry.source, name)}"
        return None

    def load(self, spec: AdapterSpec, done: Done) -> None:
        """Read an adapter and make its name usable; `done` is called when it is, or with the reason why not."""
        problem = name_problem(spec.name) or ("a source is needed" if not spec.source else None)
        if spec.pinned and problem is None:
            problem = self._pin_problem(spec.name)
        if problem is not None:
            done(AdapterStatus(spec.name, spec.source, "failed", error=problem))
            return
        self.registry.add(spec, done)

    def unload(self, name: str) -> list[Sequence]:
        """Forget a name. Sequences that have the adapter go on with it; those that waited for it are returned."""
        return self.registry.remove(self._known(name))

    def pin(self, name: str, pinned: bool) -> AdapterStatus:
        entry = self._known(name)
        problem = self._pin_problem(name) if pinned else None
        if problem is not None:
            raise ConfigError(problem)
        entry.pinned = pinned
        self.registry.revision += 1
        if entry.adapter is not None:
            self.slots.pin(entry.adapter, pinned)
        if pinned:
            self.registry.want(entry)
        return self.status(entry)

    @property
    def revision(self) -> int:
        """Changes when an adapter was added or removed, became ready or failed."""
        return self.registry.revision

    def statuses(self) -> list[AdapterStatus]:
        return [self.status(entry) for entry in self.registry]

    def status(self, entry: AdapterEntry) -> AdapterStatus:
        return entry.status(entry.adapter is not None and self.slots.holds(entry.adapter))

    # For the scheduler.

    def bind(self, seq: Sequence) -> bool:
        """Give a sequence its adapter. False: it is being read, and the sequence waits here."""
        if seq.adapter is not None:
            return True
        entry = self.registry.get(seq.request.adapter)
        if entry is None:  # unloaded after the request was accepted
            self._lost[seq] = f"{ADAPTER_UNKNOWN} {seq.request.adapter!r} any more"
            return False
        if entry.adapter is None:
            entry.waiting[seq] = None
            self.registry.want(entry)
            return False
        problem = self._mismatch(seq, entry.adapter)
        if problem is not None:
            self._lost[seq] = problem
            return False
        self._give(seq, entry)
        return True

    def may_start(self, seq: Sequence, now: float) -> bool:
        """Whether there is a slot for the adapter of `seq`. False: it waits here until there may be one."""
        adapter = seq.adapter
        if adapter is None:
            return True
        first = self._impatient(now)
        if first is None or adapter is first.adapter or seq.key < first.key:
            if self.slots.holds(adapter):
                return True
            if self.slots.room and len(self.slots.moves) < MOVES_PER_STEP:
                return True
        self._slotless.setdefault(adapter, {})[seq] = None
        self._since.setdefault(seq, now)
        return False

    def has_slot(self, seq: Sequence) -> bool:
        """Whether `seq` could start now, regardless of others that wait."""
        return seq.adapter is None or self.slots.holds(seq.adapter) or self.slots.room > 0

    def start(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            seq.slot = self.slots.acquire(seq.adapter)
            self._since.pop(seq, None)
            self.registry.touch(self._entries[seq])

    def stop(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            assert seq.adapter is not None
            self.slots.release(seq.adapter)
            seq.slot = -1

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended, wherever it was."""
        entry = self._entries.pop(seq, None)
        if entry is None:
            waiting = self.registry.get(seq.request.adapter)
            if waiting is not None:
                waiting.waiting.pop(seq, None)
            self._lost.pop(seq, None)
            return
        assert seq.adapter is not None
        waiting_here = self._slotless.get(seq.adapter)
        if waiting_here is not None:
            waiting_here.pop(seq, None)
            if not waiting_here:
                del self._slotless[seq.adapter]
        self._since.pop(seq, None)
        self.registry.let_go(entry)
        seq.adapter = None

    def returning(self, now: float) -> list[Sequence]:
        """Waiting sequences for which there may be a slot now, in the order in which their adapters came."""
        if not self._slotless:
            return []
        room = min(self.slots.room, MOVES_PER_STEP - len(self.slots.moves))
        if room <= 0 and self._impatient(now) is not None:
            return []  # slots must become idle first; no other sequence may start meanwhile
        back: list[Sequence] = []
        for adapter in list(self._slotless):
            if not self.slots.holds(adapter):
                if room <= 0:
                    break
                room -= 1
            back.extend(self._slotless.pop(adapter))
        return back

    # For the engine.

    def poll(self, now: float) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
        """Take finished loads: sequences that have their adapter now, and those that never will."""
        for adapter in list(self._unreadable):
            self.registry.discard(adapter)
        outcome = self.registry.poll(now)
        ready: list[Sequence] = []
        for entry in outcome.ready:
            assert entry.adapter is not None
            if entry.pinned:
                self.slots.pin(entry.adapter, True)
            waiting, entry.waiting = entry.waiting, {}
            for seq in waiting:
                problem = self._mismatch(seq, entry.adapter)
                if problem is None:
                    self._give(seq, entry)
                    ready.append(seq)
                else:
                    self._lost[seq] = problem
        if outcome.ready or outcome.failed:
            self.registry.start_loads()
        failed = [(seq, f"{ADAPTER_FAILED}: {why}") for seq, why in outcome.failed]
        failed += self._lost.items()
        self._lost.clear()
        return ready, failed

    @property
    def busy(self) -> bool:
        """Whether there are loads to take."""
        return self.registry.loading > 0

    def wait(self) -> None:
        """Nothing can run: wait a moment for the loader."""
        if self.registry.loading:
            self.registry.wait(_LOADER_WAIT_S)

    def load_snapshot(self) -> AdapterLoad:
        registry, slots = self.registry, self.slots
        return AdapterLoad(
            slots=slots.count,
            on_device=slots.occupied,
            on_host=registry.on_host,
            loading=registry.loading,
            running=[adapter.name for adapter in slots.in_use],
            waiting=[*registry.waiting, *(adapter.name for adapter in self._slotless)],
            loads=registry.loads,
            failures=registry.failures,
            copies=slots.copies,
            evictions=slots.evictions,
            host_evictions=registry.host_evictions,
            load_seconds=round(registry.load_seconds, 6),
        )

    def check_idle(self) -> None:
        """Assert that no sequence holds or awaits an adapter; for tests and soaks."""
        self.slots.check()
        assert not self.slots.in_use, f"{len(self.slots.in_use)} slots leaked"
        assert not self._entries and not self._slotless and not self._since and not self._lost, "a sequence is kept"
        assert not any(entry.users or entry.waiting for entry in self.registry), "an adapter has users"

    def _mismatch(self, seq: Sequence, adapter: LoadedAdapter) -> str | None:
        """Why a sequence cannot run with the adapter that it asks for, or None."""
        allowed = seq.params.allowed_token_ids
        if self.room and max(max(seq.tokens), max(allowed, default=0)) >= self._vocabulary:
            # Those behind the model's vocabulary are the adapter's own; virtual ones are not for prompts.
            rows = None if adapter.virtual else adapter.rows
            if rows is None or not rows.has((*seq.tokens, *allowed), self._vocabulary):
                return f"{_NO_TOKEN} {self._vocabulary - 1}, and of its own"
        total = len(seq.tokens) + adapter.virtual
        if total >= seq.window:
            return (
                f"{TOO_LONG}: {total} tokens > {seq.window - 1} maximum, with the {adapter.virtual} virtual tokens "
                "that its adapter puts before it; shorten the prompt"
            )
        return None

    def virtual_tokens(self, name: str) -> list[int]:
        """What an adapter puts before prompts; see `Sequence.begin_with`."""
        entry = self.registry.get(name)
        return [] if entry is None or entry.adapter is None else self._virtual_of(entry.adapter)

    def _virtual_of(self, adapter: LoadedAdapter) -> list[int]:
        """Ids behind the model's vocabulary, which prompts cannot have."""
        return list(range(self._vocabulary, self._vocabulary + adapter.virtual))

    def _give(self, seq: Sequence, entry: AdapterEntry) -> None:
        assert entry.adapter is not None
        seq.adapter = entry.adapter
        seq.root = root_name(seq.request.cache_salt, entry.adapter.version)
        seq.begin_with(self._virtual_of(entry.adapter))
        self._entries[seq] = entry
        self.registry.hold(entry)

    def _drop(self, adapter: LoadedAdapter) -> None:
        self.slots.drop(adapter)
        if self._dropped is not None:
            self._dropped(adapter)

    def _impatient(self, now: float) -> Sequence | None:
        """The sequence that has waited longest for a slot, if that was too long."""
        for seq, since in self._since.items():
            return seq if now - since > PATIENCE_S else None
        return None

    def _known(self, name: str) -> AdapterEntry:
        entry = self.registry.get(name)
        if entry is None:
            raise ConfigError(f"{ADAPTER_UNKNOWN} {name!r}")
        return entry

    def _pin_problem(self, name: str) -> str | None:
        others = sum(entry.pinned for entry in self.registry if entry.name != name)
        if others + 1 < self.slots.count:
            return None
        return f"{others} adapters are pinned already; one of {self.slots.count} slots must stay free for the others"

"""Which adapters there are, and which of them are in host memory.

An adapter is known by its name and read when it is first needed. The host tier holds `host_slots` of them; the least
recently used one without users makes room, and is read again from its source when it is asked for. Invariant: an
adapter with users is never evicted; when all have users, further loads wait. Unloading forgets the name at once;
sequences that already use the adapter keep it until they end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.engine.adapters.loader import Loader, Read
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.spec import AdapterSpec, AdapterState, AdapterStatus
from penstock.engine.sequence import Sequence

RETRY_S = 5.0
"""A failed adapter is not read again before this: many requests for it must not become many downloads."""

Done = Callable[[AdapterStatus], None]
"""Called once when a load has succeeded or failed."""


@dataclass(slots=True, eq=False)
class AdapterEntry:
    """One name."""

    name: str
    source: str
    pinned: bool = False
    state: AdapterState = "known"
    adapter: LoadedAdapter | None = None
    users: int = 0
    error: str = ""
    failed_at: float = float("-inf")
    gone: bool = False
    """Unloaded, or replaced by a reload; sequences that use it may finish."""
    waiting: dict[Sequence, None] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    owner: str = ""

    def status(self, on_device: bool = False) -> AdapterStatus:
        loaded = self.adapter
        return AdapterStatus(
            name=self.name,
            source=self.source,
            state=self.state,
            pinned=self.pinned,
            rank=loaded.rank if loaded is not None else 0,
            version=loaded.version if loaded is not None else "",
            on_device=on_device,
            users=self.users,
            error=self.error,
            owner=self.owner,
            kind=loaded.kind if loaded is not None else "",
        )


@dataclass(slots=True)
class Outcome:
    """Results of finished loads: entries that are ready, and sequences whose adapter failed."""

    ready: list[AdapterEntry] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class AdapterRegistry:
    """Names, loads and the host tier. Belongs to the engine's thread."""

    def __init__(
        self, specs: Iterable[AdapterSpec], read: Read, host_slots: int, dropped: Callable[[LoadedAdapter], object]
    ) -> None:
        """`dropped` is called with adapters that leave host memory, so that no slot keeps one alive."""
        self.host_slots = host_slots
        self._dropped = dropped
        self.revision = 0
        """Grows whenever a status changed, so that observers know when to look again."""
        self.loads = self.failures = self.host_evictions = 0
        self.load_seconds = 0.0
        self._loader: Loader[AdapterEntry] = Loader(read)
        self._entries = {
            spec.name: AdapterEntry(spec.name, spec.source, spec.pinned, owner=spec.owner) for spec in specs
        }
        self._host: OrderedDict[AdapterEntry, None] = OrderedDict()
        """Entries in memory, least recently used first; replaced ones too while they have users."""
        self._loading = 0
        self._queued: OrderedDict[AdapterEntry, None] = OrderedDict()

    def get(self, name: str) -> AdapterEntry | None:
        return self._entries.get(name)

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(self._entries.values())

    @property
    def loading(self) -> int:
        return self._loading + len(self._queued)

    @property
    def on_host(self) -> int:
        return len(self._host)

    @property
    def waiting(self) -> list[str]:
        return [entry.name for entry in self._entries.values() if entry.waiting]

    def add(self, spec: AdapterSpec, done: Done) -> AdapterEntry:
        """Read an adapter now, also when one of that name exists: new requests then use the new one."""
        entry = AdapterEntry(spec.name, spec.source, spec.pinned, done=[done], owner=spec.owner)
        old = self._entries.get(spec.name)
        if old is not None:
            entry.waiting, old.waiting = old.waiting, {}
            self.retire(old)
        self._entries[spec.name] = entry
        self.want(entry)
        return entry

    def insert(self, adapter: LoadedAdapter) -> None:
        """Add an adapter that is in memory already, under its own name; it has no source to be read from again."""
        entry = AdapterEntry(adapter.name, "", pinned=True, state="ready", adapter=adapter)
        self._entries[adapter.name] = entry
        self._host[entry] = None
        self.revision += 1

    def remove(self, entry: AdapterEntry) -> list[Sequence]:
        """Forget a name; the sequences that waited for it to be read."""
        self._entries.pop(entry.name, None)
        waiting, entry.waiting = list(entry.waiting), {}
        self.retire(entry)
        return waiting

    def retire(self, entry: AdapterEntry) -> None:
        """Accept no new users; memory is freed with the last one."""
        entry.gone = True
        self.revision += 1
        self._queued.pop(entry, None)
        for done in entry.done:
            done(AdapterStatus(entry.name, entry.source, "failed", error="it was unloaded or replaced meanwhile"))
        entry.done.clear()
        if not entry.users:
            self._free(entry)

    def discard(self, adapter: LoadedAdapter) -> bool:
        """Free an adapter's memory though its name stays: it is read anew when it is asked for. False while it has
        users."""
        entry = next((entry for entry in self._host if entry.adapter is adapter), None)
        if entry is None:
            return True
        if entry.users:
            return False
        self._free(entry)
        entry.state = "known"
        self.revision += 1
        if entry.pinned:
            self.want(entry)
        return True

    def want(self, entry: AdapterEntry) -> None:
        """Start to read it, unless it is being read or in memory."""
        if entry.state in ("known", "failed"):
            entry.state, entry.error = "loading", ""
            self.revision += 1
            self._queued[entry] = None
            self.start_loads()

    def touch(self, entry: AdapterEntry) -> None:
        """Note that it was just used."""
        if entry in self._host:
            self._host.move_to_end(entry)

    def hold(self, entry: AdapterEntry) -> None:
        entry.users += 1
        self.touch(entry)

    def let_go(self, entry: AdapterEntry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if entry.gone:
            self._free(entry)
        self.start_loads()

    def poll(self, now: float) -> Outcome:
        """Take what the loader has finished. Call `start_loads` once the waiting sequences hold their adapters: before
        that, an adapter without users could be evicted again."""
        outcome = Outcome()
        for loaded in self._loader.finished():
            entry = loaded.key
            self._loading -= 1
            self.load_seconds += loaded.seconds
            self.revision += 1
            if loaded.adapter is None:
                self.failures += 1
                entry.state, entry.error, entry.failed_at = "failed", loaded.error, now
                # The location is for operators, not for clients.
                outcome.failed += [(seq, loaded.error.replace(entry.source, entry.name)) for seq in entry.waiting]
                entry.waiting = {}
            else:
                self.loads += 1
                if entry.gone:
                    self._dropped(loaded.adapter)
                    continue
                entry.state, entry.adapter = "ready", loaded.adapter
                self._host[entry] = None
                outcome.ready.append(entry)
            for done in entry.done:
                done(entry.status())
            entry.done.clear()
        return outcome

    def wait(self, seconds: float) -> None:
        """Wait for the loader, while there is nothing else to do."""
        self._loader.wait(seconds)

    def start_loads(self) -> None:
        """Start to read the next ones, as far as host memory allows."""
        while self._queued and self._make_room():
            entry, _ = self._queued.popitem(last=False)
            self._loading += 1
            self._loader.start(entry, entry.name, entry.source)

    def _make_room(self) -> bool:
        if len(self._host) + self._loading < self.host_slots:
            return True
        victim = next((entry for entry in self._host if not entry.users and not entry.pinned), None)
        if victim is None:
            return False
        self._free(victim)
        victim.state = "known"
        self.host_evictions += 1
        self.revision += 1
        return True

    def _free(self, entry: AdapterEntry) -> None:
        self._host.pop(entry, None)
        if entry.adapter is not None:
            self._dropped(entry.adapter)
            entry.adapter = None

"""Which adapters there are, and which of them are in host memory.

An adapter is known by its name and read when somebody needs it. The host tier holds `host_slots` of them; the least
recently used one that nobody needs makes room, and is read again from its source when it is asked for. Invariant: an
adapter with users is never evicted; when all have users, further loads wait. Unloading forgets the name at once, and
whoever already uses the adapter keeps it until the end.
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
"""Told once when a load that was asked for has ended, well or badly."""


@dataclass(slots=True, eq=False)
class Entry:
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
    """Unloaded, or replaced by a reload; what still uses it may finish."""
    waiting: dict[Sequence, None] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)

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
        )


@dataclass(slots=True)
class Outcome:
    """What `poll` found: entries that became ready, and sequences whose adapter did not."""

    ready: list[Entry] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class Registry:
    """Names, loads and the host tier. Belongs to the engine's thread."""

    def __init__(
        self, specs: Iterable[AdapterSpec], read: Read, host_slots: int, dropped: Callable[[LoadedAdapter], object]
    ) -> None:
        """`dropped` is told of adapters that leave host memory, so that no slot keeps one alive."""
        self.host_slots = host_slots
        self._dropped = dropped
        self.revision = 0
        """Grows whenever a status changed, so that others know when to look again."""
        self.loads = self.failures = self.host_evictions = 0
        self.load_seconds = 0.0
        self._loader: Loader[Entry] = Loader(read)
        self._entries = {spec.name: Entry(spec.name, spec.source, spec.pinned) for spec in specs}
        self._host: OrderedDict[Entry, None] = OrderedDict()
        """Entries in memory, least recently used first; replaced ones too while they have users."""
        self._loading = 0
        self._queued: OrderedDict[Entry, None] = OrderedDict()

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __iter__(self) -> Iterator[Entry]:
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

    def add(self, spec: AdapterSpec, done: Done) -> Entry:
        """Read an adapter now, also when one of that name exists: new requests then use the new one."""
        entry = Entry(spec.name, spec.source, spec.pinned, done=[done])
        old = self._entries.get(spec.name)
        if old is not None:
            entry.waiting, old.waiting = old.waiting, {}
            self.retire(old)
        self._entries[spec.name] = entry
        self.want(entry)
        return entry

    def insert(self, adapter: LoadedAdapter) -> None:
        """An adapter that is in memory already, under a name of its own; it has no source to come back from."""
        entry = Entry(adapter.name, "", pinned=True, state="ready", adapter=adapter)
        self._entries[adapter.name] = entry
        self._host[entry] = None
        self.revision += 1

    def remove(self, entry: Entry) -> list[Sequence]:
        """Forget a name; the sequences that waited for it to be read."""
        self._entries.pop(entry.name, None)
        waiting, entry.waiting = list(entry.waiting), {}
        self.retire(entry)
        return waiting

    def retire(self, entry: Entry) -> None:
        """No new users; memory is given back with the last one."""
        entry.gone = True
        self.revision += 1
        self._queued.pop(entry, None)
        for done in entry.done:
            done(AdapterStatus(entry.name, entry.source, "failed", error="it was unloaded or replaced meanwhile"))
        entry.done.clear()
        if not entry.users:
            self._free(entry)

    def want(self, entry: Entry) -> None:
        """Have it read, unless it is being read or in memory."""
        if entry.state in ("known", "failed"):
            entry.state, entry.error = "loading", ""
            self.revision += 1
            self._queued[entry] = None
            self.start_loads()

    def touch(self, entry: Entry) -> None:
        """It was just used."""
        if entry in self._host:
            self._host.move_to_end(entry)

    def hold(self, entry: Entry) -> None:
        entry.users += 1
        self.touch(entry)

    def let_go(self, entry: Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if entry.gone:
            self._free(entry)
        self.start_loads()

    def poll(self, now: float) -> Outcome:
        """Take what the loader has finished. `start_loads` has to follow, once those who waited hold their adapters:
        an adapter without users could be evicted again at once."""
        outcome = Outcome()
        for loaded in self._loader.finished():
            entry = loaded.key
            self._loading -= 1
            self.load_seconds += loaded.seconds
            self.revision += 1
            if loaded.adapter is None:
                self.failures += 1
                entry.state, entry.error, entry.failed_at = "failed", loaded.error, now
                # Where it lies is for operators, not for clients.
                outcome.failed += [(seq, loaded.error.replace(entry.source, entry.name)) for seq in entry.waiting]
                entry.waiting = {}
            else:
                self.loads += 1
                if entry.gone:
                    continue
                entry.state, entry.adapter = "ready", loaded.adapter
                self._host[entry] = None
                outcome.ready.append(entry)
            for done in entry.done:
                done(entry.status())
            entry.done.clear()
        return outcome

    def wait(self, seconds: float) -> None:
        """For the loader, while there is nothing else to do."""
        self._loader.wait(seconds)

    def start_loads(self) -> None:
        """Have the next ones read, as far as host memory allows."""
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

    def _free(self, entry: Entry) -> None:
        self._host.pop(entry, None)
        if entry.adapter is not None:
            self._dropped(entry.adapter)
            entry.adapter = None

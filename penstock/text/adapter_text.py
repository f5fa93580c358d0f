"""The text side of a model with an adapter: an adapter's folder may bring a tokenizer and a chat template of its own.

What it does not bring is the model's. Adapters with the same files share what is read of them, and a tokenizer that is
the model's own is not kept twice. Whoever serves requests awaits `AdapterTexts.prepare` first: files are read on a
thread, one adapter at a time, so that no event loop waits for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from penstock.engine.adapters.folder import stored_tokens
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.errors import CheckpointError, PenstockError
from penstock.text.loader import own_templates, read_tokenizer, special_tokens
from penstock.text.text_model import TextModel

TOKENIZER = "tokenizer.json"
MOST_BYTES = {
    TOKENIZER: 128 << 20,
    "tokenizer_config.json": 16 << 20,
    "chat_template.jinja": 1 << 20,
    "chat_template.json": 1 << 20,
}
"""What of an adapter's folder counts here, and how large it may be."""
Stamp = tuple[tuple[int, int], ...]
KEPT = 32
"""Adapters with texts of their own that are kept in memory, those that were used last."""
MOST_KNOWN = 4096
"""Those that bring nothing included."""
CHECK_S = 1.0
"""How long what was read is used without a look at the files."""
WAIT_S = 20.0
"""How long requests wait for files that are fetched for the first time, before what is here is used."""
FETCHES = 32
"""At a time; those of stores that do not answer must not keep others waiting."""
MOST_BEHIND = 1 << 20
"""Ids behind the model's that a tokenizer may have: tables here have a place for each."""


def adapter_text(
    folder: Path, base: TextModel, base_folder: Path | None = None, read: Callable[[Path], Tokenizer] = read_tokenizer
) -> TextModel:
    """The text side of `base` with the adapter in `folder`; `base` itself where that brings nothing of its own."""
    _check_files(folder)
    brought = (folder / TOKENIZER).exists() and not _same(folder, base_folder)
    special = special_tokens(folder)
    templates = own_templates(folder)
    if templates == {"default": base.template_source}:
        templates = {}
    if not brought and not templates:
        return base
    tokenizer = read(folder) if brought else None
    rows = max(base.vocab_size, stored_tokens(folder))
    highest = -1 if tokenizer is None else max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= rows + MOST_BEHIND:
        raise CheckpointError(f"its tokenizer has the token id {highest}; the model has {rows} tokens")
    if tokenizer is not None and (folder / WEIGHTS).exists():
        _check_rows(tokenizer, base, rows, special)
    else:  # the weights are where engines run, which refuse tokens that they do not have
        rows = max(rows, 1 + highest)
    return base.adapted(tokenizer, templates, special, rows)


def _check_files(folder: Path) -> None:
    """Refuse what is not a plain file, and what no tokenizer or template is as large as."""
    for name, most in MOST_BYTES.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{name} is not a file")
        if found.st_size > most:
            raise CheckpointError(f"{name} has {found.st_size} bytes, more than the {most} that are read")


def _same(folder: Path, other: Path | None) -> bool:
    """Whether both have the same tokenizer file."""
    if other is None or not (other / TOKENIZER).is_file():
        return False
    return _digest(folder) == _digest(other)


def _digest(folder: Path) -> bytes:
    with (folder / TOKENIZER).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _check_rows(tokenizer: Tokenizer, base: TextModel, rows: int, special: Mapping[str, str]) -> None:
    """Refuse a tokenizer with tokens that the weights have no rows for. One for padding may be there, since nothing is
    padded here, and so may those that the model's own tokenizer has."""
    beyond = [
        spelling
        for spelling, token in tokenizer.get_vocab(with_added_tokens=True).items()
        if token >= rows and spelling != special["pad_token"] and base.token_id(spelling) != token
    ]
    if beyond:
        raise CheckpointError(
            f"its tokenizer has {len(beyond)} tokens behind the {rows} that model and adapter have rows for, such as "
            f"{min(beyond)!r:.60}: the tokenizer belongs to other weights, or these were saved without the embedding"
        )


@dataclass(slots=True)
class _Known:
    """What is known of an adapter's source: its text, or why there is none."""

    stamp: Stamp
    checked: float
    text: TextModel | None = None
    problem: str = ""
    digest: bytes = b""
    tokenizer: Tokenizer | None = None
    """Where it brings one."""


class AdapterTexts:
    """The texts of a model's adapters, read again when their files change. Thread-safe."""

    def __init__(
        self,
        base: TextModel,
        base_folder: Path | None,
        find: Callable[[str], Path | None],
        fetch: Callable[[str], Callable[[], None] | None] = lambda source: None,
    ) -> None:
        """`find`: the folder of an adapter's source, None where it is not on this machine. `fetch`: what brings it
        there, None where there is nothing to bring now. It may take a while: requests for the adapter wait for it the
        first time, up to `WAIT_S`, other requests never."""
        self.base = base
        self._base_folder = base_folder
        self._find = find
        self._fetch = fetch
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        """Of what is known; never held while files are read."""
        self._reading = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter texts")
        self._fetchers = ThreadPoolExecutor(FETCHES, thread_name_prefix="adapter texts from elsewhere")
        self._fetching: set[str] = set()
        self._fetched_once: dict[str, None] = {}
        self._tasks: dict[str, asyncio.Future[_Known]] = {}

    async def prepare(self, source: str) -> None:
        """Have what `of` gives, from files as they are now or were a moment ago. Does not raise: `of` does."""
        known, fetch, task = self._known.get(source), self._fetch(source), self._tasks.get(source)
        if fetch is not None and source in self._fetching:
            fetch = None
        if fetch is not None:
            self._fetching.add(source)
            if source in self._fetched_once:
                self._fetchers.submit(self._fetched, source, fetch)  # until it is there, what was there is used
                fetch = None
        first = fetch is not None or (task is not None and source not in self._fetched_once)
        if known is not None and time.monotonic() < known.checked + CHECK_S and not first:
            return
        loop = asyncio.get_running_loop()
        if task is None:
            threads = self._thread if fetch is None else self._fetchers
            task = loop.run_in_executor(threads, self._fetched, source, fetch)
            self._tasks[source] = task
            task.add_done_callback(lambda done: self._forget_task(source, done))
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        if not done:
            self._forget_task(source, task)
            self._note_fetched(source)
            await loop.run_in_executor(self._thread, self.refresh, source)

    def _forget_task(self, source: str, task: asyncio.Future[_Known]) -> None:
        if self._tasks.get(source) is task:
            del self._tasks[source]

    def _note_fetched(self, source: str) -> None:
        with self._lock:
            self._fetched_once[source] = None
            while len(self._fetched_once) > MOST_KNOWN:
                self._fetched_once.pop(next(iter(self._fetched_once)))

    def _fetched(self, source: str, fetch: Callable[[], None] | None) -> _Known:
        try:
            if fetch is not None:
                fetch()
            return self.refresh(source)
        finally:
            if fetch is not None:
                self._fetching.discard(source)
                self._note_fetched(source)

    def of(self, source: str) -> TextModel:
        """The text of the adapter with this source; CheckpointError: why it cannot be used. Reads files unless it was
        prepared."""
        with self._lock:
            known = self._known.pop(source, None)
            if known is not None:
                self._known[source] = known  # the last used comes last
        if known is None:
            known = self.refresh(source)
        if known.text is None:
            raise CheckpointError(known.problem)
        return known.text

    def refresh(self, source: str) -> _Known:
        """Look at the files, and read them if they are not known."""
        with self._reading:
            known, now = self._known.get(source), time.monotonic()
            try:
                folder = self._find(source)
                stamp = () if folder is None else _stamp(folder)
            except (OSError, PenstockError) as error:
                known = _Known(((-1, -1),), now, problem=str(error))  # no file has that stamp
            else:
                if known is None or known.stamp != stamp:
                    known = self._read(folder, stamp)
                known.checked = time.monotonic()
            with self._lock:
                self._known.pop(source, None)
                self._known[source] = known
                own = [name for name, each in self._known.items() if each.text is not self.base]
                for names, most in ((own, KEPT), (list(self._known), MOST_KNOWN)):
                    for name in names[: max(0, len(names) - most)]:
                        self._known.pop(name, None)
            return known

    def _read(self, folder: Path | None, stamp: Stamp) -> _Known:
        found = _Known(stamp, 0.0)
        if folder is None or not any(size for size, _ in stamp[: len(MOST_BYTES)]):
            found.text = self.base
            return found

        def read(path: Path) -> Tokenizer:
            found.digest = _digest(path)
            with self._lock:
                same = (known.tokenizer for known in self._known.values() if known.digest == found.digest)
                found.tokenizer = next((each for each in same if each is not None), None)
            found.tokenizer = found.tokenizer or read_tokenizer(path)
            return found.tokenizer

        try:
            found.text = adapter_text(folder, self.base, self._base_folder, read)
        except Exception as error:  # whatever is in the files: those who ask for this adapter are told
            problem = str(error) if isinstance(error, PenstockError) else f"its text cannot be read: {error!r}"
            found.problem = problem.replace(f"{folder}/", "")  # clients need not know where it is
            found.tokenizer = None
        return found


def _stamp(folder: Path) -> Stamp:
    """Changes when a file does."""
    found = []
    for name in (*MOST_BYTES, CONFIG, WEIGHTS):
        try:
            status = (folder / name).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)

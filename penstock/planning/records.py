"""Reading the package's data files and a user's own over them, with errors that name line, key and what is allowed.

Both hold named entries of known keys (devices, API prices, models). A user's file may change single keys of an entry
that is built in, and add entries of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from penstock.config.tree import Node, parse_yaml
from penstock.config.units import SIZE_HELP, parse_size
from penstock.errors import ConfigError


class Record:
    """The keys of one entry: each is taken once, by its type; what nobody took is unknown."""

    def __init__(self, name: str, node: Node) -> None:
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.origin}: {name}: expected keys and values, found {node.value!r:.80}")
        self.name = name
        self.origin = node.origin
        self._keys: dict[str, Node] = dict(node.value)
        self._taken: list[str] = []

    def _take(self, key: str) -> Node | None:
        self._taken.append(key)
        return self._keys.pop(key, None)

    def _wrong(self, node: Node, key: str, allowed: str) -> ConfigError:
        return ConfigError(f"{node.origin}: {self.name}.{key}: {allowed}, found {plain(node)!r:.80}")

    def _required(self, key: str, allowed: str) -> Node:
        node = self._take(key)
        if node is None or node.value is None:
            raise ConfigError(f"{self.origin}: {self.name}: {key} is needed: {allowed}")
        return node

    def text(self, key: str, default: str | None = None, choices: Iterable[str] = ()) -> str:
        known = list(choices)
        allowed = f"one of {', '.join(known)}" if known else "text"
        node = self._required(key, allowed) if default is None else self._take(key)
        if node is None:
            return default or ""
        value = str(node.value) if not isinstance(node.value, dict | list) else ""
        if not value or (known and value not in known):
            raise self._wrong(node, key, f"must be {allowed}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        node = self._take(key)
        if node is None:
            return ()
        if not isinstance(node.value, list) or any(isinstance(item.value, dict | list) for item in node.value):
            raise self._wrong(node, key, "must be a list of words")
        return tuple(str(item.value) for item in node.value)

    def number(self, key: str) -> float:
        """A number above 0."""
        allowed = "must be a number above 0"
        node = self._required(key, allowed)
        value = _number(node)
        if value is None or value <= 0:
            raise self._wrong(node, key, allowed)
        return value

    def price(self, key: str) -> float | None:
        """A number from 0 on; None where it is left out or null."""
        node = self._take(key)
        if node is None or node.value is None:
            return None
        value = _number(node)
        if value is None or value < 0:
            raise self._wrong(node, key, "must be US dollars, 0 or more, or null")
        return value

    def whole(self, key: str, default: int) -> int:
        node = self._take(key)
        if node is None:
            return default
        if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
            raise self._wrong(node, key, "must be a whole number from 1 on")
        return node.value

    def size(self, key: str) -> int:
        allowed = f"must be {SIZE_HELP}"
        node = self._required(key, allowed)
        try:
            size = parse_size(str(node.value))
        except ValueError:
            size = 0
        if size <= 0:
            raise self._wrong(node, key, allowed)
        return size

    def numbers(self, key: str, names: Iterable[str]) -> dict[str, float]:
        """Numbers above 0 by name, at least one."""
        known = list(names)
        allowed = f"must map one or more of {', '.join(known)} to a number above 0"
        node = self._required(key, allowed)
        if not isinstance(node.value, dict) or not node.value:
            raise self._wrong(node, key, allowed)
        found = {}
        for name, inner in node.value.items():
            value = _number(inner)
            if name not in known or value is None or value <= 0:
                raise ConfigError(f"{inner.origin}: {self.name}.{key}: {allowed}, found {name}: {plain(inner)!r:.40}")
            found[name] = value
        return found

    def inner(self, key: str) -> Record:
        """Keys one level down."""
        return Record(f"{self.name}.{key}", self._required(key, "keys and values"))

    def plain(self) -> dict[str, Any]:
        """All keys not taken so far, as plain values."""
        rest = {key: plain(node) for key, node in self._keys.items()}
        self._keys.clear()
        return rest

    def done(self) -> None:
        """ConfigError for the first key that was not taken."""
        for key, node in self._keys.items():
            near = get_close_matches(key, self._taken, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; keys are: {', '.join(self._taken)}"
            raise ConfigError(f"{node.origin}: {self.name}: there is no key {key!r:.60}{meant}")


def plain(node: Node) -> Any:
    """The value of a tree, without the origins."""
    if isinstance(node.value, dict):
        return {key: plain(inner) for key, inner in node.value.items()}
    if isinstance(node.value, list):
        return [plain(inner) for inner in node.value]
    return node.value


def _number(node: Node) -> float | None:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return float(value)


@cache
def built_in(name: str) -> Node:
    """A data file of this package."""
    file = resources.files("penstock.planning") / "data" / name
    return parse_yaml(file.read_text(encoding="utf-8"), name)


def read_tree(path: Path) -> Node:
    """A user's file."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def entries(tree: Node, section: str, sections: Iterable[str]) -> dict[str, Node]:
    """The named entries of a section; `sections`: all that a file may have."""
    known = list(sections)
    top = tree.value if isinstance(tree.value, dict) else None
    if top is None or not top.keys() <= set(known):
        unknown = "" if top is None else f", found {', '.join(sorted(top.keys() - set(known)))}"
        raise ConfigError(f"{tree.origin}: the file must have one or more of {', '.join(known)} at the top{unknown}")
    found = top.get(section)
    if found is None or found.value is None:
        return {}
    if not isinstance(found.value, dict):
        raise ConfigError(f"{found.origin}: {section} must hold names, each with its keys")
    return found.value


def merged(base: Mapping[str, Node], over: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """The entries of both; where a name is in both, the keys of `over` replace those of `base`, at every level."""
    for name, node in base.items():
        yield name, _over(node, over[name]) if name in over else node
    for name, node in over.items():
        if name not in base:
            yield name, node


def _over(base: Node, over: Node) -> Node:
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    return Node(dict(merged(base.value, over.value)), over.origin)


def find(name: str, known: Mapping[str, Any], aliases: Mapping[str, str], what: str, listing: str) -> str:
    """The entry that `name` means, in any case and with spaces or underscores for hyphens. Otherwise a ConfigError with
    the nearest names, and `listing`: how to see all."""
    wanted = canonical(name)
    for candidate in (wanted, aliases.get(wanted, "")):
        if candidate in known:
            return candidate
    near = get_close_matches(wanted, [*known, *aliases], 3, 0.5)
    within = [entry for entry in known if wanted and (wanted in entry or entry in wanted)]
    nearest = list(dict.fromkeys([*within, *(aliases.get(entry, entry) for entry in near)]))[:4]
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
    raise ConfigError(f"unknown {what} {name!r:.80}{hint}; {listing}")


def canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")

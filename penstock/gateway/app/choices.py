"""The values that a field may have, for the message that refuses another one.

Only requests that decoding has refused come here, so ordinary ones pay nothing. Describing a large type takes
milliseconds, in which the event loop would do nothing else, so it is done once for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

MOST = 40
"""Values that are listed; more would hide the message."""
_STEP = re.compile(r"(?P<name>[^.\[\]]+)|\[[^\]]*\]")


def choices(kind: Any, path: str) -> list[str]:
    """The strings that may stand at `path` (such as `messages[0].role`) of a body of type `kind`; none if they are not
    a fixed list, or a long one."""
    at, tags = list(_alternatives(_described(kind))), list[str]()
    for step in _STEP.finditer(path):
        name = step["name"]
        tags = [str(one.tag) for one in at if isinstance(one, inspect.StructType) and one.tag_field == name]
        at = [inner for one in at for inner in (_items(one) if name is None else _fields(one, name))]
    values = {value for one in at if isinstance(one, inspect.LiteralType) for value in one.values}
    values |= {member.value for one in at if isinstance(one, inspect.EnumType) for member in one.cls}
    found = sorted({*tags, *(value for value in values if isinstance(value, str))})
    return found if len(found) <= MOST else []


@functools.cache
def _described(kind: Any) -> inspect.Type:
    """Of the types that handlers decode, of which there are so many and no more."""
    return inspect.type_info(kind)


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
    elif isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    else:
        yield kind


def _fields(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _alternatives(field.type)


def _items(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield from _alternatives(kind.item_type)
    elif isinstance(kind, inspect.DictType):
        yield from _alternatives(kind.value_type)

"""The fields of every message between gateways and engines, for the test that neighbouring releases understand each
other. `python -m tests.protocol.schema > tests/protocol/messages_N.json` records a release, N being its version."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from typing import Any

import msgspec

from penstock.protocol import messages


def fields_of(kind: Any, found: dict[str, dict[str, str]]) -> None:
    """Adds a type, and those of its fields, to `found`: each field with its type and whether it must be there."""
    for part in typing.get_args(kind):
        fields_of(part, found)
    name = getattr(kind, "__name__", "")
    if isinstance(kind, type) and name not in found:
        if issubclass(kind, msgspec.Struct):
            described = [(one.encode_name, one.type, one.required) for one in msgspec.structs.fields(kind)]
        elif dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            described = [
                (one.name, hints[one.name], one.default is one.default_factory is dataclasses.MISSING)
                for one in dataclasses.fields(kind)
            ]
        else:
            return
        found[name] = {field: f"{'required' if needed else 'optional'} {of}" for field, of, needed in described}
        for _, of, _ in described:
            fields_of(of, found)


def schema() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    fields_of(messages.ToEngine, found)
    fields_of(messages.FromEngine, found)
    return found


if __name__ == "__main__":
    rows = (f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in sorted(schema().items()))
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")

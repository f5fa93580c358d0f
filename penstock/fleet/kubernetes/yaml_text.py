"""Objects as YAML, always in the same order, so that two versions of a file can be compared line by line."""

from __future__ import annotations

from typing import Any

import yaml

from penstock.fleet.kubernetes.parameters import Json


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Long texts as blocks; no aliases, which few people read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def dump(tree: Json) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20, default_flow_style=False)

"""Labels in the configuration: names and values that say where a model runs, and demands for such values.

Written as a mapping (`{region: eu, external: false}`); kept as pairs of text, which are hashable like every setting. In
a demand a value may be a list, of which one must hold; it is kept as `eu|ch`.
"""

from __future__ import annotations

import re
from typing import TypeAlias

LabelPairs: TypeAlias = tuple[tuple[str, str], ...]

LABEL_NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]{0,61}[A-Za-z0-9])?")
NAME_HELP = "a label's name has lower-case letters, digits and . _ - / (at most 63)"
VALUE_HELP = "a label's value has letters, digits and . _ - : / (at most 63)"
ALTERNATIVE = "|"
MOST_LABELS = 32


def label_problem(name: str, value: str) -> str:
    """What is wrong with one label; empty: nothing."""
    if not LABEL_NAME.fullmatch(name):
        return f"{NAME_HELP}, not {name[:80]!r}"
    return "" if LABEL_VALUE.fullmatch(value) else f"{VALUE_HELP}, not {value[:80]!r}"

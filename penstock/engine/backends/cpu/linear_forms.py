"""The ways to compute a linear on packed weights, and from how many rows on each of them is used.

The list is csrc/linear/forms.def, in order of preference: a call takes the first form that the instruction set has,
that takes the activations' dtype, and whose first number of rows is reached.
"""

from __future__ import annotations

import re
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from penstock.engine.backends.cpu.build import SOURCES

FormName = Literal["per_channel", "bfloat16", "per_group", "float16", "integer"]


@dataclass(frozen=True, slots=True)
class LinearForm:
    """One way to compute a linear."""

    name: FormName
    weights: str
    """The layout it reads: "packed" as loaded, or a second copy in "per_channel" int8."""
    activations: str
    """Their dtype, or "any"."""


def _described_forms() -> tuple[LinearForm, ...]:
    lines = re.findall(r"^PK_LINEAR_FORM\((\w+), (\w+), (\w+)\)", (SOURCES / "linear/forms.def").read_text(), re.M)
    return tuple(LinearForm(cast(FormName, name), weights, activations) for name, weights, activations in lines)


FORMS: Final = _described_forms()
_INDEX: Final = {form.name: index for index, form in enumerate(FORMS)}


class FirstRows:
    """From how many rows on a linear uses each form; 0 means never. `integer` is used where no other form is."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: Any = (c_int64 * len(FORMS))()
        """As `LinearArgs.first_rows`."""

    def __getitem__(self, form: FormName) -> int:
        rows: int = self.array[_INDEX[form]]
        return rows

    def __setitem__(self, form: FormName, rows: int) -> None:
        self.array[_INDEX[form]] = rows

    def only(self, form: FormName, rows: int = 1) -> None:
        """Use `form` from `rows` rows on, and no other but `integer`."""
        self.clear()
        self[form] = rows

    def clear(self) -> None:
        """Use `integer` for any number of rows."""
        self.array[:] = [0] * len(FORMS)

    def copy_from(self, other: FirstRows) -> None:
        self.array[:] = other.array[:]

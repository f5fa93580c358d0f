"""How model families write function calls, as data.

All of them write JSON objects with a name and arguments; they differ in what stands around them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from dataclasses import dataclass
from typing import Literal

FormatName = Literal["hermes", "smollm2", "llama3", "mistral"]
ToolFormatSetting = Literal["auto", "hermes", "smollm2", "llama3", "mistral"]

_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What stands around the JSON of function calls."""

    name: FormatName
    opener: str
    """What calls begin with."""
    closer: str = ""
    """What they end with; empty when they end with the message."""
    bare: bool = False
    """A message may also begin with the JSON itself, without the opener."""
    listed: bool = False
    """Calls are written as one JSON list; otherwise as one object after another."""
    arguments: str = "arguments"
    """The key under which arguments are written. (Both names are read.)"""
    before: str = ""
    after: str = ""
    """Between the opener, the JSON and the closer."""
    between: str = ", "
    """Between two calls."""
    short_ids: bool = False
    """Ids of calls are nine letters or digits."""

    def new_id(self) -> str:
        """An id for a call the model just made."""
        length = 9 if self.short_ids else 24
        mark = "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return mark if self.short_ids else f"call_{mark}"

    def known_id(self, given: str) -> str:
        """A client's id for an earlier call, in the form the model's template takes."""
        if not self.short_ids or _SHORT_ID.fullmatch(given):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:9]


FORMATS: dict[FormatName, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", before="\n", after="\n", between="\n"),
        ToolFormat("smollm2", "<tool_call>", "</tool_call>", listed=True),
        ToolFormat("llama3", "<|python_tag|>", bare=True, arguments="parameters", between="; "),
        ToolFormat("mistral", "[TOOL_CALLS]", listed=True, before=" ", short_ids=True),
    )
}


def detect(template: str) -> ToolFormat:
    """The format a chat template speaks of; the list form of SmolLM2 when it speaks of none."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return FORMATS["llama3"]
    return FORMATS["smollm2"]


def choose(setting: ToolFormatSetting, template: str) -> ToolFormat:
    """The configured format, or the one found in the template."""
    return detect(template) if setting == "auto" else FORMATS[setting]

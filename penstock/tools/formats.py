"""The formats in which model families write function calls, as data.

Most write JSON objects with a name and arguments, and differ in the surrounding text; some write names and arguments
between marks, Python calls, or keys and values in tags. Where a grammar holds a call, its arguments are JSON in any
format but DSML, whose tags say which values are text.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from dataclasses import dataclass
from typing import Literal

from penstock.tools.marked_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, SOLAR_OPEN, CallMarks
from penstock.tools.quoted_calls import QUOTE
from penstock.tools.xml_calls import DSML_TAGS, FUNCTION_TAGS, INVOKE_TAGS, Tags

FormatName = Literal[
    "hermes", "smollm2", "llama3", "mistral", "granite", "phi4", "pythonic", "glm45", "cohere", "command_r",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "qwen3_coder", "seed_oss", "minimax_m2",
    "lfm2", "hunyuan", "nemotron", "olmo3", "functools", "xlam", "glm4", "solar_open",
    "gemma4",
]  # fmt: skip
ToolFormatSetting = FormatName | Literal["auto"]

_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text around the JSON of function calls."""

    name: FormatName
    opener: str
    """Text before the calls."""
    closer: str = ""
    """Text after the calls; empty if they end with the message."""
    bare: bool = False
    """Whether a message may begin with the JSON itself, without the opener."""
    listed: bool = False
    """Whether calls are one JSON list; otherwise they are consecutive objects."""
    arguments: str = "arguments"
    """The key of the arguments when writing; both names are accepted when reading."""
    lead: str = ""
    """What usually stands before the opener."""
    before: str = ""
    after: str = ""
    """Separator between opener, JSON and closer."""
    between: str = ", "
    """Separator between two calls."""
    named: bool = False
    """Whether the function's name may also stand before its arguments, instead of in the JSON."""
    name_first: bool = False
    """Whether a message may begin with a name, a line break and the arguments; calls are written like that too."""
    also: tuple[str, ...] = ()
    """Other texts that the model writes in place of the opener."""
    name_key: str = "name"
    """The key of the name when writing; both names are accepted when reading."""
    syntax: Literal["json", "python", "tags", "quoted"] = "json"
    """What calls may be besides JSON."""
    marks: CallMarks | None = None
    """Of a format with marks around names and arguments; its calls are never an object with both."""
    tags: Tags | None = None
    """Of a format with tags around each argument."""
    short_ids: bool = False
    """Whether call ids must be nine letters or digits."""

    def new_id(self, seed: str = "") -> str:
        """An id for a new call: random, or always the same for a `seed`."""
        length = 9 if self.short_ids else 24
        if seed:
            digest = hashlib.sha256(seed.encode()).digest()
            mark = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:length])
        else:
            mark = "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return mark if self.short_ids else f"call_{mark}"

    def known_id(self, given: str) -> str:
        """A client's call id, converted to what the model's template accepts."""
        if not self.short_ids or _SHORT_ID.fullmatch(given):
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:9]

    def template_id(self, given: str, name: str, number: int) -> str:
        """The id that the template gets for a client's id, of the call with this `number` in the conversation."""
        if self.marks is not None and self.marks.numbered:
            return f"functions.{name}:{number}"
        return self.known_id(given)

    @property
    def without_opener(self) -> tuple[str, ...]:
        """What calls are also known by, where a model forgets the opener."""
        if self.marks is not None:
            return (self.marks.begin,)
        return () if self.tags is None else (self.tags.call,)

    @property
    def control(self) -> tuple[str, ...]:
        """Texts other than the opener that the format consists of, and that may be control tokens."""
        if self.marks is not None:
            return (self.closer, self.marks.begin, self.marks.end, *self.marks.inner)
        if self.tags is not None:
            return (self.closer, *self.tags.inner)
        if self.syntax == "quoted":
            return (self.closer, QUOTE)
        return (self.closer,) if self.syntax == "python" and not self.bare else ()


FORMATS: dict[FormatName, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", before="\n", after="\n", between="\n"),
        ToolFormat("smollm2", "<tool_call>", "</tool_call>", listed=True),
        ToolFormat("llama3", "<|python_tag|>", bare=True, arguments="parameters", between="; "),
        ToolFormat("mistral", "[TOOL_CALLS]", listed=True, before=" ", named=True, short_ids=True),
        ToolFormat("granite", "<|tool_call|>", listed=True),
        ToolFormat("phi4", "<|tool_call|>", "<|/tool_call|>", listed=True, also=("functools",)),
        ToolFormat("functools", "functools", listed=True),
        ToolFormat("hunyuan", "<tool_calls>", "</tool_calls>", listed=True),
        ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", listed=True),
        ToolFormat("glm4", "<|assistant|>", bare=True, between="\n", name_first=True),
        ToolFormat("xlam", "<tool_call>", "</tool_call>", bare=True, listed=True),
        ToolFormat(
            "pythonic",
            "<|python_start|>",
            "<|python_end|>",
            bare=True,
            arguments="parameters",
            between="; ",
            syntax="python",
        ),
        ToolFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", listed=True, syntax="python"),
        ToolFormat("olmo3", "<function_calls>", "</function_calls>", between="\n", syntax="python"),
        ToolFormat("gemma4", "<|tool_call>", "<tool_call|>", between="", syntax="quoted"),
        ToolFormat("glm45", "<tool_call>", "</tool_call>", after="\n", between="\n", syntax="tags"),
        ToolFormat(
            "cohere", "<|START_ACTION|>", "<|END_ACTION|>", listed=True, arguments="parameters", name_key="tool_name"
        ),
        ToolFormat(
            "command_r",
            "Action: ```json",
            "```",
            listed=True,
            arguments="parameters",
            name_key="tool_name",
            before="\n",
            after="\n",
        ),
        ToolFormat("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", between="\n", marks=DEEPSEEK_V3),
        ToolFormat("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", between="", marks=DEEPSEEK_V31),
        ToolFormat(
            "deepseek_v32",
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            lead="\n\n",
            before="\n",
            after="\n",
            between="\n",
            tags=DSML_TAGS,
        ),
        ToolFormat(
            "deepseek_v4",
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            lead="\n\n",
            before="\n",
            after="\n",
            between="\n",
            tags=DSML_TAGS,
        ),
        ToolFormat("solar_open", "<|tool_calls|>", "<|calls|>", between="", marks=SOLAR_OPEN),
        ToolFormat("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", between="", marks=KIMI_K2),
        ToolFormat(
            "qwen3_coder", "<tool_call>", "</tool_call>", before="\n", after="\n", between="\n", tags=FUNCTION_TAGS
        ),
        ToolFormat(
            "seed_oss",
            "<seed:tool_call>",
            "</seed:tool_call>",
            before="\n",
            after="\n",
            between="\n",
            tags=FUNCTION_TAGS,
        ),
        ToolFormat(
            "minimax_m2",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            before="\n",
            after="\n",
            between="\n",
            tags=INVOKE_TAGS,
        ),
    )
}


def detect(template: str) -> ToolFormat:
    """The format that a chat template mentions; by default the list format of SmolLM2."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|tool_call_start|>" in template or "<|tool_list_start|>" in template:
        return FORMATS["lfm2"]
    if "<|tool_call>" in template:
        return FORMATS["gemma4"]
    if "<arg_key>" in template:
        return FORMATS["glm45"]
    if "｜DSML｜" in template and ("function_calls" in template or "tool_calls>" in template):
        return FORMATS["deepseek_v32" if "function_calls" in template else "deepseek_v4"]
    if "<｜tool▁calls▁begin｜>" in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if any(
        mark in template
        for mark in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|im_system|>tool_declare")
    ):
        return FORMATS["kimi_k2"]
    if "<TOOLCALL>" in template:
        return FORMATS["nemotron"]
    if "<function_calls>" in template:
        return FORMATS["olmo3"]
    if "<tool_calls>" in template and "<tool_sep>" not in template:
        return FORMATS["hunyuan"]
    if "functools[" in template:
        return FORMATS["functools"]
    if "single JSON array" in template and '"name": "tool_call_name"' in template.replace("\\", ""):
        return FORMATS["xlam"]
    if "可用工具" in template and "<arg_key>" not in template:
        return FORMATS["glm4"]
    if "<|tool_call:begin|>" in template:
        return FORMATS["solar_open"]
    if "<seed:tool_call>" in template:
        return FORMATS["seed_oss"]
    if "<minimax:tool_call>" in template:
        return FORMATS["minimax_m2"]
    if "<function=" in template and "<parameter=" in template:
        return FORMATS["qwen3_coder"]
    if "<|tool|>" in template and "<|/tool|>" in template:
        return FORMATS["phi4"]
    if "<|tool_call|>" in template:
        return FORMATS["granite"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|START_ACTION|>" in template:
        return FORMATS["cohere"]
    if "Action:" in template and "```json" in template:
        return FORMATS["command_r"]
    if any(mark in template for mark in ("<|python_start|>", "<|header_start|>", "[func_name1(")):
        return FORMATS["pythonic"]
    if "List of tools: [" in template:
        return FORMATS["lfm2"]  # the later templates show no calls
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return FORMATS["llama3"]
    return FORMATS["smollm2"]


def choose(setting: ToolFormatSetting, template: str) -> ToolFormat:
    """The configured format, or the one found in the template."""
    return detect(template) if setting == "auto" else FORMATS[setting]

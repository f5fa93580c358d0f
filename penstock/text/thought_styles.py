"""How model families mark their thoughts, as data: what stands before a thought, between it and the answer, and around
the answer.

The chat template tells the style (`detect`); `models[N].reasoning` may name another. A model whose template mentions
no marks does not think, as far as is known here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

StyleName = Literal[
    "think",
    "deepseek_r1",
    "granite",
    "granite33",
    "hunyuan",
    "mistral",
    "seed_oss",
    "kimi",
    "cohere",
    "solar_open",
    "gemma4",
    "gpt_oss",
]
ReasoningSetting = StyleName | Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """The marks of one family. Of several spellings the first is the usual one."""

    name: StyleName
    begin: tuple[str, ...]
    end: tuple[str, ...]
    begun: bool = False
    """An answer begins with the thought, also where neither it nor the prompt shows the beginning."""
    title: str = ""
    """What a thought begins with that is no part of it."""
    header: str = ""
    """What the model writes between a thought and the answer where these are messages of their own."""
    stops: tuple[str, ...] = ()
    """Control tokens that end an answer where the one behind each message does not."""
    answer_begin: str = ""
    """What stands before and after the answer, where the model marks that too."""
    answer_end: str = ""
    before_end: str = "\n"
    """What usually stands between a thought and its end, and behind the end; where a thought is cut off, these are
    written."""
    after_end: str = "\n\n"

    @property
    def channels(self) -> bool:
        """Whether an answer is several messages with headers (gpt-oss)."""
        return self.name == "gpt_oss"


STYLES: dict[StyleName, ThoughtStyle] = {
    style.name: style
    for style in (
        ThoughtStyle("think", ("<think>",), ("</think>",)),
        ThoughtStyle("deepseek_r1", ("<think>",), ("</think>",), begun=True),
        ThoughtStyle(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            before_end="\n\n",
        ),
        ThoughtStyle("granite33", ("<think>",), ("</think>",), answer_begin="<response>", answer_end="</response>"),
        ThoughtStyle("hunyuan", ("<think>",), ("</think>",), answer_begin="<answer>", answer_end="</answer>"),
        ThoughtStyle("mistral", ("[THINK]",), ("[/THINK]",), before_end="", after_end=""),
        ThoughtStyle("seed_oss", ("<seed:think>",), ("</seed:think>",), after_end=""),
        ThoughtStyle("kimi", ("◁think▷",), ("◁/think▷",)),
        ThoughtStyle(
            "cohere",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            answer_begin="<|START_RESPONSE|>",
            answer_end="<|END_RESPONSE|>",
            before_end="",
            after_end="",
        ),
        ThoughtStyle(
            "solar_open",
            ("<|think|>",),
            ("<|end|>",),
            header="<|begin|>assistant",
            stops=("<|flush|>", "<|calls|>"),
            answer_begin="<|content|>",
            answer_end="<|end|>",
            before_end="",
            after_end="<|begin|>assistant",
        ),
        ThoughtStyle("gemma4", ("<|channel>",), ("<channel|>",), title="thought", after_end=""),
        ThoughtStyle("gpt_oss", ("<|channel|>analysis<|message|>",), ("<|end|>",), before_end="", after_end=""),
    )
}


_HUNYUAN = ("<|extra_0|>", "hy_Assistant")
"""Marks of messages in Hunyuan's templates."""
_RESULTS = ("<minimax:tool_call>",)
"""Marks of templates that have results of functions, not answers, in `<response>`."""


@functools.lru_cache(maxsize=64)
def detect(template: str) -> ThoughtStyle | None:
    """The style that a chat template mentions; None: it mentions no thoughts."""
    if "<|channel|>" in template and "<|message|>" in template:
        return STYLES["gpt_oss"]
    if "<|think|>" in template and "<|content|>" in template:
        return STYLES["solar_open"]
    for style in STYLES.values():
        if (
            style.begin[0] != "<think>"
            and not style.channels
            and not style.header
            and any(mark in template for mark in style.begin + style.end)
        ):
            return style
    if "<think>" not in template and "</think>" not in template:
        return None
    if any(mark in template for mark in _HUNYUAN):
        return STYLES["hunyuan"]  # most of its templates do not show answers as the model writes them
    if any(mark in template for mark in _RESULTS):
        return STYLES["think"]
    for style in (STYLES["granite33"], STYLES["hunyuan"]):
        if style.answer_begin in template and style.answer_end in template:
            return style
    return STYLES["think"]


def choose(setting: ReasoningSetting, template: str) -> ThoughtStyle | None:
    """The configured style, or the one found in the template; None: thoughts are not told apart."""
    if setting == "off":
        return None
    return detect(template) if setting == "auto" else STYLES[setting]

"""The grammar of an answer behind a thought whose marks are no tokens of the vocabulary: the thought is part of it.

A mark that is ordinary text may end inside a token, together with the beginning of the answer. Only a grammar over
bytes knows where the answer begins then, so it describes both.
"""

from __future__ import annotations

from penstock.text.grammars import Grammar, Part, literal
from penstock.text.thought_styles import ThoughtStyle


def behind_thought(answer: Grammar, style: ThoughtStyle, *, begun: bool) -> Grammar:
    """Any thought, then `answer`. `begun`: the prompt has begun the thought; otherwise there may be none."""
    behind = "thought SPACE? @said"
    if style.answer_begin:
        behind = f"thought SPACE? ({literal(style.answer_begin)} SPACE?)? @said"
    rules = [
        "ANYTHING: /(?s:.*)/",
        r"SPACE: /[ \t\n]{1,8}/",
        f"END: {' | '.join(map(literal, style.end))}",
        "thought[lazy]: ANYTHING END",
        f"start: {behind}",
    ]
    if not begun:
        rules[-1] = f"start: BEGIN {behind} | @said"
        rules.append(f"BEGIN: {' | '.join(map(literal, style.begin))}")
    top: Part = {"name": "thinking", "lark_grammar": "\n".join(rules)}
    start = None if answer.json_start is None else style.end[0]
    return Grammar((top, *answer.named("said").parts), start, answer.unenforced)

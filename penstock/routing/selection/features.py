"""Surface features of a question: length, and marks of code, mathematics, reasoning and demanding answers.

Pure and fast (well under a millisecond for a usual question), because a router must not cost more than it saves.
Nothing is guessed: a text without marks that is too short to show any is flagged as `low_signal`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

_LOOKED_AT: Final = 16_384
"""Characters searched for marks, half from each end; the length counts all of the text."""
_FEW_WORDS: Final = 4

_CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+[(:{]|\bfunction\b.*[({]|=>|\bimport \w+|#include|\bSELECT\b.+\bFROM\b|</\w+>|"
    r"\w+\(\)|\b(?:python|javascript|typescript|rust|golang|c\+\+|java|kotlin|sql|bash|regex|regular expression|"
    r"html|css|kubernetes|dockerfile|docker|git|api|json|yaml|stack ?trace|traceback|segfault|null pointer|"
    r"unit tests?|refactor|debug|compile[rs]?|algorithm|function|script|query|endpoint|async|mutex|deadlock|"
    r"race condition|big-?o|data structure|linked list|hash ?(?:map|table)|binary (?:tree|search|heap)|recursion|"
    r"program|component|react|numpy|cuda|kernel|redis|lua|postgres\w*|parser|decorator|cache|threads?|migration|"
    r"pipeline|workflow|code)\b",
    re.IGNORECASE,
)
_MATHS = re.compile(
    r"\d\s*[-+*/^=<>]\s*\d|\bx\s*[\^²]|[∑∫√≤≥≠π]|\\(?:frac|sum|int|sqrt)|\b(?:integral|derivative|differentiate|"
    r"integrate|equation|solve for|theorem|proof|prove|matrix|eigen\w*|probability|permutations?|combinations?|"
    r"logarithm|polynomial|quadratic|prime|modulo|vectors?|geometry|triangle|calculus|algebra|limit of|"
    r"expected value|variance|standard deviation|percent(?:age)? of|how many|how fast|average speed|interest|"
    r"compound|square root|cube root|squared|remainder|factorial|integer solutions?|coin flips?|dice|die|bayes|"
    r"km/h|m/s|minimi[sz]e|maximi[sz]e|derive|accurate)\b",
    re.IGNORECASE,
)
_REASONING = re.compile(
    r"\b(?:why (?:does|do|did|is|are|would|might|could)|step by step|reason(?:ing)? (?:through|about)|"
    r"trade-?offs?|compare|contrast|analy[sz]e|analysis|evaluate|critique|argue|arguments? (?:for|against)|"
    r"implications?|consequences|root cause|diagnose|strategy|plan(?:ning)? (?:for|to|a)|design (?:a|an|the)|"
    r"architect\w*|pros and cons|hypothes[ie]s|infer|deduce|logic(?:al)?|puzzle|riddle|if .+ then|suppose|"
    r"assume that|what would happen|explain (?:how|why|the)|justify|prioriti[sz]e|rank|weigh|forecast|estimate|"
    r"paradox|theor(?:y|ies)|risks|flaw|work out|find out why|which .+ would you|under .+ law|in terms of|"
    r"falsif\w+|causal|evidence|should an?)\b",
    re.IGNORECASE,
)
_LONG_ANSWER = re.compile(
    r"\b(?:essay|article|report|whitepaper|in[- ]depth|detailed|comprehensive|thorough|full (?:guide|plan|"
    r"implementation)|complete (?:guide|program|implementation)|tutorial|chapter|(?:\d{3,}|one thousand|"
    r"two thousand)[- ]words?|curriculum|business plan|specification|proposal|with examples|for each of|(?:create|"
    r"draft|compose|prepare|produce) (?:a|an|the)?|handbook|manual|speech|screenplay|campaign|policies|letter to|"
    r"literature review|novel|scene|\w+ pages|for two weeks|month by month|poem into|rhyme scheme)\b",
    re.IGNORECASE,
)
_CONSTRAINT = re.compile(
    r"\b(?:must|exactly|at least|at most|without using|only if|unless|ensure|guarantee|constraint|no more than|"
    r"edge cases?|handle errors?)\b",
    re.IGNORECASE,
)

_BRIEF = re.compile(
    r"\b(?:short(?:er|en)?|brief(?:ly)?|one[- ](?:sentence|line|word|keyword)|two[- ]lines?|in one|tweet|caption|"
    r"subject line|title|synonym|rewrite|reword|fix the|correct the|translate (?:to|into)|stand for|extension|"
    r"bullet list|reply that)\b",
    re.IGNORECASE,
)
_LOOKUP = re.compile(
    r"\s*(?:what(?:'s| is| are| does| do| can| should| goes)|who|when|where|which|name|is|are|in which|how (?:do|"
    r"tall|long|often|many|warm|do you)|can i|does|say|give (?:me|the|one))\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True, slots=True)
class Features:
    """Counts, not judgements."""

    words: int
    code: int
    maths: int
    reasoning: int
    long_answer: int
    constraints: int
    questions: int
    brief: bool
    """It asks for a short answer or a small change."""
    lookup: bool
    """A short question for a fact."""
    wanted_tokens: int
    """The request's limit of output tokens; 0: not given."""

    @property
    def low_signal(self) -> bool:
        marks = self.code + self.maths + self.reasoning + self.long_answer + self.constraints
        return marks == 0 and self.words < _FEW_WORDS

    def vector(self) -> list[float]:
        """The features for a classifier: capped counts, length in units of 100 words."""
        scale = {"words": 100.0, "wanted_tokens": 1000.0}
        return [min(getattr(self, one.name) / scale.get(one.name, 1.0), 5.0) for one in fields(self)]


def read(text: str, wanted_tokens: int = 0) -> Features:
    """The features of a question."""
    words = len(text.split())
    if len(text) > _LOOKED_AT:
        text = f"{text[: _LOOKED_AT // 2]}\n{text[-_LOOKED_AT // 2 :]}"
    return Features(
        words,
        _count(_CODE, text),
        _count(_MATHS, text) + (len(_NUMBER.findall(text)) >= 3),
        _count(_REASONING, text),
        _count(_LONG_ANSWER, text),
        _count(_CONSTRAINT, text),
        text.count("?"),
        _BRIEF.search(text) is not None,
        words <= 12 and _LOOKUP.match(text) is not None,
        wanted_tokens,
    )


def _count(pattern: re.Pattern[str], text: str) -> int:
    """The number of different marks: a repeated word counts once."""
    return len({found.group().lower() for found in pattern.finditer(text)})

"""Parses a question for comparison: numbers, negations, kind, and topic words in order. Text only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.caching.lexicon import (
    DIRECTIONS,
    FRAMES,
    NEGATIONS,
    NUMBER_WORDS,
    ONE_OF_A_KIND,
    ORDINALS,
    OVERLOOKED,
    SAME,
)

_FRAMES = tuple((re.compile(pattern), plain) for pattern, plain in FRAMES)
_QUOTED = re.compile(
    r"`[^`]+`|\"[^\"]+\"|“[^”]+”|https?://\S+|(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}\.[\w.]{1,64}|(?<!\w)[~/][\w./-]{2,}"
)
_TOKEN = re.compile(r"0x[0-9a-f]+|#?\d[\d,]*(?:\.\d+)*(?:st|nd|rd|th|%)?|[^\W\d_][\w+#-]*|[€$£¥%]", re.IGNORECASE)
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_ENDINGS = (
    ("isation", "iz"), ("ization", "iz"), ("ising", "iz"), ("izing", "iz"), ("ised", "iz"), ("ized", "iz"),
    ("ise", "iz"), ("ize", "iz"), ("our", "or"), ("tre", "ter"),
)  # fmt: skip
_SIGNS = {"%": "percent", "€": "euro", "$": "dollar", "£": "sterling", "¥": "yen"}
_WHICH = ("who", "whom", "whose", "when", "where", "why", "how")
_YES_NO = frozenset(
    ("is", "are", "was", "were", "am", "do", "does", "did", "can", "could", "should", "will", "would", "has", "have",
     "had", "may", "might", "must", "shall")
)  # fmt: skip
_SHORT = {"can't": "can not", "won't": "will not", "shan't": "shall not"}
_OWNERS = {"my": "mine", "our": "mine", "mine": "mine", "your": "yours", "his": "his", "her": "hers", "their": "theirs"}


@dataclass(frozen=True, slots=True)
class Word:
    """One topic word of a question."""

    concept: str
    """Equal for synonyms."""
    stem: str
    name: bool
    """A name, or a word for one of several alternatives: it has no synonyms."""


@dataclass(frozen=True, slots=True)
class ParsedQuestion:
    numbers: tuple[str, ...]
    negations: int
    kind: str
    """who, when, where, why, how, yes (a question to be answered by yes or no) or empty."""
    owners: frozenset[str]
    literals: tuple[str, ...]
    """Quoted text, addresses, paths."""
    words: tuple[Word, ...]
    directed: bool
    """Whether the order of its words matters."""


def parse_question(text: str) -> ParsedQuestion:
    """Parses a question."""
    text = text.replace("’", "'").replace("‘", "'")
    literals = tuple(match.group() for match in _QUOTED.finditer(text))
    text = _QUOTED.sub(" ", text)
    names = _names(text)
    plain = _plain(text.lower())
    numbers: list[str] = []
    words: list[Word] = []
    negations = 0
    tokens = _TOKEN.findall(plain)
    for token in tokens:
        if token in NEGATIONS:
            negations += 1
        elif (number := _number(token)) is not None:
            numbers.append(number)
            if token.endswith("%"):
                words.append(Word("percent", "percent", True))
        elif token in _SIGNS:
            words.append(Word(_SIGNS[token], _SIGNS[token], True))
        elif token not in OVERLOOKED or token in names:
            words.append(_word(token, token in names))
    return ParsedQuestion(
        tuple(numbers),
        negations,
        _kind(tokens),
        frozenset(_OWNERS[token] for token in tokens if token in _OWNERS),
        literals,
        tuple(words),
        any(token in DIRECTIONS for token in tokens),
    )


def stem(word: str) -> str:
    """The word without its inflection; British and American spellings are unified."""
    word = word.removesuffix("'s").removesuffix("'")
    if len(word) > 4 and word.endswith("ies"):
        word = word[:-3] + "y"
    elif len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes", "zes")):
        word = word[:-2]
    elif len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    if len(word) > 4:
        for ending, plain in _ENDINGS:
            if word.endswith(ending):
                return word.removesuffix(ending) + plain
        for ending in ("ing", "ed"):
            root = word.removesuffix(ending)
            if root != word and len(root) > 2 and re.search("[aeiouy]", root):
                doubled = len(root) > 3 and root[-1] == root[-2] and root[-1] not in "sl"
                return (root[:-1] if doubled else root).removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word


def _word(token: str, name: bool) -> Word:
    root = stem(token)
    if name and root not in _ALTERNATIVES:
        return Word(token, token, True)
    concept = stem(SAME[token]) if token in SAME else _CONCEPTS.get(root, root)
    return Word(concept, root, token in ONE_OF_A_KIND or root in _ALTERNATIVES or concept in _ALTERNATIVES)


def _plain(text: str) -> str:
    text = re.sub(
        r"\b(ca|wo|sha)n't\b", lambda match: {"ca": "can", "wo": "will"}.get(match[1], "shall") + " not", text
    )
    text = re.sub(r"n't\b", " not", text)
    text = re.sub(r"\b(what|who|where|how|when|it|that|there)'s\b", r"\1 is", text)
    text = re.sub(r"'(re|ve|ll|d|m)\b", " ", text)
    text = re.sub(r"'s\b|s'(?=\s)", " ", text)
    text = text.replace("km/h", "kmh")
    for pattern, plain in _FRAMES:
        text = pattern.sub(plain, text)
    return text


def _number(token: str) -> str | None:
    if token in NUMBER_WORDS:
        return NUMBER_WORDS[token]
    if token in ORDINALS:
        return ORDINALS[token]
    if ordinal := _ORDINAL.fullmatch(token):
        return f"#{ordinal[1]}"
    if token[0].isdigit() or token[0] == "#":
        return token.rstrip("%").replace(",", "").lstrip("#")
    return None


def _kind(tokens: list[str]) -> str:
    for token in tokens:
        if token in _WHICH:
            return "who" if token.startswith("who") else token
        if token in ("what", "which"):
            return ""
    return "yes" if tokens and tokens[0] in _YES_NO else ""


def _names(text: str) -> frozenset[str]:
    """Words, in lower case, that are capitalised inside a sentence or contain capitals or digits."""
    found = set()
    begins = True
    for match in re.finditer(r"[^\W_][\w+#-]*|[.!?:;]", text):
        word = match.group()
        if word in ".!?:;":
            begins = True
            continue
        inner = any(letter.isupper() or letter.isdigit() for letter in word[1:])
        alone = len(word) == 1 and word.isupper() and word != "I" and not begins
        if inner or alone or (word[0].isupper() and not begins and word != "I"):
            found.add(word.lower())
        begins = False
    return frozenset(found)


_CONCEPTS = {stem(word): stem(group) for word, group in SAME.items()}
_ALTERNATIVES = ONE_OF_A_KIND | frozenset(stem(word) for word in ONE_OF_A_KIND)

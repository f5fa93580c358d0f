"""How a sequence moves on by the tokens it was given: in its grammar, its token rules and its thought, up to its end.

All of it depends on the tokens delivered alone, so a sequence that comes from elsewhere (`Request.produced`) is brought
to its place by the same functions.
"""

from __future__ import annotations

from penstock.engine.grammar.interface import TokenMatcher
from penstock.engine.grammar.thought import ThoughtState
from penstock.engine.grammar.token_rules import TokenRules
from penstock.engine.request import GRAMMAR_REFUSED, FinishReason
from penstock.engine.sequence import Sequence


def begin(seq: Sequence, grammar: TokenMatcher | None, vocab_size: int) -> str | None:
    """Give a sequence its grammar, token rules and thought, at the place in them that its tokens have reached; what is
    wrong, when they cannot be followed."""
    params, produced = seq.params, seq.request.produced
    waits = params.thought is not None and not params.thought.within
    rules = TokenRules(params, vocab_size, None if waits else grammar) if params.ruled else None
    if params.thought is None:
        seq.matcher = grammar if rules is None else rules
        return next(filter(None, (advance(seq, token) for token in produced)), None)
    seq.thought = ThoughtState(params.thought, rules, grammar)
    problem = think(seq, produced)
    follow(seq)
    return problem


def append(seq: Sequence, tokens: list[int]) -> FinishReason | None:
    """Add sampled tokens, up to one that ends the sequence; those behind it are dropped. Why it ends, if it does."""
    stops, limit, matcher = seq.params.stop_token_ids, seq.limit, seq.matcher
    for count, token in enumerate(tokens, start=1):
        seq.tokens.append(token)
        reason: FinishReason | None = None
        if token in stops:
            reason = "stop"
        elif matcher is not None and matcher.complete:
            reason = "complete"
        elif len(seq.tokens) >= limit:
            reason = "length"
        if reason is not None:
            del tokens[count:]
            return reason
    return None


def advance(seq: Sequence, token: int) -> str | None:
    """Move on in the sequence's grammar; what is wrong, when it cannot be followed."""
    assert seq.matcher is not None
    if seq.matcher.error is None and token not in seq.params.stop_token_ids:
        seq.matcher.accept(token)
    return None if seq.matcher.error is None else f"{GRAMMAR_REFUSED}: {seq.matcher.error}"


def think(seq: Sequence, tokens: list[int]) -> str | None:
    """Move on in the sequence's thought, and in what follows it; what is wrong, when that cannot be followed."""
    assert seq.thought is not None
    for token in tokens:
        if token not in seq.params.stop_token_ids:
            if seq.thought.over:
                seq.matcher = seq.thought.matcher
                if seq.matcher is None:
                    return None
                if (problem := advance(seq, token)) is not None:
                    return problem
            else:
                seq.thought.accept(token)
    return None if seq.thought.error is None else f"{GRAMMAR_REFUSED}: {seq.thought.error}"


def follow(seq: Sequence) -> None:
    """What the next step of a thinking sequence has to observe."""
    assert seq.thought is not None
    thought, free = seq.thought, seq.matcher is None
    seq.matcher, seq.hold = thought.matcher, thought.hold(len(seq.tokens))
    if thought.over:
        seq.thought = None
    if free != (seq.matcher is None) or seq.thought is None:
        seq.row_version += 1  # the flags of its row change

"""Which guesses hold.

The step that verifies guesses draws a token behind the last real token and behind every guess, each exactly as the
plain engine would draw it there: same logits, same filters and penalties, same noise, since noise is a hash of (seed,
position). The first draw is therefore the next token, whatever was guessed. If it equals the first guess, the second
draw was made behind the right text and is the token after it; and so on. The first draw that differs from its guess is
still right, because everything before it was. So nothing is ever resampled, and the text is the one the plain engine
would have written, token for token, for greedy and for sampled requests alike.
"""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many leading guesses were drawn; `drawn[i]` stands where `drafts[i]` was guessed."""
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return count

"""Which draft tokens are accepted.

The step that verifies draft tokens samples behind the last real token and behind every draft token, each exactly as the
plain engine would: same logits, same filters and penalties, same noise, since noise is a hash of (seed, position). The
first sample is therefore the next token, whatever was drafted. If it equals the first draft token, the second sample
was made behind the right text and is the token after it; and so on. The first sample that differs from its draft token
is still right, because everything before it was. So nothing is ever resampled, and the text is the one the plain engine
would have generated, token for token, for greedy and for sampled requests alike.
"""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading draft tokens were sampled; `sampled[i]` is at the position of `drafts[i]`."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return count

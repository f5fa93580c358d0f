"""Settings of what happens between a user's question and the model: conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class ConversationsConfig:
    """Histories kept by session id, for clients that send only what is new."""

    url: str = setting(
        "", doc="redis://HOST:PORT; the store when empty; off: none are kept, and `conversation` is refused."
    )
    ttl_s: float = setting(3600.0, doc="Seconds after its last turn that a conversation is forgotten.", least=1)
    overflow: Literal["truncate", "summarise"] = setting(
        "truncate", doc="What becomes of the oldest turns that do not fit: left out, or condensed by the model."
    )
    keep_turns: int = setting(2, doc="Newest turns that stay as they are, if they fit at all.", least=1)
    reply_tokens: int = setting(
        512, doc="Tokens kept free for an answer without `max_tokens`; at most a quarter of the window.", least=1
    )
    note_tokens: int = setting(
        160, doc="Longest note on condensed turns; all notes together take at most a quarter of the window.", least=16
    )
    max_bytes: int = setting(
        2**20, doc="Largest history; beyond it the oldest turns are forgotten.", least=1024, size=True
    )
    per_user: int = setting(1000, doc="Conversations a user has at most; those used longest ago go first.", least=1)
    wait_s: float = setting(
        10.0, doc="Seconds a turn waits for the one before it in the same conversation before it gets 409.", least=0
    )

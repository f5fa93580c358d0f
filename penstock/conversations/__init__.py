"""Conversations by session id: what was said, kept for a while, and fitted into a model's window when it outgrows it.

Nothing here knows HTTP or an engine. Messages are the flat dictionaries that chat templates read.
"""

from penstock.conversations.conversation import Conversation, Message, Owner, Summary, Turn
from penstock.conversations.sessions import Busy, Held, Sessions
from penstock.conversations.store import ConversationStore, Listed, Stored

__all__ = [
    "Busy",
    "Conversation",
    "ConversationStore",
    "Held",
    "Listed",
    "Message",
    "Owner",
    "Sessions",
    "Stored",
    "Summary",
    "Turn",
]

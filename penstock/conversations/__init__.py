"""Conversations by session id: their history, kept for a while and fitted into a model's context window.

Nothing here knows HTTP or an engine. Messages are the flat dictionaries that chat templates read.
"""

from penstock.conversations.conversation import Conversation, Message, Owner, Summary, Turn
from penstock.conversations.sessions import HeldConversation, SessionBusy, Sessions
from penstock.conversations.store import ConversationStore, ListedConversation, StoredConversation

__all__ = [
    "Conversation",
    "ConversationStore",
    "HeldConversation",
    "ListedConversation",
    "Message",
    "Owner",
    "SessionBusy",
    "Sessions",
    "StoredConversation",
    "Summary",
    "Turn",
]

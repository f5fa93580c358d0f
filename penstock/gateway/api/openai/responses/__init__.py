"""The Responses API: what it takes, how that becomes a conversation, what it answers, what it remembers."""

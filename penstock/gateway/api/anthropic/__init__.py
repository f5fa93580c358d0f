"""The Messages API: what it takes, how that becomes a chat request, what it answers."""

"""The Responses API: its requests, their translation to chat requests, its objects and its store."""

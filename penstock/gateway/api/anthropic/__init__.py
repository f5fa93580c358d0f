"""The Messages API: its requests, their translation to chat requests, and its objects."""

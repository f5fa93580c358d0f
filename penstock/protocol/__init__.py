"""The protocol between gateway, engine and supervisor, and the errors that a client may see."""

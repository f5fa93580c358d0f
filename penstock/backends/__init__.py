"""Clients of what runs requests: engines over ZeroMQ, encoder engines, and remote OpenAI-compatible servers."""

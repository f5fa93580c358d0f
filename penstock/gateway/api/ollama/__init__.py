"""Ollama's API, over the same pipeline as the others."""

"""Chunk stores: a SQLite file per collection with a vector index beside it, or PostgreSQL tables."""

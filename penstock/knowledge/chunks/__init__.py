"""Where the chunks of a collection are: its own SQLite file with a vector index beside it, or PostgreSQL tables."""

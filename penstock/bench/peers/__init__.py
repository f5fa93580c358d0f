"""Other inference engines on the same machine."""

"""The process tree of one machine: a gateway, an engine per model, and the one who starts and restarts them."""

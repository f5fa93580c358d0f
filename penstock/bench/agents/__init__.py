"""`penstock bench agents`: load by conversations as agents have them, on any OpenAI-compatible server."""

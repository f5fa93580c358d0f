"""From the model a client names to the backend that runs it."""

"""What a router can talk to: engines behind ZeroMQ, an engine in this process, later any OpenAI server."""

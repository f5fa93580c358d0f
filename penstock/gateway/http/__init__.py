"""HTTP/1.1 for the gateway: what bytes of a connection become requests, and how answers become bytes."""

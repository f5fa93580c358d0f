"""A well-behaved tenant's latency while another tenant, or somebody without a key, attacks the server."""

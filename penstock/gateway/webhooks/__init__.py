"""Webhooks: tenants are told when responses in the background and batches end."""

"""Fetching models and adapters: from a folder, a hub, a package index or an object store, into the model cache."""

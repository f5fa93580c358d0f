"""Collections of documents that answers can be drawn from: read, cut, embed, store, search, cite.

Invariant: everything is reached through a collection, and a collection only through the tenant that owns it.
"""

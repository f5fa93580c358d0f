"""Retrieval-augmented generation: collections of documents that are read, chunked, embedded, stored, searched, cited.

Invariant: everything is accessed through a collection, and a collection only through the tenant that owns it.
"""

"""Durable tables for keys, ledger, conversations and batches: SQLite, or PostgreSQL by URL."""

from penstock.storage.database import Database, DatabaseError, Row, Statement, merged, open_database
from penstock.storage.where import Where

__all__ = ["Database", "DatabaseError", "Row", "Statement", "Where", "merged", "open_database"]

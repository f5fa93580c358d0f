"""Durable tables for keys, ledger, conversations and batches: SQLite, or PostgreSQL by URL."""

from penstock.storage.database import Database, DatabaseError, Row, Statement, merged, open_database

__all__ = ["Database", "DatabaseError", "Row", "Statement", "merged", "open_database"]

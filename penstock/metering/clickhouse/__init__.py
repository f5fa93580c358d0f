"""The request log in ClickHouse: tables, materialised views and a client."""

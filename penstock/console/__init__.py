"""The web console: a single page of static files that uses the same HTTP API as every client.

It has no state on the server and no rights of its own: it can do exactly what the user's key allows. So any gateway
worker can serve it, and it adds no second access path to protect.
"""

from penstock.console.app import Console

__all__ = ["Console"]

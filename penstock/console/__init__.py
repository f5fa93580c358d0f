"""The web console: a single page of static files over the same HTTP API that every client uses.

It has no state on the server and no rights of its own: what its user may see is what their key may see. So any gateway
worker can serve it, and there is no second way in.
"""

from penstock.console.app import Console

__all__ = ["Console"]

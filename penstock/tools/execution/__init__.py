"""Functions that the server runs itself for the model: HTTP tools and MCP servers, registered per tenant.

Invariant: whatever a tool does (answer late, with too much, from a private address, not at all), a call ends in time
with an `Outcome` that the model can read; only a request that names a tool which does not exist is an error.
"""

from penstock.tools.execution.base import Function, Outcome, ToolError, ToolServer
from penstock.tools.execution.registry import Offer, ToolRegistry

__all__ = ["Function", "Offer", "Outcome", "ToolError", "ToolRegistry", "ToolServer"]

"""Server-side tools: HTTP tools and MCP servers, registered per tenant, which the gateway runs for the model.

Invariant: whatever a tool does (answers late, too much, from a private address, or not at all), a call ends in time
with an `Outcome` that the model can read; only a request for a tool that does not exist is an error.
"""

from penstock.tools.execution.base import Function, Outcome, ToolError, ToolServer
from penstock.tools.execution.registry import Offer, ToolRegistry

__all__ = ["Function", "Offer", "Outcome", "ToolError", "ToolRegistry", "ToolServer"]

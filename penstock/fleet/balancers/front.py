"""What a balancer is told about the gateways behind it, whichever program it is.

What all of them must do: terminate TLS and speak HTTP/2 to clients; pass every token on as it comes; allow replies of
an hour; ask `/health/ready`, and send nothing new to a gateway that is not ready while its streams go on; send a
request that reached no gateway, or one that refused it because it drains, to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError

READY = "/health/ready"
SESSION_HEADER = "x-session-id"
LONGEST_S = 3600
"""How long a reply may take, and how long a client may keep a connection open."""

BODY_LIMIT = 64 * 2**20
"""For documents and files."""

Sticky = Literal["none", "session", "key"]


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway behind the balancer."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Gateway:
        """From HOST:PORT, or the URL of a gateway."""
        found = re.fullmatch(r"(?:http://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})/?", text)
        if found is None or not 0 < int(found[2]) < 65536:
            raise ConfigError(f"--gateway {text}: write it as HOST:PORT, for example 10.0.0.7:8000")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class Front:
    """One balancer."""

    gateways: tuple[Gateway, ...]
    port: int = 443
    name: str = "_"
    """Host name that clients use; `_`: any."""
    certificate: str = ""
    """File with the certificate and its chain; empty: no TLS. HAProxy wants the key in the same file."""
    key: str = ""
    sticky: Sticky = "none"
    body_limit: int = BODY_LIMIT
    """Largest request body in bytes; the gateway's own limits apply besides."""
    check_s: float = 1.0
    """Seconds between health checks."""

    def __post_init__(self) -> None:
        if not self.gateways:
            raise ConfigError("--gateway HOST:PORT is needed at least once")
        if len(set(self.gateways)) < len(self.gateways):
            raise ConfigError("--gateway: one is named twice")

    @property
    def sticky_header(self) -> str:
        """Requests with the same value of this header go to the same gateway; empty: to the one with the fewest."""
        return {"none": "", "session": SESSION_HEADER, "key": "authorization"}[self.sticky]

"""SSRF protection: tools, webhooks and files by URL may connect to public addresses and to private networks in the
configuration.

A host name is resolved here, its address checked, and the connection made to exactly that address, so a name that
resolves differently a moment later has no effect. TLS still verifies the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import certifi
import httpx

from penstock.errors import ConfigError
from penstock.tools.execution.base import ToolError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
R = TypeVar("R")
NAMES_AT_ONCE = 32
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PUBLIC_6 = ipaddress.ip_network("2000::/3")
"""The allocated part of IPv6. The rest is local (as is fd00:ec2::254, the metadata service of AWS), obsolete
(site-local, IPv4-compatible) or unused."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # a public address under which Azure serves metadata and credentials to its machines
            "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is the metadata service of Oracle Cloud
            "100.64.0.0/10",  # shared by carriers and clouds; 100.100.100.200 is the metadata service of Alibaba Cloud
            "169.254.0.0/16",  # link-local, with the metadata services of most clouds
            "0.0.0.0/8",
            "192.88.99.0/24",  # relays from IPv4 to IPv6
            "198.18.0.0/15",
            "240.0.0.0/4",
            "2001::/23",  # protocol assignments; Teredo in it is judged by its IPv4 address
            "3fff::/20",
        ),
    )
)
"""What the standard library takes for public addresses, here or in some version, and is not: metadata services of
clouds, and ranges that are reserved."""


class Addresses:
    """Decides which addresses may be connected to."""

    def __init__(self, networks: Iterable[str] = (), *, setting: str = "tools.networks") -> None:
        """`networks`: private networks that are allowed, such as `10.1.0.0/16`, by the setting named `setting`."""
        self._setting = setting
        # Not the threads of everything else: a name whose servers do not answer holds one for long.
        self._threads = ThreadPoolExecutor(NAMES_AT_ONCE, thread_name_prefix="names")
        try:
            self._allowed = [ipaddress.ip_network(network) for network in networks]
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}") from error

    def allows(self, address: Address) -> bool:
        inner = _embedded(address)
        if inner is not None:
            return self.allows(inner)
        if any(address in network for network in self._allowed):
            return True
        if any(address in network for network in _NOT_PUBLIC):
            return False
        return address.is_global and not address.is_multicast and (address.version == 4 or address in _PUBLIC_6)

    async def resolve(self, host: str, port: int) -> str:
        """An address of `host` that may be connected to."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError) as error:
            raise ToolError(f"the host {host} cannot be found") from error
        for *_, where in found:
            address = ipaddress.ip_address(str(where[0]).partition("%")[0])
            if self.allows(address):
                return str(address)
        raise ToolError(f"the host {host} has a private address, which may not be reached (`{self._setting}`)")

    async def pin(self, request: Any) -> None:
        """Directs an HTTP request to a checked address and keeps the host name."""
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        host = url.raw_host.decode("ascii")  # `url.host` may be decoded, and is encoded by older rules when resolved
        address = await self.resolve(host, port)
        request.extensions = {**request.extensions, "sni_hostname": host}
        request.url = url.copy_with(host=address)


def trusted() -> ssl.SSLContext:
    """The certificate authorities of this machine (including $SSL_CERT_FILE) and those shipped with httpx."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def no_cookies() -> CookieJar:
    """For a client that several tenants share: what one reply sets is not sent with another's request."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


class PinnedTransport(httpx.AsyncBaseTransport):
    """HTTP to checked addresses. One per tool server: connections are reused by address, so they must not be shared
    between names, unless they are not kept."""

    def __init__(self, addresses: Addresses, *, keep_alive: bool = True) -> None:
        self._addresses = addresses
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=20 if keep_alive else 0)
        self._inner = httpx.AsyncHTTPTransport(verify=trusted(), trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._addresses.pin(request)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _embedded(address: Address) -> Address | None:
    """The IPv4 address embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour

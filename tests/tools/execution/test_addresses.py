"""Tools connect to public addresses, and to private ones only where the configuration says so."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.errors import ConfigError
from penstock.tools.execution.addresses import Addresses, PinnedTransport
from penstock.tools.execution.base import ToolError
from tests.tools.execution.parts import LOOPBACK, weather

PRIVATE = (
    "127.0.0.1",
    "10.0.0.1",
    "172.16.5.5",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::127.0.0.1",
    "fec0::1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::10.0.0.1",
    "4000::1",
    "2002:7f00:1::",
    "2001:0:102:304::f5ff:fffe",
    "100.100.100.200",  # metadata of Alibaba Cloud
    "168.63.129.16",  # of Azure
    "::ffff:168.63.129.16",
    "64:ff9b::168.63.129.16",
    "2002:a83f:8110::1",
    "192.0.0.192",  # of Oracle Cloud
    "::ffff:192.0.0.192",
    "fd00:ec2::254",  # of AWS
    "fd20:ce::254",  # of Google Cloud
    "fe80::a9fe:a9fe",  # of OpenStack
    "169.254.170.2",
    "0.1.2.3",
    "240.0.0.1",
    "198.18.0.1",
    "192.88.99.1",
    "2001:db8::1",
    "2001:2::1",
    "3fff::1",
)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused_however_they_are_written(address: str) -> None:
    assert not Addresses().allows(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert Addresses().allows(ipaddress.ip_address(address))


def test_networks_that_are_named_are_allowed_and_no_others() -> None:
    addresses = Addresses(["10.1.0.0/16", "::1/128", "100.64.0.0/10"])
    allowed = ("10.1.2.3", "::1", "::ffff:10.1.2.3", "100.100.100.200")
    assert all(addresses.allows(ipaddress.ip_address(address)) for address in allowed)
    assert not any(addresses.allows(ipaddress.ip_address(address)) for address in ("10.2.0.1", "127.0.0.1"))
    with pytest.raises(ConfigError, match="networks"):
        Addresses(["10.1.0.0/33"])


async def test_names_are_resolved_and_the_address_is_checked() -> None:
    with pytest.raises(ToolError, match="private"):
        await Addresses().resolve("localhost", 80)
    with pytest.raises(ToolError, match="private"):
        await Addresses().resolve("0x7f.1", 80)
    assert await Addresses(LOOPBACK).resolve("localhost", 80) == "127.0.0.1"
    with pytest.raises(ToolError, match="found"):
        await Addresses().resolve("no-such-host.invalid", 80)


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to something else the second time leads nowhere else: it is not asked twice."""
    answers = iter(["127.0.0.1", "169.254.169.254"])
    asked: list[str] = []
    real = socket.getaddrinfo

    def rebinding(host: str, port: int, *args: object, **kwargs: object) -> object:
        if host == "rebinding.example":
            asked.append(host)
            host = next(answers)
        return real(host, port, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with weather() as server:
        async with httpx.AsyncClient(transport=PinnedTransport(Addresses(LOOPBACK))) as client:
            reply = await client.get(f"http://rebinding.example:{server.server_port}/cities/Rome/weather")
            assert reply.json()["city"] == "Rome"
            assert server.seen[0][2]["Host"] == f"rebinding.example:{server.server_port}"
            assert asked == ["rebinding.example"]
            with pytest.raises(ToolError, match="private"):
                await client.get(f"http://rebinding.example:{server.server_port}/")
            assert len(server.seen) == 1


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A key and a certificate for `name` that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pem, private


async def test_tls_verifies_the_name_and_not_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem, private = certificate(tmp_path, "tool.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: object, **kwargs: object) -> object:
        host = "127.0.0.1" if host.endswith(".example") else host
        return real(host, port, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, private)
    with weather(context) as server:
        port = server.server_port
        async with httpx.AsyncClient(transport=PinnedTransport(Addresses(LOOPBACK))) as client:
            assert (await client.get(f"https://tool.example:{port}/cities/Rome/weather")).json()["city"] == "Rome"
        async with httpx.AsyncClient(transport=PinnedTransport(Addresses(LOOPBACK))) as client:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await client.get(f"https://other.example:{port}/")


async def test_addresses_of_the_newer_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    request = httpx.Request("GET", "http://[::1]:81/x")
    await Addresses(["::1/128"]).pin(request)
    assert str(request.url) == "http://[::1]:81/x" and request.extensions["sni_hostname"] == "::1"
    with pytest.raises(ToolError, match="private"):
        await Addresses(LOOPBACK).pin(httpx.Request("GET", "http://[::1]/"))


async def test_names_in_other_alphabets_are_resolved_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older rules make strasse.example of this name, which may be somebody else's."""
    asked: list[str] = []

    async def resolve(self: Addresses, host: str, port: int) -> str:
        asked.append(host)
        return "127.0.0.1"

    monkeypatch.setattr(Addresses, "resolve", resolve)
    request = httpx.Request("GET", "https://stra\u00dfe.example/")
    await Addresses().pin(request)
    name = "xn--strae-oqa.example"
    assert asked == [name] and request.headers["host"] == request.extensions["sni_hostname"] == name

"""HAProxy 2.6 or newer."""

from __future__ import annotations

from penstock.fleet.balancers.front import LONGEST_S, READY, Front


def haproxy(front: Front) -> str:
    tls = f" ssl crt {front.certificate} alpn h2,http/1.1" if front.certificate else ""
    scheme = "https" if front.certificate else "http"
    # A named host is compared without its port; a health check has no host at all.
    names = (
        ""
        if front.name == "_"
        else f"    http-request deny status 421 unless {{ hdr(host),field(1,:) -i {front.name} }}\n"
    )
    check_ms = max(1, round(front.check_s * 1000))
    servers = "".join(
        f"    server gateway-{number} {gateway.host}:{gateway.port} check inter {check_ms}ms fall 2 rise 1\n"
        for number, gateway in enumerate(front.gateways, start=1)
    )
    balance = "balance leastconn"
    if front.sticky_header:
        balance = f"balance hdr({front.sticky_header})\n    hash-type consistent"
    return f"""\
# HAProxy in front of {len(front.gateways)} Penstock gateways; written by `penstock deploy haproxy`.
# Check: haproxy -c -f haproxy.cfg      Run: haproxy -W -f haproxy.cfg
global
    log stdout format raw local0 info
    tune.bufsize 65536 # a request up to this size can be sent again to another gateway

defaults
    mode http
    log global
    option httplog
    option dontlognull
    timeout connect 5s
    timeout check 10s # a busy gateway may take a moment; by default it would be the interval of the checks
    timeout http-request 30s
    timeout queue 30s
    timeout client {LONGEST_S}s
    timeout server {LONGEST_S}s # a waiting stream is not silent: the gateway sends a comment every few seconds
    timeout client-fin 30s
    # Nothing has been answered yet in these cases, and a refusal with 503 is free of charge.
    option redispatch 1
    retries 2
    retry-on conn-failure empty-response 503

frontend public
    bind :{front.port}{tls}
{names}    http-request deny status 413 if {{ req.body_size gt {front.body_limit} }}
    http-request set-header x-forwarded-proto {scheme}
    option forwardfor
    default_backend penstock

backend penstock
    {balance}
    # Streams on a gateway that is no longer ready go on; new requests go elsewhere.
    option httpchk
    http-check send meth GET uri {READY} hdr host localhost
{servers}"""

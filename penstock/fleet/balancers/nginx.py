"""nginx 1.22 or newer. It asks for no health itself: a gateway that refuses (503) or cannot be reached gets nothing for
five seconds, and the request goes to another."""

from __future__ import annotations

from penstock.fleet.balancers.front import LONGEST_S, Front


def nginx(front: Front) -> str:
    choice = "least_conn;"
    if front.sticky_header:
        choice = f"hash $http_{front.sticky_header.replace('-', '_')} consistent;"
    servers = "\n".join(
        f"    server {gateway.host}:{gateway.port} max_fails=1 fail_timeout=5s;" for gateway in front.gateways
    )
    listen = f"listen {front.port};"
    if front.certificate:
        listen = f"""listen {front.port} ssl http2;
    ssl_certificate {front.certificate};
    ssl_certificate_key {front.key};"""
    return f"""\
# nginx in front of {len(front.gateways)} Penstock gateways; written by `penstock deploy nginx`.
# Put it into /etc/nginx/conf.d/.      Check: nginx -t
upstream penstock {{
    {choice}
{servers}
    keepalive 64;
    keepalive_timeout 15s; # less than the gateway's own (server.receive_s)
}}

server {{
    {listen}
    server_name {front.name};
    client_max_body_size {front.body_limit};

    location / {{
        proxy_pass http://penstock;
        proxy_http_version 1.1;
        proxy_set_header Host $host;
        proxy_set_header Connection "";
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        proxy_set_header X-Forwarded-Proto $scheme;
        proxy_buffering off; # every token as it comes
        proxy_connect_timeout 5s;
        proxy_send_timeout {LONGEST_S}s;
        proxy_read_timeout {LONGEST_S}s; # a waiting stream is not silent: the gateway sends a comment every few seconds
        # Nothing has been answered yet in these cases, and a refusal with 503 is free of charge.
        proxy_next_upstream error http_503 non_idempotent;
        proxy_next_upstream_tries {min(len(front.gateways), 3)};
    }}
}}
"""

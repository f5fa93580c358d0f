"""systemd units from a configuration: the whole server of one machine, or, in a fleet, a gateway and a machine that
joins it. `deploy/systemd/` has those of an empty configuration."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from penstock.config import Config

PROGRAM = "/opt/penstock/bin/penstock"
CONFIG = "/etc/penstock/penstock.yaml"
STOP_MARGIN_S = 30
"""What stopping may take beyond the drain: gateways and engines that do not end in time are killed before that."""

_UNIT = """\
# {file}, written by `penstock deploy systemd`. To install:
#   cp {file} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {name}

[Unit]
Description={description}
Wants=network-online.target
After=network-online.target

[Service]
{start}
# Variables such as HF_TOKEN, or the URL of a database with its password: lines of NAME=VALUE, readable by root only.
EnvironmentFile=-/etc/penstock/environment
Environment=HOME=%S/penstock PENSTOCK_STATE=%S/penstock PENSTOCK_CACHE=%C/penstock
Environment=XDG_CACHE_HOME=%C/penstock XDG_RUNTIME_DIR=%t/{name} PYTHONUNBUFFERED=1
{secret}Restart=on-failure
RestartSec=5

# Only the supervisor gets SIGTERM: it lets gateways finish their requests while the engines still run, then ends those.
KillMode=mixed
TimeoutStopSec={stop_s}
# An engine that the kernel kills for its memory is restarted by the supervisor; the unit goes on.
OOMPolicy=continue
LimitNOFILE=1048576
LimitMEMLOCK=infinity
LimitCORE=0

# A user that exists while such units run, and owns these folders of /var/lib, /var/cache and /run.
DynamicUser=yes
User=penstock
StateDirectory=penstock
CacheDirectory=penstock
RuntimeDirectory={name}
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
{capabilities}SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
# Not MemoryDenyWriteExecute: torch and triton compile while they run.

[Install]
WantedBy=multi-user.target
"""


def units(config: Config, *, program: str = PROGRAM, config_file: str = CONFIG) -> dict[str, str]:
    """File names and contents."""
    made = {
        "penstock.service": _unit(
            config,
            "penstock.service",
            "Penstock: large language models over an OpenAI-compatible API",
            "notify",
            f"{program} serve --config {config_file}",
        )
    }
    if config.fleet.url:
        made["penstock-gateway.service"] = _unit(
            config,
            "penstock-gateway.service",
            "Penstock gateway: the HTTP server of a fleet",
            "notify",
            f"{program} gateway --config {config_file}",
        )
        made["penstock-join.service"] = _unit(
            config,
            "penstock-join.service",
            "Penstock machine: engines that the fleet places here",
            "exec",
            f"{program} join {config.fleet.url} --config {config_file}",
        )
    return made


def _unit(config: Config, file: str, description: str, kind: str, command: str) -> str:
    name = PurePosixPath(file).stem
    # Loading a large model, or downloading it, takes as long as it takes; a start that fails ends by itself.
    start = [f"Type={kind}", f"ExecStart={command}", "TimeoutStartSec=infinity"]
    secret = ""
    # systemd reads them as root and hands over copies that only this unit can read.
    for section, path in (("fleet", config.fleet.secret_file), ("watermark", config.watermark.secret_file)):
        if path:
            secret += (
                f"LoadCredential={section}.secret:{path}\n"
                f"Environment=PENSTOCK_{section.upper()}__SECRET_FILE=%d/{section}.secret\n"
            )
    low = config.server.port < 1024
    granted = "CAP_NET_BIND_SERVICE" if low else ""
    return _UNIT.format(
        file=file,
        name=name,
        description=description,
        start="\n".join(start),
        secret=secret,
        stop_s=math.ceil(config.server.drain_delay_s + config.server.drain_s) + STOP_MARGIN_S,
        capabilities=f"CapabilityBoundingSet={granted}\n" + (f"AmbientCapabilities={granted}\n" if low else ""),
    )

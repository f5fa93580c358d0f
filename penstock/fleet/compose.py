"""A Compose project from a configuration: gateways, the engines of every model, Redis, PostgreSQL, Prometheus.

Gateways and engines find each other in Redis (`fleet`) and share limits, queue and conversations there; keys, ledger
and requests are in PostgreSQL. Passwords are files below `secrets/`, which `make-secrets.sh` makes; none is in the
environment of a container. `deploy/compose/` has the project of an empty configuration. What a project cannot do is
refused, all of it at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from penstock.config import Config, ModelConfig
from penstock.config.pools import PoolConfig
from penstock.errors import ConfigError
from penstock.fleet.surroundings import credentials, files, is_local, servers_on_this_machine, source_variables, sources

ENGINE_PORT = 5555
STOP_MARGIN_S = 30
_SECRETS = "/run/secrets"
_HOME = "/var/lib/penstock"
"""Volume of the image, where its user writes; the rest of a container is read-only."""
_IN_REDIS = ("counters", "admission", "conversations", "cache")
"""Sections of gateways whose `url` is that of Redis."""


@dataclass(frozen=True, slots=True)
class ComposeOptions:
    """What the configuration does not say."""

    image: str = "penstock"
    """Repository of the images; the tags are VERSION-gateway, VERSION-cpu and VERSION-cuda."""
    gateways: int = 2
    device: str = "cpu"
    """Of models whose device is auto: cpu or cuda."""
    config_file: str = "./penstock.yaml"
    """As seen from the project's folder."""


def project(config: Config, options: ComposeOptions) -> dict[str, str]:
    """File names and contents."""
    if not config.models:
        raise ConfigError("the configuration has no models, so there is nothing for engines to serve")
    if problems := [*_problems(config)]:
        raise ConfigError("cannot be deployed with Compose:\n" + "\n".join(problems))
    targets = [f"gateway-{number}:{config.server.port}" for number in range(1, options.gateways + 1)]
    head = "# Written by `penstock deploy compose`. First: sh make-secrets.sh, then a key (docs/install.md).\n"
    text = yaml.dump(_compose(config, options), Dumper=_Dumper, sort_keys=False, width=150)
    return {"compose.yaml": head + text, "prometheus.yml": _prometheus(targets), "make-secrets.sh": _MAKE_SECRETS}


def _problems(config: Config) -> Iterator[str]:
    for setting, host in servers_on_this_machine(config):
        yield f"{setting}: {host} is the container itself there; name a server that containers reach"
    for setting, path in files(config):
        yield from _not_absolute(setting, path)
    if config.request_log.spool and not config.request_log.spool.startswith((f"{_HOME}/", "~/")):
        yield f"request_log.spool: containers write below {_HOME} only; name a folder there"
    for index, model in enumerate(config.models):
        where = f"models[{index}] ({model.name})"
        if model.autoscale is not None or any(pool.autoscale is not None for pool in model.pools):
            yield f"{where}: autoscale: nothing here starts containers; scale by hand, or deploy to Kubernetes"
        if model.time_slice:
            yield f"{where}: time_slice: models in turn on one GPU need the gateways of `penstock serve`"
        if model.placement is not None:
            yield f"{where}: placement: the containers of a project are on one machine"
        if model.disk_memory and not model.disk_path.startswith((f"{_HOME}/", "~/")):
            yield f"{where}: disk_path: containers write below {_HOME} only; name a folder there"
        apart = {"replica_roles": model.replica_roles, "replica_grids": model.replica_grids}
        for setting, values in apart.items():
            if values:
                yield f"{where}: {setting}: the containers of a service are alike; deploy to Kubernetes, or use systemd"
        for source in filter(is_local, sources(model)):
            yield from _not_absolute(where, source)


def _not_absolute(where: str, path: str) -> Iterator[str]:
    if path and not PurePosixPath(path).is_absolute():
        yield f"{where}: {path} is mounted into containers under the same name; write an absolute path"


def _compose(config: Config, options: ComposeOptions) -> dict[str, Any]:
    services: dict[str, Any] = {
        f"gateway-{number}": _gateway(config, options, number) for number in range(1, options.gateways + 1)
    }
    for model in config.models:
        services |= {
            f"engine-{_word(model.name)}-{_word(pool.name)}": _engine(config, options, model.in_pool(pool.name), pool)
            for pool in model.pools
            if pool.replicas
        } or {f"engine-{_word(model.name)}": _engine(config, options, model)}
    services["redis"] = {
        "image": "docker.io/library/redis:7-alpine",
        # The password is in a file of the server's own, so that no list of processes shows it.
        "command": [
            "sh",
            "-c",
            'umask 077; (echo appendonly yes; echo dir /data; echo "requirepass $$(cat /run/secrets/redis-password)")'
            " > /tmp/redis.conf && exec redis-server /tmp/redis.conf",
        ],
        "user": "999:1000",
        "secrets": ["redis-password"],
        "volumes": ["redis:/data"],
        "tmpfs": ["/tmp"],
        "read_only": True,
        "healthcheck": _check(
            ["CMD-SHELL", 'REDISCLI_AUTH="$$(cat /run/secrets/redis-password)" redis-cli ping | grep -q PONG']
        ),
        "networks": ["inside"],
        "restart": "unless-stopped",
    }
    services["postgres"] = {
        # With pgvector, for collections.
        "image": "docker.io/pgvector/pgvector:pg17",
        "environment": {
            "POSTGRES_USER": "penstock",
            "POSTGRES_DB": "penstock",
            "POSTGRES_PASSWORD_FILE": f"{_SECRETS}/postgres-password",
        },
        "secrets": ["postgres-password"],
        "volumes": ["postgres:/var/lib/postgresql/data"],
        "shm_size": "256mb",
        "healthcheck": _check(["CMD", "pg_isready", "-U", "penstock"]),
        "networks": ["inside"],
        "restart": "unless-stopped",
    }
    services["prometheus"] = {
        "image": "docker.io/prom/prometheus:v3.5.0",
        "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.retention.time=30d"],
        "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
        "secrets": ["metrics-key"],
        "ports": ["127.0.0.1:9090:9090"],
        "healthcheck": _check(["CMD", "wget", "-q", "-O", "/dev/null", "http://127.0.0.1:9090/-/ready"]),
        "networks": ["inside", "outside"],
        "restart": "unless-stopped",
    }
    secrets = ("store-url", "redis-url", "fleet-secret", "redis-password", "postgres-password", "metrics-key")
    return {
        "name": "penstock",
        "services": services,
        "secrets": {name: {"file": f"./secrets/{name}"} for name in secrets},
        "volumes": {name: {} for name in ("state", "models", "redis", "postgres", "prometheus")},
        # Redis and PostgreSQL have no way out, and no port of theirs is published.
        "networks": {"inside": {"internal": True}, "outside": {}},
    }


def _penstock(config: Config, image: str) -> dict[str, Any]:
    """What gateways and engines have in common."""
    return {
        "image": image,
        "environment": {
            "PENSTOCK_FLEET__URL__FILE": f"{_SECRETS}/redis-url",
            "PENSTOCK_FLEET__SECRET_FILE": f"{_SECRETS}/fleet-secret",
        },
        "secrets": ["redis-url", "fleet-secret"],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "networks": ["inside", "outside"],
        "restart": "unless-stopped",
        # SIGTERM finishes running requests; only then, SIGKILL.
        "stop_grace_period": f"{math.ceil(config.server.drain_delay_s + config.server.drain_s) + STOP_MARGIN_S}s",
        "depends_on": {"redis": {"condition": "service_healthy"}},
    }


def _gateway(config: Config, options: ComposeOptions, number: int) -> dict[str, Any]:
    port = config.server.port
    made = _penstock(config, f"{options.image}:{version('penstock')}-gateway")
    origins = [source for model in config.models for source in sources(model)]
    for section in _IN_REDIS:
        made["environment"][f"PENSTOCK_{section.upper()}__URL__FILE"] = f"{_SECRETS}/redis-url"
    # Without a value: that of the shell which starts the project, or of its file .env.
    in_headers = [name for server in config.tool_servers for name in server.header_variables]
    made["environment"] |= dict.fromkeys((*credentials(config), *in_headers, *source_variables(origins)))
    made["environment"]["PENSTOCK_STORE__URL__FILE"] = f"{_SECRETS}/store-url"
    made["secrets"].append("store-url")
    made["depends_on"]["postgres"] = {"condition": "service_healthy"}
    return made | {
        "command": ["gateway", "--config", "/etc/penstock/penstock.yaml", "--host", "0.0.0.0", "--port", str(port)],
        "hostname": f"gateway-{number}",
        "ports": [f"{port + number - 1}:{port}"],
        "volumes": [
            f"{options.config_file}:/etc/penstock/penstock.yaml:ro", f"state:{_HOME}",
            *_mounts(*filter(is_local, origins), *(path for _, path in files(config) if path)),
        ],
        "ulimits": {"nofile": {"soft": 65536, "hard": 65536}},
        "healthcheck": _check(["CMD", "penstock", "health", "--live", "--url", f"http://127.0.0.1:{port}"]),
    }  # fmt: skip


def _engine(
    config: Config, options: ComposeOptions, model: ModelConfig, pool: PoolConfig | None = None
) -> dict[str, Any]:
    device = options.device if model.device == "auto" else model.device.partition(":")[0]
    made = _penstock(config, f"{options.image}:{version('penstock')}-{device}") | {
        "command": [
            "engine", model.name, "--config", "/etc/penstock/penstock.yaml",
            "--endpoint", f"tcp://0.0.0.0:{ENGINE_PORT}", "--device", device,
            *(() if pool is None else ("--pool", pool.name)),
        ],
        # Of one cache, so that a model is downloaded once.
        "volumes": [
            f"{options.config_file}:/etc/penstock/penstock.yaml:ro", f"models:{_HOME}",
            *_mounts(*filter(is_local, sources(model))),
        ],
        "deploy": {"replicas": model.replicas if pool is None else pool.replicas},
        "shm_size": "1gb",
        "healthcheck": _check(["CMD", "penstock", "engine", "--check", "-e", f"tcp://127.0.0.1:{ENGINE_PORT}"]),
    }  # fmt: skip
    made["environment"] |= dict.fromkeys(source_variables(sources(model)))
    if device == "cuda":
        ranks = model.tensor_parallel * model.pipeline_parallel
        made["deploy"] = made["deploy"] | {
            "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": ranks, "capabilities": ["gpu"]}]}}
        }
    return made


def _mounts(*paths: str) -> list[dict[str, Any]]:
    """In the long form: a colon in a path is part of it, and a path that is missing is an error, no empty folder."""
    return [
        {
            "type": "bind", "source": name, "target": name, "read_only": True, "bind": {"create_host_path": False},
        }
        for name in (path.replace("$", "$$") for path in dict.fromkeys(paths))
    ]  # fmt: skip


def _check(test: list[str]) -> dict[str, Any]:
    # A large model takes long to download and load; a container that answers earlier is healthy at once.
    return {"test": test, "interval": "10s", "timeout": "10s", "retries": 3, "start_period": "30m"}


def _word(name: str) -> str:
    """A name that Compose accepts."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("._-") or "model"


def _prometheus(targets: list[str]) -> str:
    scrape = {
        "job_name": "penstock",
        "authorization": {"credentials_file": f"{_SECRETS}/metrics-key"},
        "static_configs": [{"targets": targets}],
    }
    content = {"global": {"scrape_interval": "15s", "evaluation_interval": "15s"}, "scrape_configs": [scrape]}
    return "# Written by `penstock deploy compose`.\n" + yaml.dump(content, sort_keys=False)


_MAKE_SECRETS = """\
#!/bin/sh -eu
# Written by `penstock deploy compose`. Makes what is missing in secrets/; what is there stays as it is.
# The folder is closed to other users; the files are readable, because containers have users of their own.
umask 022
mkdir -p secrets
chmod 700 secrets
cd secrets
random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; }
[ -e redis-password ] || random >redis-password
[ -e postgres-password ] || random >postgres-password
[ -e fleet-secret ] || random >fleet-secret
[ -e metrics-key ] || : >metrics-key # a key with the scope metrics, once there is one
printf 'redis://:%s@redis:6379/0' "$(cat redis-password)" >redis-url
printf 'postgresql://penstock:%s@postgres:5432/penstock' "$(cat postgres-password)" >store-url
"""


class _Dumper(yaml.SafeDumper):
    """Without references to repeated parts: each service stands for itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

"""The configuration as the pods read it: what a ConfigMap may hold, and what a Secret must.

Invariant: no password, key or token is in the ConfigMap. A URL keeps its host there, without credentials, and an
environment variable from the Secret replaces it as a whole; lists of headers move as they are. Files with secrets are
keys of the Secret, mounted into the pods of gateways under the paths that the ConfigMap names.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from penstock.config import Config, load
from penstock.config.load import DEFAULT_FILE
from penstock.engine.config import LOCAL
from penstock.errors import ConfigError

FOLDER = "/etc/penstock"
FILE = f"{FOLDER}/penstock.yaml"
SECRET_FOLDER = f"{FOLDER}/secret"
RANK_KEYS = f"{FOLDER}/ranks"
"""Where the CURVE keys of machines that share a model are mounted."""
RANK_PORT = 7001
DRAIN_DELAY_S = 10.0
"""Readiness fails this long before a gateway refuses requests: balancers need the time to notice."""
_HEADERS = ("headers", "otlp_headers")
_OF_THE_POD = ("machine", "advertise", "secret_file", "zone", "region", "labels")
"""Settings of `fleet` that each pod has from its environment."""


@dataclass(frozen=True, slots=True)
class SecretSetting:
    """A setting that comes from a key of the Secret, through an environment variable."""

    path: tuple[str, ...]

    @property
    def variable(self) -> str:
        return "PENSTOCK_" + "__".join(self.path).upper()

    @property
    def key(self) -> str:
        return "-".join(self.path).replace("_", "-")


@dataclass(frozen=True, slots=True)
class SecretFile:
    """A file with a secret that gateways read, which is a key of the Secret."""

    setting: str
    key: str
    path: str
    """On the machine of whoever deploys."""


@dataclass(frozen=True, slots=True)
class PodConfiguration:
    """What is mounted into pods, and which settings are in the Secret."""

    config: Config
    text: str
    secrets: tuple[SecretSetting, ...]
    files: tuple[SecretFile, ...] = ()

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def is_secret(self, *path: str) -> bool:
        return SecretSetting(path) in self.secrets


def read(file: Path | None) -> tuple[Config, dict[str, Any]]:
    """The checked configuration and the file's own tree. Variables of this machine's environment do not count."""
    config = load(file, environ={})
    path = file or Path(DEFAULT_FILE)
    if file is None and not path.is_file():
        return config, {}
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for server in tree.get("tool_servers") or ():
        document = server.get("openapi") or ""
        if document and "\n" not in document and (path.parent / document).is_file():
            server["openapi"] = (path.parent / document).read_text(encoding="utf-8")
    return config, tree


def for_pods(config: Config, tree: dict[str, Any], *, redis: bool) -> PodConfiguration:
    """`redis`: engines and gateways meet in the fleet's registry."""
    tree = copy.deepcopy(tree)
    server = tree.setdefault("server", {}) or {}
    tree["server"] = server
    for key in ("host", "admin_host"):
        server.pop(key, None)
    server.setdefault("drain_delay_s", DRAIN_DELAY_S)
    if "encoders" not in tree:
        tree["encoders"] = []  # the default encoder starts when it is needed; in a cluster nobody would start it
    for entry in tree.get("models") or ():
        _for_one_pod(entry)
    fleet = tree.get("fleet") or {}
    for key in _OF_THE_POD:
        fleet.pop(key, None)
    files = tuple(_take_files(tree))
    secrets = [SecretSetting(path) for path in _take_secrets(tree)]
    if not config.store.url:
        secrets.append(SecretSetting(("store", "url")))
    if redis and not config.fleet.url:
        secrets.append(SecretSetting(("fleet", "url")))
    if not fleet:
        tree.pop("fleet", None)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return PodConfiguration(config, text, tuple(dict.fromkeys(secrets)), files)


def _for_one_pod(entry: dict[str, Any]) -> None:
    """A model as its pod sees it, which has devices of its own, numbered from 0."""
    entry.pop("replica_devices", None)
    if str(entry.get("device", "")).startswith("cuda:"):
        entry["device"] = "cuda"
    placement = entry.get("placement")
    if placement is not None:
        placement["listen"] = f"tcp://0.0.0.0:{RANK_PORT}"
        placement["curve_key"] = f"{RANK_KEYS}/head.key"
        placement["curve_clients"] = f"{RANK_KEYS}/machines.txt"
    elif entry.get("devices"):
        known = list(dict.fromkeys(entry["devices"]))
        entry["devices"] = [f"cuda:{known.index(device)}" for device in entry["devices"]]


def _take_files(tree: dict[str, Any]) -> Iterator[SecretFile]:
    """Has the settings that name files with secrets of gateways name the keys of the Secret instead."""
    watermark = tree.get("watermark") or {}
    holders = [("watermark", watermark, "secret_file", "watermark-secret")]
    for index, remote in enumerate(tree.get("remotes") or ()):
        holders.append((f"remotes[{index}]", remote, "key_file", f"remote-{index}-key"))
    for where, holder, name, key in holders:
        if path := holder.get(name):
            holder[name] = f"{SECRET_FOLDER}/{key}"
            yield SecretFile(f"{where}.{name}", key, str(path))


def _take_secrets(tree: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Removes what must not be in a ConfigMap; yields where it was."""
    for path, holder, key in list(_leaves(tree, ())):
        value = holder[key]
        if path[-1] in _HEADERS and value:
            del holder[key]
            yield path
        elif isinstance(value, str) and "://" in value:
            parts = urlsplit(value)
            if parts.password is not None or (parts.username and parts.scheme.startswith("redis")):
                host = parts.netloc.rpartition("@")[2]
                holder[key] = urlunsplit(parts._replace(netloc=host))
                yield path


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in entries:
        here = (*path, str(key))
        if isinstance(value, dict) or (isinstance(value, list) and str(key) not in _HEADERS):
            yield from _leaves(value, here)
        else:
            yield here, tree, key


def refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("cannot be deployed to Kubernetes:\n" + "\n".join(problems))


def machines(model_machines: tuple[str, ...]) -> tuple[str, ...]:
    """The machines of a placement other than the head, each once."""
    return tuple(name for name in dict.fromkeys(model_machines) if name != LOCAL)

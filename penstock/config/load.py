"""Loads the configuration from file, environment and flags, each overriding the one before.

Invariant: `load` either returns a complete `Config` or raises one `ConfigError` that lists every mistake.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import experiments, guardrails
from penstock.config.check import Checker
from penstock.config.models import ModelConfig
from penstock.config.pools import pool_problems
from penstock.config.schema import Config
from penstock.config.tree import Node, assign, from_env, from_text, parse_yaml
from penstock.engine.adapters.spec import name_problem
from penstock.engine.config import LONG_CHUNK
from penstock.errors import ConfigError

DEFAULT_FILE = "penstock.yaml"
FILE_VARIABLE = "PENSTOCK_CONFIG"
_HOST = re.compile(r"(\*|(\*\.)?\w([\w.-]*\w)?)(:[1-9][0-9]{0,4})?", re.ASCII)
"""A host that files may be fetched from."""


def load(
    path: str | Path | None = None,
    *,
    models: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    bare: bool = False,
) -> Config:
    """The configuration from `path`, $PENSTOCK_CONFIG or ./penstock.yaml, or the defaults.

    `models` restricts the models to these names of the file, or to sources that it does not mention. `flags` maps
    dotted keys (`server.port`, `models.*.device`) to text as typed on the command line. `bare`: when the file names no
    model there is none, not the default one; for gateways of a fleet, which says what it serves.
    """
    environ = os.environ if environ is None else environ
    root = _read_file(path, environ)
    for keys, node in from_env(environ):
        assign(root, keys, node)
    if models:
        _select(root, models)
    elif bare and isinstance(root.value, dict):
        root.value.setdefault("models", Node([], "defaults"))
    for key, text in (flags or {}).items():
        _ensure_models(root)
        assign(root, tuple(key.split(".")), from_text(text, f"flag {key}"))
    return check(root)


def load_resolved(path: str | Path) -> Config:
    """A configuration written by `dump`, which already includes environment and flags."""
    return check(parse_yaml(Path(path).read_text(), str(path)))


def dump(config: Config, path: str | Path) -> None:
    """Write `config` for a child process; JSON, which the YAML reader also reads."""
    Path(path).write_text(json.dumps(dataclasses.asdict(config)))


def check(root: Node) -> Config:
    """The checked configuration of a tree; ConfigError lists every mistake, one per line."""
    checker = Checker()
    config: Config = checker.section(Config, root, "")
    problems = checker.problems
    if not problems:
        config = dataclasses.replace(
            config,
            models=tuple(_named(model) for model in config.models),
            encoders=tuple(
                dataclasses.replace(encoder, name=encoder.name or model_name(encoder.source))
                for encoder in config.encoders
            ),
            remotes=tuple(dataclasses.replace(each, name=each.name or each.model) for each in config.remotes),
        )
        problems = conflicts(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def model_name(source: str) -> str:
    """The default name of a model, derived from its source."""
    name = re.split(r"[/:]", source.rstrip("/").removesuffix(".gguf"))[-1]
    return re.split(r"==|@", name)[0] or source


def _named(model: ModelConfig) -> ModelConfig:
    adapters = tuple(
        spec if spec.name else dataclasses.replace(spec, name=model_name(spec.source)) for spec in model.adapters
    )
    return dataclasses.replace(model, name=model.name or model_name(model.source), adapters=adapters)


def check_model(described: Mapping[str, Any], *, fleet: bool = False) -> ModelConfig:
    """One model, described like an entry of `models`; ConfigError says what is wrong with it. `fleet`: its replicas are
    on many machines."""
    root: dict[str, Any] = {"models": [described]}
    if fleet:
        root["fleet"] = {"url": "redis://fleet"}
    try:
        return check(parse_yaml(json.dumps(root), "model")).models[0]
    except ConfigError as error:
        raise ConfigError(re.sub(r"models\[0\](\.|: )|^model:\d+: ", "", str(error), flags=re.MULTILINE)) from None


def read_model(described: Mapping[str, Any]) -> ModelConfig:
    """A model that was checked where it was configured; it may refer to models and tiers that are not known here."""
    checker = Checker()
    model: ModelConfig = checker.section(ModelConfig, parse_yaml(json.dumps(described), "model"), "")
    if checker.problems:
        raise ConfigError("\n".join(checker.problems))
    return _named(model)


def conflicts(config: Config) -> list[str]:
    """Settings that contradict each other."""
    problems = [] if config.models or config.fleet.url else ["models: name at least one model to serve"]
    seen: dict[str, str] = {}
    for index, model in enumerate(config.models):
        for name in (model.name, *model.aliases, *(spec.name for spec in model.adapters)):
            if name in seen:
                problems.append(f'models[{index}]: the name "{name}" is already taken by {seen[name]}')
            seen[name] = f"models[{index}]"
        for position, spec in enumerate(model.adapters):
            problem = name_problem(spec.name) if spec.source else "a source is needed"
            if problem is not None:
                problems.append(f"models[{index}].adapters[{position}]: {problem}")
        if model.speculation in ("draft", "eagle3") and model.draft_model is None:
            problems.append(f"models[{index}]: speculation: {model.speculation} needs a draft_model")
        if model.speculation not in ("draft", "eagle3", "auto") and model.draft_model is not None:
            problems.append(f"models[{index}]: draft_model is only used with speculation: draft or eagle3")
        if model.speculation not in ("draft", "auto") and model.draft_tensor_parallel is not None:
            problems.append(f"models[{index}]: draft_tensor_parallel is only used with speculation: draft")
        if (model.draft_tensor_parallel or 1) > model.tensor_parallel:
            problems.append(f"models[{index}]: draft_tensor_parallel is more than tensor_parallel")
        if model.fp8_attention and model.kv_dtype != "fp8":
            problems.append(f"models[{index}]: fp8_attention needs kv_dtype: fp8")
        if model.fp8_attention and model.deterministic:
            problems.append(f"models[{index}]: fp8_attention is not available with deterministic: true")
        problems += [f"models[{index}].{problem}" for problem in _short_chunks(model)]
        if model.replica_count > 1 and model.time_slice:
            problems.append(f"models[{index}]: a model with time_slice must have one replica")
        ranks = model.tensor_parallel * model.pipeline_parallel
        if model.devices and len(model.devices) != ranks:
            problems.append(f"models[{index}].devices: names {len(model.devices)} devices for {ranks} ranks")
        problems += [f"models[{index}].{problem}" for problem in _pools(config, model)]
        for pool, one in _one_by_one(model):
            where = f"models[{index}].{pool}"
            problems += [f"{where}replica_roles: {problem}" for problem in _roles(one)]
            problems += [f"{where}replica_grids: {problem}" for problem in _grids(one)]
        problems += [f"models[{index}].placement.{problem}" for problem in _placement(model)]
        problems += [f"models[{index}].autoscale: {problem}" for problem in _autoscale(model)]
        if model.resources is not None:
            problems += [f"models[{index}].resources.{problem}" for problem in model.resources.problems()]
        others = {other.name for other in config.models if other is not model}
        if model.downgrade_to and model.downgrade_to not in others:
            problems.append(f'models[{index}].downgrade_to: there is no other model "{model.downgrade_to}"')
    engines = sum(model.first_replicas for model in config.models)
    if engines > config.server.max_engines:
        problems.append(f"{engines} engine processes are more than server.max_engines ({config.server.max_engines})")
    for index, encoder in enumerate(config.encoders):
        for name in (encoder.name, *encoder.aliases):
            if name in seen:
                problems.append(f'encoders[{index}]: the name "{name}" is already taken by {seen[name]}')
            seen[name] = f"encoders[{index}]"
    problems += _remotes(config, seen)
    problems += _experiments(config)
    cache = config.cache
    if config.server.workers > 1 and not cache.url and (cache.exact, cache.semantic) != ("off", "off"):
        problems.append("cache.url: several workers need a shared cache in Redis")
    known = {encoder.name for encoder in config.encoders}
    known |= {remote.name for remote in config.remotes if remote.kind == "embedding"}
    if cache.semantic != "off" and cache.encoder and cache.encoder not in known:
        problems.append(f'cache.encoder: there is no encoder "{cache.encoder}"')
    if cache.semantic != "off" and not cache.encoder and not config.encoders:
        problems.append("cache.semantic: an encoder is needed, but `encoders` is empty")
    tiers = [tier.name for tier in config.tiers]
    problems += [f"tiers[{index}]: a name is needed" for index, name in enumerate(tiers) if not name]
    problems += [f'tiers: "{name}" is defined twice' for name in sorted(set(tiers)) if name and tiers.count(name) > 1]
    if config.auth.default_tier not in tiers:
        problems.append(
            f'auth.default_tier: there is no tier "{config.auth.default_tier}"; there are {", ".join(tiers)}'
        )
    if config.server.admin_port == config.server.port:
        problems.append("server.admin_port: must differ from server.port")
    for index, rule in enumerate(config.routing.regions):
        where = f"routing.regions[{index}]"
        if not rule.regions:
            problems.append(f"{where}.regions: name at least one region")
        problems += [f'{where}.tiers: there is no tier "{name}"' for name in rule.tiers if name not in tiers]
    slices = [model.name for model in config.models if model.time_slice]
    if config.server.workers > 1 and slices:
        problems.append(
            f"server.workers: models with time_slice ({', '.join(slices)}) need a single gateway, which decides which "
            "one is awake; use one worker"
        )
    problems += [f"fleet.{problem}" for problem in config.fleet.problems()]
    return problems + _guardrails(config) + _tools(config) + _shares(config)


def _short_chunks(model: ModelConfig) -> list[str]:
    """Settings that make `fp8_attention` do nothing, because no step has enough tokens of a prompt."""
    if not model.fp8_attention:
        return []
    return [
        f"{pool}{name}: fp8_attention is for chunks of {LONG_CHUNK} prompt tokens and more; {limit} is too few"
        for pool, one in _one_by_one(model)
        for name, limit in (("token_budget", one.token_budget), ("max_model_len", one.max_model_len))
        if limit is not None and limit < LONG_CHUNK
    ]


def _pools(config: Config, model: ModelConfig) -> list[str]:
    """Mistakes in the pools of a model."""
    tiers = [tier.name for tier in config.tiers]
    problems = pool_problems(model.pools, model.pool_rules, tiers, admission=config.admission.enabled)
    if model.pools:
        given = [name for name in ("replica_devices", "replica_roles", "replica_grids") if getattr(model, name)]
        given += ["replicas"] if model.replicas not in (1, model.replica_count) else []
        problems += [f"{name}: with pools, each pool has its own: pools[N].{name}" for name in given]
        if model.autoscale is not None:
            problems.append(
                "autoscale: one load of the whole model does not tell which pool needs more; give each pool that "
                "should be scaled its own: pools[N].autoscale"
            )
        if model.time_slice:
            problems.append("pools: a model with time_slice has one replica")
        if model.placement is not None:
            problems.append("pools: placement is of one grid; it cannot be used with pools")
    return problems


def _one_by_one(model: ModelConfig) -> list[tuple[str, ModelConfig]]:
    """The model as each of its pools has it, with the key of the pool; without pools, itself."""
    if not model.pools:
        return [("", model)]
    return [
        (
            f"pools[{index}].",
            dataclasses.replace(
                model.in_pool(pool.name), pools=(), replicas=max(pool.first_replicas, 1), autoscale=pool.autoscale
            ),
        )
        for index, pool in enumerate(model.pools)
    ]


def _roles(model: ModelConfig) -> list[str]:
    """Mistakes in the roles of replicas."""
    if not model.replica_roles:
        return []
    roles = {model.role(replica) for replica in range(model.replicas)}
    problems = []
    if ("prefill" in roles) != ("decode" in roles):
        problems.append(f"{model.replicas} replicas are all of {sorted(roles)}; prefill and decode need each other")
    if roles != {"both"} and not model.prefix_cache:
        problems.append("roles need prefix_cache, which is off")
    return problems


def _grids(model: ModelConfig) -> list[str]:
    """Mistakes in the grids of replicas."""
    wrong = [grid for grid in model.replica_grids if not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", grid)]
    problems = [f"{grid!r} is not TENSORxPIPELINE, such as 4x1" for grid in wrong]
    if model.replica_grids and (model.devices or model.placement is not None):
        problems.append("devices and placement are of one grid; use replica_devices, or one entry per grid")
    return problems


def _placement(model: ModelConfig) -> list[str]:
    """Mistakes in where ranks run."""
    if model.placement is None:
        return []
    return model.placement.problems(model.tensor_parallel, model.pipeline_parallel)


def _autoscale(model: ModelConfig) -> list[str]:
    """Mistakes in automatic scaling."""
    if model.autoscale is None:
        return []
    problems = model.autoscale.problems()
    if model.time_slice:
        problems.append("a model with time_slice has one replica, which sleeps and wakes by itself")
    if any(role != "both" for role in model.replica_roles):
        problems.append("replicas with roles (replica_roles) are scaled by hand")
    return problems


def _tools(config: Config) -> list[str]:
    names = [server.name for server in config.tool_servers]
    problems = []
    for index, server in enumerate(config.tool_servers):
        where = f"tool_servers[{index}]"
        if not server.name or names.index(server.name) < index:
            problems.append(f"{where}: a unique name is needed")
        if sum(map(bool, (server.openapi, server.mcp_url, server.command))) != 1:
            problems.append(f"{where}: one of openapi, mcp_url and command is needed")
    for name, networks in (
        ("tools.networks", config.tools.networks),
        ("webhooks.networks", config.webhooks.networks),
        ("input_files.url_networks", config.input_files.url_networks),
    ):
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                problems.append(f"{name}: {error}")
    problems += [
        f'input_files.url_hosts: "{host}" is no host; write docs.example.org, docs.example.org:8443, *.example.org or *'
        for host in config.input_files.url_hosts
        if not _HOST.fullmatch(host)
    ]
    return problems


def _remotes(config: Config, seen: dict[str, str]) -> list[str]:
    """Mistakes in remotes, and in fallbacks, which may name them. `seen`: names already taken, with their owner."""
    problems = []
    for index, remote in enumerate(config.remotes):
        where = f"remotes[{index}]"
        if not remote.model:
            problems.append(f"{where}: model is needed: the name of the model on its servers")
        if not remote.urls or not all(url.startswith(("http://", "https://")) for url in remote.urls):
            problems.append(f"{where}: urls are needed, each beginning with http:// or https://")
        if remote.regions and len(remote.regions) != len(remote.urls):
            problems.append(f"{where}.regions: {len(remote.regions)} regions for {len(remote.urls)} urls")
        problems += [f"{where}.{problem}" for problem in remote.problems()]
        for name in (remote.name, *remote.aliases):
            if name in seen:
                problems.append(f'{where}: the name "{name}" is already taken by {seen[name]}')
            seen[name] = where
    answering = {
        *(model.name for model in config.models),
        *(remote.name for remote in config.remotes if remote.kind == "chat"),
    }
    for index, remote in enumerate(config.remotes):
        where = f"remotes[{index}].fallback"
        problems += [f'{where}: there is no model or chat remote "{n}"' for n in remote.fallback if n not in answering]
    for index, model in enumerate(config.models):
        where = f"models[{index}].fallback"
        problems += [f'{where}: there is no model or remote "{n}"' for n in model.fallback if n not in answering]
        if model.overflow_at is not None and not model.fallback:
            problems.append(f"models[{index}].overflow_at: needs a fallback")
    return problems


def _experiments(config: Config) -> list[str]:
    if config.fleet.url:
        return experiments.problems(config.experiments, None)
    names = {name for model in config.models for name in (model.name, *model.aliases)}
    names |= {spec.name for model in config.models for spec in model.adapters}
    names |= {name for remote in config.remotes for name in (remote.name, *remote.aliases)}
    return experiments.problems(config.experiments, {*names, *(route.name for route in config.routes)})


def _guardrails(config: Config) -> list[str]:
    models = {name for model in config.models for name in (model.name, *model.aliases)}
    models |= {spec.name for model in config.models for spec in model.adapters}
    models |= {name for remote in config.remotes for name in (remote.name, *remote.aliases)}
    return guardrails.problems(config.guardrails, {tier.name for tier in config.tiers}, models)


def _shares(config: Config) -> list[str]:
    """Models that are awake at the same time must fit their device together; a time-slice group counts once. In a fleet
    the controller places them so that they do."""
    if config.fleet.url:
        return []
    asked: dict[str, dict[str, float]] = {}
    for whole in config.models:
        for pool, model in _one_by_one(whole):
            if model.memory_share is not None:
                turn = asked.setdefault(model.device, {})
                key = f"time_slice {model.time_slice}" if model.time_slice else f"{model.name} {pool}".rstrip(" .")
                turn[key] = max(turn.get(key, 0.0), model.memory_share * _together(model))
    return [
        f"models: memory_share on device {device} adds up to {sum(shares.values()):g}, more than 1: "
        + ", ".join(f"{name} {share:g}" for name, share in shares.items())
        for device, shares in asked.items()
        if sum(shares.values()) > 1 + 1e-9
    ]


def _together(model: ModelConfig) -> int:
    """Maximum number of replicas of a model on one device."""
    places = len(set(model.replica_devices)) or 1
    most = model.replicas if model.autoscale is None else model.autoscale.max
    return -(-most // places)


def _read_file(path: str | Path | None, environ: Mapping[str, str]) -> Node:
    named = path or environ.get(FILE_VARIABLE)
    if not named and not Path(DEFAULT_FILE).is_file():
        return Node({}, "defaults")
    file = Path(named or DEFAULT_FILE)
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; `penstock config --example > {file}` writes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _ensure_models(root: Node) -> None:
    """Adds a default model, so that flags for every model apply even when no file names one."""
    if isinstance(root.value, dict):
        root.value.setdefault("models", Node([Node({}, "defaults")], "defaults"))


def _select(root: Node, names: Sequence[str]) -> None:
    if not isinstance(root.value, dict):
        return
    given = root.value.get("models")
    entries = given.value if given is not None and isinstance(given.value, list) else []
    chosen = [_find(entries, name) or Node({"source": Node(name, "--model", name)}, "--model") for name in names]
    root.value["models"] = Node(chosen, "--model")


def _find(entries: list[Node], name: str) -> Node | None:
    for entry in entries:
        if isinstance(entry.value, dict) and name in _names(entry.value):
            return entry
    return None


def _names(entry: dict[str, Any]) -> set[Any]:
    source = entry["source"].value if "source" in entry else None
    implied = {source, model_name(source)} if isinstance(source, str) else set()
    return implied | ({entry["name"].value} if "name" in entry else set())

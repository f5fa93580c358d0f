"""A scenario: the model, the fleet, what happens to it and the traffic, as one YAML file or as command-line options.

Invariant: `load` returns a complete, consistent `Scenario` or raises one `ConfigError` that lists every mistake.
Sections that the server has too (`routing`, `admission`, `tiers`, `autoscale`) have the keys of `penstock.yaml`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.bench.arrivals import from_trace
from penstock.bench.goodput import Objectives
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.check import Checker
from penstock.config.fields import setting
from penstock.config.pools import PoolConfig, PoolRuleConfig, pool_problems
from penstock.config.routing import AdmissionConfig, RoutingConfig
from penstock.config.schema import DEFAULT_TIERS, TierConfig
from penstock.config.tree import Node, assign, from_text, parse_yaml
from penstock.errors import ConfigError
from penstock.planning.numbers import KVDType, WeightDType
from penstock.planning.workload import curve

ArrivalPattern = Literal["poisson", "constant", "burst", "closed", "trace"]
MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class EngineSection:
    """How a replica runs the model."""

    tensor_parallel: int = setting(1, doc="Devices that split every layer.", least=1)
    pipeline_parallel: int = setting(1, doc="Pipeline stages of consecutive layers.", least=1)
    weights: WeightDType = setting("auto", doc="Type of the weights; auto: as the checkpoint has them.")  # noqa: RUF009
    kv_dtype: KVDType = setting("auto", doc="Type of the KV cache; auto: that of activations.")  # noqa: RUF009
    max_running: int | None = setting(
        None,
        doc="Sequences that a replica runs at one time; when not set, the engine's default.",
        least=1,
        example="256",
    )
    token_budget: int | None = setting(
        None, doc="Tokens computed in one step, at most; when not set, the engine's default.", least=16, example="8192"
    )
    target_gap_ms: float | None = setting(
        None,
        doc="Gap between tokens that prompts leave to streams; when not set, the engine's default.",
        least=1,
        example="30",
    )
    max_model_len: int = setting(8192, doc="Context window in tokens.", least=16)
    kv_blocks: int | None = setting(
        None, doc="KV blocks of 16 tokens; when not set, as many as the device has room for.", least=16, example="4096"
    )
    prefix_cache: bool = setting(True, doc="Whether equal prefixes are computed once.")
    host_memory: int = setting(
        0, doc="Host memory of a replica for offloaded KV blocks; 0: none.", least=0, size=True, example="64GiB"
    )
    host_idle_s: float = setting(30.0, doc="Seconds after which an unused KV block is offloaded.", least=0)
    calibration: str = setting("", doc="Calibration file; empty: the packaged one of the device.")


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """A tenant and its part of the traffic."""

    name: str = setting("", doc="Name of the tenant.")
    tier: str = setting("standard", doc="Its tier: class and weight in the queue.")
    share: float = setting(1.0, doc="Its part of the requests, relative to the others.", least=0.000001)
    input_tokens: int | None = setting(None, doc="Prompt tokens of its requests; the workload's when not set.", least=1)
    output_tokens: int | None = setting(None, doc="Output tokens; the workload's when not set.", least=1)


@dataclass(frozen=True, slots=True)
class SpikeConfig:
    """A span of time in which more requests arrive."""

    at_s: float = setting(0.0, doc="When it begins.", least=0)
    seconds: float = setting(60.0, doc="How long it lasts.", least=0.001)
    factor: float = setting(10.0, doc="Requests in it, relative to the usual number.", least=0)


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """What clients do when a request is refused or lost."""

    attempts: int = setting(0, doc="How often a client tries again.", least=0, most=100)
    backoff_s: float = setting(1.0, doc="Pause before the first retry; doubles with each.", least=0)
    obey_retry_after: bool = setting(True, doc="Whether a client waits as long as it is told, if that is longer.")


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The requests: when they come, from whom, and how long they are."""

    arrivals: ArrivalPattern = setting(  # noqa: RUF009
        "poisson",
        doc="poisson: independent of each other; constant: evenly; burst: several at once; closed: each after an "
        "earlier one has ended; trace: as recorded.",
    )
    rate: float | None = setting(
        None, doc="Requests (or new conversations) per second; over a day, on average.", least=0.0001, example="12"
    )
    users: int | None = setting(None, doc="Daily users; with requests_per_user, instead of rate.", least=1)
    requests_per_user: float = setting(10.0, doc="Requests of a user per day.", least=0.001)
    burst: int = setting(8, doc="Requests of a burst.", least=1)
    concurrency: int = setting(16, doc="Requests in flight of a closed loop.", least=1)
    trace: str = setting("", doc="File with times and lengths, as for `penstock bench serve --trace`.")
    speed: float = setting(1.0, doc="The trace is replayed this many times as fast.", least=0.000001)
    requests: int | None = setting(None, doc="Most requests (or conversations); no limit when not set.", least=1)
    input_tokens: int = setting(512, doc="Mean prompt tokens, or tokens of a question in a conversation.", least=1)
    output_tokens: int = setting(128, doc="Mean output tokens.", least=1)
    max_tokens: int | None = setting(
        None, doc="What clients send as max_tokens, which admission counts with; when not set, what they get.", least=1
    )
    spread: float = setting(
        0.5, doc="Lengths are uniform within this part of their mean, on both sides; 0: all equal.", least=0, most=1
    )
    system_tokens: int = setting(0, doc="System prompt that the requests of a tenant share.", least=0)
    turns: float = setting(1.0, doc="Mean turns of a conversation; 1: none has a second.", least=1, most=1000)
    think_s: float = setting(3.0, doc="Mean pause between an answer and the next question.", least=0)
    tenants: tuple[TenantConfig, ...] = ()
    tenant_count: int = setting(1, doc="Tenants of the tier standard, where none are listed.", least=1, most=100_000)
    skew: float = setting(1.1, doc="Exponent of Zipf's law over those tenants' shares; 0: equal.", least=0)
    day: str = setting(
        "flat", doc="Curve of the day: flat, office, consumer, or 24 loads from midnight on, with commas."
    )
    start_hour: float = setting(0.0, doc="Hour of the day at which the simulation begins.", least=0, most=24)
    spikes: tuple[SpikeConfig, ...] = ()
    retries: RetryConfig = field(default_factory=RetryConfig)

    @property
    def requests_per_s(self) -> float:
        if self.users is not None:
            return self.users * self.requests_per_user / 86_400
        return self.rate or 0.0


@dataclass(frozen=True, slots=True)
class FailureConfig:
    """A replica or a node that dies without notice."""

    at_s: float = setting(0.0, doc="When.", least=0)
    replica: int | None = setting(None, doc="The replica, counted from 0.", least=0)
    node: int | None = setting(None, doc="The node with all its replicas, counted from 0.", least=0)
    back_after_s: float | None = setting(
        None, doc="Seconds until it starts again (then it loads for cold_start_s); when not set, never.", least=0
    )


@dataclass(frozen=True, slots=True)
class SpotConfig:
    """Replicas on spot instances, which the provider takes back."""

    share: float = setting(
        0.0, doc="Part of the replicas on spot instances, where there is no autoscale.", least=0, most=1
    )
    interruptions_per_hour: float = setting(0.0, doc="Interruptions of one spot replica per hour.", least=0)
    notice_s: float = setting(120.0, doc="Seconds of notice; the replica drains in them.", least=0)


@dataclass(frozen=True, slots=True)
class PoolSection:
    """A pool of replicas; reservations are not simulated."""

    name: str = setting("", doc="Name of the pool.")
    replicas: int = setting(1, doc="Replicas in it.", least=1, most=MAX_REPLICAS)
    max_running: int | None = setting(None, doc="Like engine.max_running.", least=1, example="64")
    token_budget: int | None = setting(None, doc="Like engine.token_budget.", least=16, example="2048")


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """What a request must keep to count as good. What is not set does not count."""

    ttft_s: float | None = setting(None, doc="First token within this many seconds.", least=0, example="1.0")
    per_token_s: float | None = setting(None, doc="Seconds per further token, at most.", least=0, example="0.05")
    latency_s: float | None = setting(None, doc="Last token within this many seconds.", least=0, example="20")

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.ttft_s, self.per_token_s, self.latency_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a simulation."""

    name: str = setting("", doc="Title of the report.")
    seed: int = setting(1, doc="Of everything random.", least=0)
    duration_s: float = setting(600.0, doc="Simulated seconds in which requests arrive.", least=0.001)
    model: str = setting("llama-3-8b", doc="Model: a name, a folder, a config.json or a GGUF file.")
    hardware: str = setting("h200", doc="Device of the catalogue (`penstock plan --hardware list`).")
    catalogue: str = setting("", doc="Catalogue file merged over the built-in one.")
    engine: EngineSection = field(default_factory=EngineSection)
    replicas: int = setting(1, doc="Replicas at the beginning.", least=1, most=MAX_REPLICAS)
    pools: tuple[PoolSection, ...] = ()
    pool_rules: tuple[PoolRuleConfig, ...] = ()
    cold_start_s: float = setting(60.0, doc="Seconds from the decision to start a replica until it serves.", least=0)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    tiers: tuple[TierConfig, ...] = DEFAULT_TIERS
    autoscale: AutoscaleConfig | None = None
    failures: tuple[FailureConfig, ...] = ()
    spot: SpotConfig = field(default_factory=SpotConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)

    @property
    def title(self) -> str:
        return self.name or f"{self.model} on {self.hardware}"


def load(path: str | Path | None = None, flags: Mapping[str, str] | None = None) -> Scenario:
    """The scenario of a file, or the defaults, with options put over it: dotted keys (`workload.rate`) and their text
    as typed. A relative `workload.trace` is looked for beside the file, and is replayed whole unless `duration_s` says
    how long."""
    root = Node({}, "defaults") if path is None else _read(Path(path))
    for key, text in (flags or {}).items():
        assign(root, tuple(key.split(".")), from_text(text, f"option {key}"))
    checker = Checker()
    scenario: Scenario = checker.section(Scenario, root, "")
    problems = checker.problems or conflicts(scenario)
    if problems:
        raise ConfigError("\n".join(problems))
    if path is not None:
        scenario = _beside(scenario, Path(path).parent)
    if scenario.workload.arrivals == "trace" and isinstance(root.value, dict) and "duration_s" not in root.value:
        work = scenario.workload
        last = from_trace(Path(work.trace), work.requests, speed=work.speed)[-1].at
        scenario = dataclasses.replace(scenario, duration_s=last + 1.0)
    return scenario


def conflicts(scenario: Scenario) -> list[str]:
    """Settings that are right by themselves and not together."""
    problems = []
    work = scenario.workload
    if work.arrivals == "trace" and not work.trace:
        problems.append("workload.trace: arrivals: trace needs a file")
    if work.arrivals != "trace" and work.trace:
        problems.append("workload.trace: needs arrivals: trace")
    if work.rate is not None and work.users is not None:
        problems.append("workload.users: give users or rate, not both")
    if work.arrivals in ("poisson", "constant", "burst") and work.rate is None and work.users is None:
        problems.append(f"workload.rate: needed with arrivals: {work.arrivals}; or users, with requests_per_user")
    if work.arrivals in ("closed", "trace") and (work.rate is not None or work.users is not None):
        problems.append(f"workload.arrivals: {work.arrivals} has its own times, so no rate and no users")
    if work.arrivals in ("closed", "trace") and (work.spikes or work.day != "flat"):
        problems.append(f"workload.arrivals: {work.arrivals} has its own times, so no spikes and no day")
    if work.arrivals in ("closed", "trace") and work.turns > 1:
        problems.append(f"workload.turns: conversations begin at a rate, not with arrivals: {work.arrivals}")
    try:
        curve(work.day)
    except ConfigError as error:
        problems.append(f"workload.day: {error}")
    tiers = [tier.name for tier in scenario.tiers]
    names = [tenant.name for tenant in work.tenants]
    for index, tenant in enumerate(work.tenants):
        where = f"workload.tenants[{index}]"
        if not tenant.name or names.index(tenant.name) < index:
            problems.append(f"{where}.name: a name of its own is needed")
        if tenant.tier not in tiers:
            problems.append(f'{where}.tier: there is no tier "{tenant.tier}"; there are {", ".join(tiers)}')
    longest = _longest(work)
    if work.arrivals != "trace" and longest > scenario.engine.max_model_len:
        problems.append(
            f"engine.max_model_len: requests have up to {longest:,} tokens, the window has "
            f"{scenario.engine.max_model_len:,}; set at least {longest}"
        )
    for index, failure in enumerate(scenario.failures):
        if (failure.replica is None) == (failure.node is None):
            problems.append(f"failures[{index}]: say which replica or which node fails, not both")
        if failure.at_s >= scenario.duration_s:
            problems.append(f"failures[{index}].at_s: the simulation ends after {scenario.duration_s:g} s")
        if failure.replica is not None and failure.replica >= scenario.replicas and scenario.autoscale is None:
            problems.append(f"failures[{index}].replica: there are replicas 0 to {scenario.replicas - 1}")
    if scenario.autoscale is not None:
        problems += [f"autoscale: {problem}" for problem in scenario.autoscale.problems()]
        if scenario.spot.share:
            problems.append("spot.share: with autoscale, autoscale.spot says how many replicas are on spot instances")
    if scenario.pools:
        pools = [PoolConfig(name=pool.name) for pool in scenario.pools]
        problems += pool_problems(pools, scenario.pool_rules, tiers, admission=True)
        if any(rule.asked or rule.batches is not None for rule in scenario.pool_rules):
            problems.append("pool_rules: simulated requests name no pool and are not lines of batches")
        if scenario.replicas not in (1, sum(pool.replicas for pool in scenario.pools)):
            problems.append("replicas: with pools, each pool has its own number")
        if scenario.failures or scenario.autoscale is not None or scenario.spot.share:
            problems.append("pools: failures, autoscale and spot are simulated without pools only")
    elif scenario.pool_rules:
        problems.append("pool_rules: there are no pools")
    if scenario.admission.url:
        problems.append("admission.url: a simulation has one queue in memory; leave it out")
    return problems


def _longest(work: WorkloadConfig) -> int:
    """Tokens of the longest first turn that can be drawn."""
    inputs = max([work.input_tokens, *(t.input_tokens for t in work.tenants if t.input_tokens is not None)])
    outputs = max([work.output_tokens, *(t.output_tokens for t in work.tenants if t.output_tokens is not None)])
    return work.system_tokens + round(inputs * (1 + work.spread)) + round(outputs * (1 + work.spread))


def _read(path: Path) -> Node:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; scenarios to begin with are in examples/simulate/") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _beside(scenario: Scenario, folder: Path) -> Scenario:
    """With the paths in it relative to the file's folder."""
    trace, catalogue, calibration = scenario.workload.trace, scenario.catalogue, scenario.engine.calibration
    return dataclasses.replace(
        scenario,
        catalogue=_path(catalogue, folder),
        engine=dataclasses.replace(scenario.engine, calibration=_path(calibration, folder)),
        workload=dataclasses.replace(scenario.workload, trace=_path(trace, folder)),
    )


def _path(given: str, folder: Path) -> str:
    return str(folder / given) if given and (folder / given).exists() else given

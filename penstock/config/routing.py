"""Settings of the router: how a replica is chosen, how requests queue, and which are refused under overload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

OrderName = Literal["fair", "priority", "fcfs", "sjf"]


@dataclass(frozen=True, slots=True)
class RegionRuleConfig:
    """Where requests of some callers may run; the first rule that matches counts. Strict: never elsewhere."""

    tenants: tuple[str, ...] = setting((), doc="Requests of these tenants; empty: all.", example="[acme]")
    tiers: tuple[str, ...] = setting((), doc="Requests of these tiers; empty: all.", example="[enterprise]")
    regions: tuple[str, ...] = setting((), doc="The regions in which they may run.", example="[eu]")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How the replica that runs a request is chosen."""

    policy: str = setting(
        "predicted",
        doc="How a replica is chosen; predicted: earliest first token, from queue, prefix cache and memory.",
        choices="penstock.routing.policies:POLICIES",
    )
    regions: tuple[RegionRuleConfig, ...] = setting(
        (), doc="Data rules: requests of these callers run in these regions and nowhere else.",
        example="[{tenants: [acme], regions: [eu]}]",
    )  # fmt: skip
    region_gain_s: float = setting(
        0.05, doc="Seconds that another region must be faster, after its round trip, to be used.", least=0
    )
    region_return_s: float = setting(
        10.0, doc="Seconds that a region must be back before it is preferred again.", least=0
    )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The admission queue of each model: order, longest waits, and which requests are refused under overload."""

    enabled: bool = setting(True, doc="Queue requests in the gateway once the engines are full; off: in the engines.")
    order: OrderName = setting(  # noqa: RUF009
        "fair",
        doc="fair: by class, then by tenant share; priority: by class; fcfs: by arrival; sjf: shortest job first.",
    )
    queue: int = setting(
        256, doc="Requests that may wait per replica; a full queue drops the newest of the heaviest tenant.", least=0
    )
    wait_s: float = setting(10.0, doc="Longest wait in the classes premium and standard, in seconds.", least=0.001)
    batch_wait_s: float = setting(600.0, doc="Longest wait in the class batch, in seconds.", least=0.001)
    ageing_s: float = setting(
        30.0, doc="Seconds after which the oldest request gets every tenth grant, whatever its class.", least=0
    )
    slots: int | None = setting(
        None,
        doc="Requests sent to a replica at one time; when not set, as many as it can run.",
        least=1,
        example="32",
    )
    ahead: int = setting(2, doc="Further requests sent ahead, so that the engine never waits for the gateway.", least=0)
    kv_share: float = setting(
        0.95, doc="Part of the KV cache that the expected needs of admitted requests may fill.", least=0.01, most=1
    )
    shed_from: float = setting(
        0.8, doc="Load from which requests are shed at random, low-value ones more often; 1: never.", least=0,
        most=1,
    )  # fmt: skip
    downgrade_depth: float = setting(
        10.0, doc="Requests waiting per replica above which best-effort tiers get models[N].downgrade_to.", least=0
    )
    url: str = setting("", doc="redis://HOST:PORT of a queue that several gateways share; empty: a queue per process.")


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """A name clients send instead of a model: each request goes to a small or a large model, by its content."""

    name: str = setting("auto", doc="What clients send as `model`.")
    small: str = setting("", doc="The model for easy requests.")
    large: str = setting("", doc="The model for code, mathematics, reasoning and long answers.")
    default: Literal["small", "large"] = setting("small", doc="Which one answers when the request is inconclusive.")
    threshold: float = setting(0.6, doc="Score, from 0 to 1, above which the large model answers.", least=0, most=1)
    unsure: float = setting(
        0.2, doc="Scores less than this below `threshold` decide nothing: the default answers.", least=0, most=1
    )
    long_words: int = setting(
        800, doc="Words to read (system prompt, history, sources, tools) above which the large model answers.", least=1
    )
    long_tokens: int | None = setting(
        None, doc="The same in tokens; where set, it counts instead of `long_words`.", least=1, example="2000"
    )
    target_ttft_ms: float | None = setting(
        None,
        doc="Time to the first token to meet: the other model answers if this one is predicted to miss it.",
        least=1,
        example="500",
    )
    budget_reserve: float = setting(
        0.0, doc="Part of a caller's budget that is kept for the small model.", least=0, most=1
    )
    small_tiers: tuple[str, ...] = setting((), doc="Tiers that always get the small model.", example="[free]")
    large_tiers: tuple[str, ...] = setting((), doc="Tiers that always get the large model.", example="[enterprise]")
    share: float = setting(
        1.0, doc="Part of the users (or requests) that is routed; the rest is a control group on the default.", least=0,
        most=1,
    )  # fmt: skip
    classifier: str = setting("", doc="Classifier trained with `penstock route train`; empty: the score alone decides.")
    score: str = setting("", doc="Weights made with `penstock route train-score`; empty: those of this release.")
    enabled: bool = setting(True, doc="Off: every request gets the default.")

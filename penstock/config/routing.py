"""Settings of the router: which replica runs a request, and who waits or is turned away when there is no room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

ReplicaPolicyName = Literal["predicted", "power_of_two", "round_robin", "random"]
OrderName = Literal["fair", "priority", "fcfs", "sjf"]


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which replica of a model runs a request."""

    policy: ReplicaPolicyName = setting(  # noqa: RUF009
        "predicted",
        doc="predicted: soonest first token by queue, prefix cache and memory; or power_of_two, round_robin, random.",
    )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The queue in front of each model: who goes first, how long anybody waits, who is turned away."""

    enabled: bool = setting(True, doc="Whether requests beyond what the engines hold wait here; else in the engines.")
    order: OrderName = setting(  # noqa: RUF009
        "fair",
        doc="fair: by class, inside it by tenants' shares; priority: by class; fcfs: by arrival; sjf: shortest first.",
    )
    queue: int = setting(
        256, doc="Requests that may wait per replica; beyond, whoever has most waiting loses its newest.", least=0
    )
    wait_s: float = setting(10.0, doc="Longest wait in the classes premium and standard, in seconds.", least=0.001)
    batch_wait_s: float = setting(600.0, doc="Longest wait in the class batch, in seconds.", least=0.001)
    ageing_s: float = setting(
        30.0, doc="After this wait in seconds a request is served within ten others, whatever its class.", least=0
    )
    slots: int | None = setting(
        None,
        doc="Requests sent to a replica at one time; what it runs at one time when not set.",
        least=1,
        example="32",
    )
    ahead: int = setting(2, doc="Requests sent beyond those, so that the engine never waits for the gateway.", least=0)
    kv_share: float = setting(
        0.95, doc="Part of the KV cache that running requests may be expected to need.", least=0.01, most=1
    )
    shed_from: float = setting(
        0.8, doc="From this load on, some requests are refused at random, the least valued most; 1: none.", least=0,
        most=1,
    )  # fmt: skip
    downgrade_depth: float = setting(
        10.0, doc="Requests waiting per replica above which best-effort tiers get models[N].downgrade_to.", least=0
    )
    url: str = setting("", doc="redis://HOST:PORT, when several gateways share one queue; this process when empty.")


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """A name that clients use instead of a model's: a small or a large model answers, by what is asked."""

    name: str = setting("auto", doc="What clients say as `model`.")
    small: str = setting("", doc="The model for what is easy.")
    large: str = setting("", doc="The model for code, mathematics, reasoning and long work.")
    default: Literal["small", "large"] = setting("small", doc="Which one answers what shows too little to tell.")
    threshold: float = setting(0.6, doc="Score, from 0 to 1, above which the large model answers.", least=0, most=1)
    long_words: int = setting(800, doc="Users' words in a conversation above which the large one answers.", least=1)
    small_tiers: tuple[str, ...] = setting((), doc="Tiers that always get the small model.", example="[free]")
    large_tiers: tuple[str, ...] = setting((), doc="Tiers that always get the large model.", example="[enterprise]")
    share: float = setting(
        1.0, doc="Part of the users (or requests) decided on; the others, a control group, get the default.", least=0,
        most=1,
    )  # fmt: skip
    classifier: str = setting("", doc="File made by `penstock route train`, for a second opinion.")
    enabled: bool = setting(True, doc="Off: everything gets the default.")

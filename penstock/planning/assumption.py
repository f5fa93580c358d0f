"""What a plan rests on: every figure that was assumed or looked up, and where it comes from."""

from __future__ import annotations

from penstock.planning.candidate import Candidate, Options, runs_on
from penstock.planning.catalogue import PRICE_KINDS, ApiPrice, Device
from penstock.planning.deployment import Deployment
from penstock.planning.memory import Assumption
from penstock.planning.money import HOURS_PER_MONTH
from penstock.planning.workload import CURVES, Workload

GIVEN = "given, or the default of the command"


def assumptions(
    best: Candidate | None, workload: Workload, options: Options, api: ApiPrice | None, context: int
) -> tuple[Assumption, ...]:
    """In the order in which a reader meets the figures."""
    found = [*_of_workload(workload, context)]
    if best is not None:
        found += _of_engine(best)
        found += _of_device(best.deployment.device, options)
        found += _of_replica(best)
    found += _of_money(options)
    if api is not None:
        cached = "" if api.cached_input is None else f", {api.cached_input:g} for cached input"
        value = f"${api.input:g} input{cached}, ${api.output:g} output per 1M tokens"
        found.append(Assumption(f"API price, {api.name}", value, f"{api.source}, {api.date}"))
    return tuple(found)


def _of_workload(workload: Workload, context: int) -> list[Assumption]:
    shape = "a shape, not a measurement" if workload.curve.name in CURVES else "given"
    hits = GIVEN if workload.cache_hit_rate is not None else "histories of conversations and the shared prefix"
    return [
        Assumption(
            "load over the day",
            f"curve {workload.curve.name}, busiest hour {workload.curve.peak:.2f} x the average",
            shape,
        ),
        Assumption("peak", f"{workload.peak_factor:g} x the day's average", GIVEN),
        Assumption("prompt tokens found in the prefix cache", f"{workload.hit_rate:.0%}", hits),
        Assumption("context window", f"{context:,} tokens", "--context, or four times the longest average request"),
    ]


def _of_engine(best: Candidate) -> list[Assumption]:
    """What Penstock itself cannot run, planned as if it could."""
    shape, device = best.deployment.shape, best.deployment.device
    found = []
    if not shape.served:
        speed = f"as of a family of our own: {shape.family} models have none, and run slower through transformers"
        found.append(Assumption("engine", speed, "docs/models.md"))
    if not runs_on(device):
        missing = f"as if Penstock ran {device.title} GPUs: it does not"
        found.append(Assumption("engine", missing, "docs/models.md"))
    return found


def _of_device(device: Device, options: Options) -> list[Assumption]:
    found = [
        Assumption(
            f"{device.name}",
            f"{device.memory_bytes / 2**30:.0f} GiB at {device.bandwidth / 1e9:,.0f} GB/s, "
            + ", ".join(f"{name} {rate / 1e12:,.4g}" for name, rate in device.flops.items())
            + " TFLOP/s",
            f"{device.source}, {device.date}" if device.date else device.source,
        )
    ]
    prices = {kind: price for kind in PRICE_KINDS if (price := device.prices.of(kind)) is not None}
    if not prices:
        return [*found, Assumption(f"price of {device.name}", "none: hardware of one's own", "catalogue")]
    listed = ", ".join(f"${price:g} {kind.replace('_', ' ')}" for kind, price in prices.items())
    derived = sorted(kind.replace("_", " ") for kind in device.prices.estimated)
    note = f"; {', '.join(derived)} estimated" if derived else ""
    found.append(Assumption(f"price of {device.name} per hour", listed, f"catalogue, {device.date}{note}"))
    mix = options.mix
    bought = {"on demand": mix.on_demand, "reserved": mix.reserved, "spot": mix.spot}
    value = ", ".join(f"{share:.0%} {kind}" for kind, share in bought.items() if share)
    found.append(Assumption("how GPUs are bought", value, GIVEN))
    return found


def _of_replica(best: Candidate) -> list[Assumption]:
    return [
        *best.memory.assumptions,
        *_of_speculation(best.deployment),
        Assumption("efficiency", best.calibration.title, f"`{best.calibration.source.command}`"),
        Assumption(
            "cost of input and output tokens",
            f"{best.prefill_share:.0%} of the bill for prompts, the rest for answers",
            "engine time of prompts in full steps, and of answers at capacity",
        ),
    ]


def _of_speculation(made: Deployment) -> list[Assumption]:
    if made.speculation is None:
        return []
    value = (
        f"{made.speculation.form}, {made.speculation.depth} draft tokens, each accepted with probability "
        f"{made.speculation.acceptance:g}: {made.speculation.tokens_per_step:.2f} tokens per step"
    )
    return [Assumption("speculation", value, GIVEN)]


def _of_money(options: Options) -> list[Assumption]:
    overheads, headroom = options.overheads, options.headroom
    return [
        Assumption(
            "headroom",
            f"{headroom.utilisation:.0%} of a replica's capacity at peak, {headroom.spare_replicas} spare",
            GIVEN,
        ),
        Assumption("autoscaled fleet", "replicas of an hour start an hour before", "cold starts take minutes"),
        Assumption("month", f"{HOURS_PER_MONTH:g} hours", "365 x 24 / 12"),
        Assumption("operations", f"{overheads.operations_hours:g} h at ${overheads.hourly_wage:g} a month", GIVEN),
        Assumption(
            "egress",
            f"${overheads.egress_per_gb:g} per GB, {overheads.bytes_per_output_token:g} bytes per streamed token",
            "estimates: what large clouds ask for the first 10 TB; one event of a stream",
        ),
        Assumption(
            "storage",
            f"${overheads.storage_per_gb:g} per GB and month: weights once, request log for "
            f"{overheads.log_days:g} days at {overheads.log_bytes_per_token:g} bytes per token",
            "estimate: what large clouds ask for block storage",
        ),
    ]

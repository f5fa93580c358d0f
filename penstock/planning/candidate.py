"""One deployment judged for a workload: whether it fits, what it serves within the objectives, the fleet, the bill.

A deployment that does not do is a `Rejected` with one sentence that says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.errors import ConfigError
from penstock.planning.calibration import Calibration, calibration_for
from penstock.planning.capacity import RequestShape, Slo, Steady, most_load, steady
from penstock.planning.catalogue import Device
from penstock.planning.deployment import Deployment, Speculation, possible_tensor_parallel
from penstock.planning.memory import MemoryPlan, device_weights, memory_plan
from penstock.planning.money import Bill, Overheads, PriceMix, TokenPrices, gpu_bill, monthly_bill, token_prices
from penstock.planning.numbers import KVDType, WeightDType
from penstock.planning.provision import Fleet, Headroom, provision
from penstock.planning.shape import ModelShape
from penstock.planning.step_time import StepTime
from penstock.planning.workload import Workload

_WINDOW_OF_AVERAGE = 4
"""Without `context`, the window holds requests of four times the average length."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan may vary, and how it counts money. Empty: everything that makes sense."""

    tensor_parallel: tuple[int, ...] = ()
    pipeline_parallel: tuple[int, ...] = ()
    weight_dtypes: tuple[WeightDType, ...] = ()
    kv_dtypes: tuple[KVDType, ...] = ()
    context: int | None = None
    """The window, in tokens."""
    host_memory: int = 0
    """Bytes per device for blocks that leave the KV cache."""
    speculation: Speculation | None = None
    adapter_slots: int = 0
    adapter_rank: int = 16
    adapter_rows: int = 64
    adapter_vectors: bool = False
    adapter_blocks: int = 0
    adapter_tokens: int = 0
    adapter_prefixes: bool = False
    headroom: Headroom = field(default_factory=Headroom)
    mix: PriceMix = field(default_factory=PriceMix)
    overheads: Overheads = field(default_factory=Overheads)
    autoscaled: bool = False
    """Compare deployments by the bill of a fleet that follows the day, not by that of static provisioning."""
    calibrations: tuple[Calibration, ...] | None = None
    """Instead of the packaged ones."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment that keeps the objectives. `steady` is a replica at the planned peak load."""

    deployment: Deployment
    calibration: Calibration
    memory: MemoryPlan
    weight_bytes: int
    """Of the weights, once."""
    most: Steady
    steady: Steady
    fleet: Fleet
    static: Bill
    autoscaled: Bill
    monthly: float
    """The bill that counts: static or autoscaled, as the options say."""
    prefill_share: float
    """The prompts' part of the engine's time."""
    tokens: TokenPrices

    @property
    def label(self) -> str:
        return self.deployment.label

    @property
    def layout(self) -> tuple[str, int, int]:
        """What deployments that differ only in number formats have in common."""
        return self.deployment.device.name, self.deployment.tensor_parallel, self.deployment.pipeline_parallel


@dataclass(frozen=True, slots=True)
class Rejected:
    """A deployment that does not do, and why. `ratio`: how far it is beyond what is allowed, to find the nearest."""

    label: str
    kind: str
    """memory, objectives, layout or price."""
    reason: str
    ratio: float
    deployment: Deployment | None = None
    """None where the engine would refuse to make it."""


def window(shape: ModelShape, workload: Workload, context: int | None) -> int:
    """The context window to plan with. ConfigError when the requests do not fit the model."""
    longest = workload.longest_context
    if longest > shape.max_positions:
        raise ConfigError(
            f"requests of up to {longest:,} tokens, answers included, do not fit the context of "
            f"{shape.max_positions:,} tokens of {shape.name}; shorten them, or choose a model with a longer context"
        )
    if context is None:
        return min(shape.max_positions, max(_WINDOW_OF_AVERAGE * longest, 4096))
    if context < longest:
        raise ConfigError(
            f"a context of {context:,} tokens is shorter than requests of up to {longest:,} tokens, answers included"
        )
    if context > shape.max_positions:
        raise ConfigError(f"a context of {context:,} tokens is longer than the {shape.max_positions:,} of {shape.name}")
    return context


def deployments(
    shape: ModelShape, device: Device, context: int, options: Options, shared_prefix: int = 0
) -> Iterator[Deployment | Rejected]:
    """Layouts and number formats to try on a device. A layout that was asked for and cannot be is rejected; one that
    nobody asked for is not mentioned."""
    for weights in options.weight_dtypes or _weight_dtypes(shape, device):
        for kv in options.kv_dtypes or _kv_dtypes(device):
            fitted = False
            for tensor, stages in _layouts(shape, device, options):
                if fitted and stages > 1 and not options.pipeline_parallel:
                    break
                try:
                    made = Deployment(
                        shape=shape, device=device, tensor_parallel=tensor, pipeline_parallel=stages,
                        weight_dtype=weights, kv_dtype=kv, max_model_len=context, host_memory=options.host_memory,
                        shared_prefix=shared_prefix, speculation=options.speculation,
                        adapter_slots=options.adapter_slots, adapter_rank=options.adapter_rank,
                        adapter_rows=options.adapter_rows, adapter_vectors=options.adapter_vectors,
                        adapter_blocks=options.adapter_blocks, adapter_tokens=options.adapter_tokens,
                        adapter_prefixes=options.adapter_prefixes,
                    )  # fmt: skip
                except ConfigError as error:
                    yield Rejected(f"{device.name}, TP {tensor}, PP {stages}", "layout", str(error), float("inf"))
                    continue
                fitted = fitted or memory_plan(made).fits
                yield made


def _layouts(shape: ModelShape, device: Device, options: Options) -> Iterator[tuple[int, int]]:
    """Sizes of tensor and pipeline parallelism, single stages first. Stages serve as many requests as replicas
    of one stage's devices would, later each: they are for models that no single stage holds."""
    node = device.devices_per_node if device.kind == "gpu" else 1
    sizes = options.tensor_parallel or tuple(
        size for size in possible_tensor_parallel(shape) if size <= node and node % size == 0
    )
    for stages in options.pipeline_parallel or (1, 2, 4, 8):
        for size in sizes:
            asked = options.pipeline_parallel or (options.tensor_parallel and stages == 1)
            if asked or size * stages <= node:
                yield size, stages


def _weight_dtypes(shape: ModelShape, device: Device) -> tuple[WeightDType, ...]:
    """As stored, and for dense ones also a byte per weight: formats that hardly change answers."""
    if shape.stored is not None:
        return ("auto",)
    return ("auto", "fp8" if "fp8" in device.flops else "int8")


def _kv_dtypes(device: Device) -> tuple[KVDType, ...]:
    return ("auto", "fp8") if "fp8" in device.flops else ("auto", "int8")


def judge(deployment: Deployment, workload: Workload, slo: Slo, options: Options) -> Candidate | Rejected:
    """A deployment for a workload."""
    memory = memory_plan(deployment)
    if not memory.fits:
        return Rejected(deployment.label, "memory", memory.problem or "", _memory_ratio(memory), deployment)
    calibration = calibration_for(deployment.device, options.calibrations)
    request = RequestShape(workload.prompt_tokens, workload.output_tokens, workload.cached_tokens)
    most = most_load(deployment, calibration, request, slo)
    if most.requests_per_s <= 0:
        return Rejected(deployment.label, "objectives", missed(most, slo), _excess(most, slo), deployment)
    fleet = provision(
        workload,
        most.requests_per_s,
        options.headroom,
        deployment.devices,
        deployment.device.devices_per_node,
    )
    busy = max(1, fleet.replicas - options.headroom.spare_replicas)
    now = steady(deployment, calibration, request, workload.peak.requests / busy)
    prices, weight_bytes = deployment.device.prices, _stored_weights(deployment)
    try:
        paid = gpu_bill(prices, options.mix, [fleet.devices] * len(fleet.by_hour))
        following = gpu_bill(prices, options.mix, fleet.devices_by_hour)
    except ConfigError as error:
        return Rejected(deployment.label, "price", str(error), float("inf"), deployment)
    static = monthly_bill(paid, workload, options.overheads, weight_bytes)
    autoscaled = monthly_bill(following, workload, options.overheads, weight_bytes)
    monthly = (autoscaled if options.autoscaled else static).total
    at_once = most.concurrency / deployment.pipeline_parallel
    share = prefill_share(StepTime(deployment, calibration), request, at_once, deployment.step_tokens)
    return Candidate(
        deployment, calibration, memory, weight_bytes, most, now, fleet, static, autoscaled, monthly, share,
        token_prices(monthly, workload, share),
    )  # fmt: skip


def _stored_weights(deployment: Deployment) -> int:
    """Bytes of the weights, once: the same for every layout."""
    return device_weights(replace(deployment, tensor_parallel=1, pipeline_parallel=1))


def prefill_share(time: StepTime, request: RequestShape, concurrency: float, step_tokens: int) -> float:
    """The prompt's part of the engine's time for a request: the prompt in steps full of prompt tokens, the answer in
    decode steps that `concurrency` sequences share. Each is taken alone: in a mixed step, prompt tokens would seem free
    as long as the step is no longer than without them."""
    positions = step_tokens * (request.cached + (request.computed + 1) / 2)
    prompt = time.of(0, 0, step_tokens, positions, step_tokens / request.computed) * request.computed / step_tokens
    batch = max(1.0, concurrency)
    answer = request.output * time.token_s(batch, batch * request.context) / batch
    return prompt / (prompt + answer)


def runs_on(device: Device) -> bool:
    """Whether Penstock's engine has a backend for it: CUDA and CPUs. Others can be planned all the same."""
    return not device.title.startswith("AMD ")


def objectives(slo: Slo) -> str:
    """In words."""
    limits = []
    if slo.ttft_s is not None:
        limits.append(f"TTFT p95 under {slo.ttft_s * 1e3:g} ms")
    if slo.itl_s is not None:
        limits.append(f"under {slo.itl_s * 1e3:g} ms per token")
    return " and ".join(limits) or "any latency"


def missed(alone: Steady, slo: Slo) -> str:
    """Which objective a single request misses."""
    found = []
    if slo.ttft_s is not None and alone.ttft_s > slo.ttft_s:
        found.append(f"TTFT {alone.ttft_s * 1e3:,.0f} ms without any other load, over {slo.ttft_s * 1e3:,.0f}")
    if slo.itl_s is not None and alone.itl_s > slo.itl_s:
        found.append(f"{alone.itl_s * 1e3:,.0f} ms per token without any other load, over {slo.itl_s * 1e3:,.0f}")
    return " and ".join(found)


def _memory_ratio(memory: MemoryPlan) -> float:
    """How many times the device's memory, or else the cache, would have to be there."""
    needed = memory.weights + memory.runtime + memory.activations
    return max(needed / memory.capacity, memory.deployment.context_len / max(1, memory.kv_tokens))


def _excess(alone: Steady, slo: Slo) -> float:
    return max(
        alone.ttft_s / slo.ttft_s if slo.ttft_s else 0.0,
        alone.itl_s / slo.itl_s if slo.itl_s else 0.0,
    )

"""From a scenario to what the simulation runs: the deployment, its memory and step times, the fleet, its faults.

Every figure that a result rests on is among the `assumptions`, with its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.config.pools import PoolConfig
from penstock.errors import ConfigError
from penstock.planning.autoscaling import Autoscaler
from penstock.planning.calibration import Calibration, calibration_for, read_calibration
from penstock.planning.catalogue import load_catalogue
from penstock.planning.deployment import Deployment
from penstock.planning.memory import MemoryPlan, memory_plan
from penstock.planning.model_shape import model_shape
from penstock.planning.remedy import remedy
from penstock.planning.step_time import StepTime
from penstock.routing.hold import HoldLimits
from penstock.routing.placement import Placer
from penstock.simulation.fleet import Fault, FleetSpec, Scaler
from penstock.simulation.gateway import GatewaySpec
from penstock.simulation.record import Record
from penstock.simulation.replica import ReplicaSpec
from penstock.simulation.run import simulate
from penstock.simulation.scenario import Scenario
from penstock.simulation.workload import source, tenants

MONDAY = 1_767_571_200.0
"""Unix time of the midnight at which the first simulated day begins: Monday, 5 January 2026, UTC."""
HOST_COPY = 54e9
"""Bytes per second at which KV blocks return to a GPU, as measured over PCIe 5 (docs/results/h200.md, offload)."""
SAMPLES = 480
"""Of the fleet, over the simulated time."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario with everything looked up."""

    scenario: Scenario
    deployment: Deployment
    calibration: Calibration
    blocks: int
    memory: MemoryPlan
    price: float | None
    """Dollars per device and hour."""
    spot_price: float | None
    tiers: dict[str, str] = field(default_factory=dict)

    @property
    def replicas_per_node(self) -> int:
        return max(self.deployment.device.devices_per_node // self.deployment.devices, 1)

    @property
    def host_blocks(self) -> int:
        return self.memory.host_tokens // self.deployment.block_size

    @property
    def host_block_s(self) -> float:
        """Seconds to copy one block back from the host."""
        if not self.host_blocks:
            return 0.0
        device, block_bytes = self.deployment.device, self.deployment.host_memory / self.host_blocks
        return block_bytes / (HOST_COPY if device.kind == "gpu" else device.bandwidth / 2)  # a CPU reads and writes it

    @property
    def replica(self) -> ReplicaSpec:
        deployment, target_ms = self.deployment, self.scenario.engine.target_gap_ms
        return ReplicaSpec(
            step_time=StepTime(deployment, self.calibration),
            num_blocks=self.blocks,
            block_size=deployment.block_size,
            max_running=deployment.most_running,
            token_budget=deployment.step_tokens,
            target_gap_s=deployment.gap_s if target_ms is None else target_ms / 1e3,
            gap_is_default=target_ms is None,
            gap_yields_s=deployment.gap_yields_s if target_ms is None else None,
            prompt_tile=deployment.prompt_tile,
            max_model_len=deployment.context_len,
            prefix_cache=self.scenario.engine.prefix_cache,
            host_blocks=self.host_blocks,
            host_idle_s=self.scenario.engine.host_idle_s,
            host_block_s=self.host_block_s,
            overlap=deployment.device.kind == "gpu",
            stages=deployment.pipeline_parallel,
        )

    def fleet(self, *, replicas: int | None = None, scaler: Scaler | None = None) -> FleetSpec:
        scenario = self.scenario
        spot_price = self.spot_price if self.spot_price is not None else self.price
        return FleetSpec(
            replica=self.replica,
            replicas=scenario.replicas if replicas is None else replicas,
            cold_start_s=scenario.cold_start_s,
            replicas_per_node=self.replicas_per_node,
            devices=self.deployment.devices,
            price=self.price or 0.0,
            spot_price=spot_price or 0.0,
            spot=scenario.spot.share,
            interruptions_per_hour=scenario.spot.interruptions_per_hour,
            notice_s=scenario.spot.notice_s,
            autoscaler=scaler,
            epoch=MONDAY + 3600 * scenario.workload.start_hour,
        )

    def pools(self) -> dict[str, FleetSpec]:
        """The replicas of each pool; none without pools."""
        found = {}
        for pool in self.scenario.pools:
            whole = self.fleet(replicas=pool.replicas)
            own = {
                name: value for name in ("max_running", "token_budget") if (value := getattr(pool, name)) is not None
            }
            found[pool.name] = replace(whole, replica=replace(whole.replica, **own))
        return found

    @property
    def faults(self) -> list[Fault]:
        return [
            Fault(
                failure.at_s,
                "node" if failure.replica is None else "replica",
                failure.node if failure.replica is None else failure.replica,
                failure.back_after_s,
            )
            for failure in self.scenario.failures
        ]

    def order(self, tenant: str) -> tuple[int, str]:
        """Tenants as they are listed."""
        names = list(self.tiers)
        return (names.index(tenant) if tenant in self.tiers else len(names), tenant)

    @property
    def assumptions(self) -> dict[str, str]:
        scenario, deployment = self.scenario, self.deployment
        asked = scenario.engine.kv_blocks
        blocks = "as the scenario says" if asked is not None else "what the device has room for beside the weights"
        found = {
            "replica": f"{deployment.shape.name} on {deployment.label}; at most {deployment.most_running} running, "
            f"{deployment.step_tokens:,} tokens per step",
            "step times": self.calibration.title,
            "KV cache": f"{self.blocks:,} blocks, {self.blocks * deployment.block_size:,} tokens: {blocks}",
            "host tier": f"{self.host_blocks:,} blocks, {self.host_block_s * 1e6:,.0f} us to copy one back",
            "cold start": f"{scenario.cold_start_s:g} s from the decision until a replica serves",
            "pools": ", ".join(f"{pool.name} {pool.replicas}" for pool in scenario.pools),
            "policy": f"{scenario.routing.policy}, admission {'on' if scenario.admission.enabled else 'off'}",
        }
        if not self.host_blocks:
            del found["host tier"]
        if not scenario.pools:
            del found["pools"]
        device = deployment.device
        if self.price is None:
            found["price"] = f"{device.name} has none in the catalogue"
        else:
            spot = "" if self.spot_price is None else f", ${self.spot_price:g} spot"
            found["price"] = f"${self.price:g} per device and hour on demand{spot} ({device.source}, {device.date})"
        return found


def prepare(scenario: Scenario, calibration: Calibration | None = None) -> Setup:
    """Looks up the model, the device, its calibration and memory; errors say what would do."""
    catalogue = load_catalogue(scenario.catalogue or None)
    device, engine = catalogue.device(scenario.hardware), scenario.engine
    deployment = Deployment(
        shape=model_shape(scenario.model),
        device=device,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        weight_dtype=engine.weights,
        kv_dtype=engine.kv_dtype,
        max_model_len=engine.max_model_len,
        max_running=engine.max_running,
        token_budget=engine.token_budget,
        host_memory=engine.host_memory,
    )
    memory = memory_plan(deployment)
    if memory.blocks < 1 or (engine.kv_blocks is None and not memory.fits):
        raise ConfigError(f"{memory.problem}; {remedy(memory, catalogue)}")
    if engine.kv_blocks is not None and engine.kv_blocks > memory.blocks:
        raise ConfigError(
            f"engine.kv_blocks: {deployment.label} has room for {memory.blocks:,} blocks beside the weights, not for "
            f"{engine.kv_blocks:,}"
        )
    if calibration is None:
        calibration = read_calibration(Path(engine.calibration)) if engine.calibration else calibration_for(device)
    return Setup(
        scenario=scenario,
        deployment=deployment,
        calibration=calibration,
        blocks=engine.kv_blocks or memory.blocks,
        memory=memory,
        price=device.prices.on_demand,
        spot_price=device.prices.spot,
        tiers={tenant.name: tenant.tier for tenant in tenants(scenario.workload)},
    )


def run(
    setup: Setup,
    *,
    replicas: int | None = None,
    scaler: Scaler | None = None,
    progress: Callable[[float], None] | None = None,
) -> Record:
    """Simulates the scenario; `replicas` and `scaler` instead of its own."""
    scenario = setup.scenario
    if scaler is None and replicas is None and scenario.autoscale is not None:
        scaler = Autoscaler(scenario.autoscale)
    autoscale = scenario.autoscale
    hold = None if autoscale is None or autoscale.min else HoldLimits(autoscale.hold_s, autoscale.hold)
    gateway = GatewaySpec(
        policy=scenario.routing.policy,
        admission=scenario.admission,
        hold=hold,
        placer=Placer([PoolConfig(name=pool.name) for pool in scenario.pools], scenario.pool_rules),
        tiers=setup.tiers,
    )
    return simulate(
        source(scenario),
        setup.pools() or setup.fleet(replicas=replicas, scaler=scaler),
        gateway,
        seconds=scenario.duration_s,
        faults=setup.faults,
        seed=scenario.seed,
        sample_s=scenario.duration_s / SAMPLES,
        progress=progress,
    )


def with_policy(setup: Setup, policy: str) -> Setup:
    routing = replace(setup.scenario.routing, policy=policy)
    return replace(setup, scenario=replace(setup.scenario, routing=routing))


def without_pools(setup: Setup) -> Setup:
    """The same replicas, open to all requests."""
    count = sum(pool.replicas for pool in setup.scenario.pools)
    return replace(setup, scenario=replace(setup.scenario, pools=(), pool_rules=(), replicas=count))

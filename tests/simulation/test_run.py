"""Simulated fleets: nothing gets lost, nothing is counted twice, and the same seed gives the same run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from penstock.config.autoscale import AutoscaleConfig
from penstock.config.routing import AdmissionConfig
from penstock.errors import ConfigError
from penstock.planning.autoscaling import Autoscaler
from penstock.routing.admission.queue import PREMIUM
from penstock.routing.dispatch import Resilience
from penstock.routing.hold import HoldLimits
from penstock.simulation.arrival import Arrival, Segment
from penstock.simulation.fleet import Fault, FleetSpec
from penstock.simulation.gateway import GatewaySpec
from penstock.simulation.record import Record, RequestRow
from penstock.simulation.replica import ReplicaSpec
from penstock.simulation.run import Simulation, simulate
from penstock.simulation.step_model import LinearSteps
from tests.simulation.traffic import Chats, Listed

STEPS = LinearSteps(step_s=0.01, context_token_s=2e-7)
REPLICA = ReplicaSpec(STEPS, 400, max_running=16, token_budget=1024)


def ask(at: float, tokens: int = 50, output: int = 20, id: int = 7, **more: object) -> Arrival:
    return Arrival(at, (Segment(id, tokens),), output, **more)  # type: ignore[arg-type]


def rows(record: Record) -> list[RequestRow]:
    return list(record.requests)


def only(record: Record) -> RequestRow:
    [row] = record.requests
    return row


def assert_conserved(simulation: Simulation, record: Record) -> None:
    """Every request ended once, tokens add up, and replicas hold nothing."""
    totals = record.totals
    ended = Counter(row.status for row in record.requests)
    assert totals.arrived == len(record.requests) == sum(ended.values())
    assert (ended["served"], ended["refused"]) == (totals.served, totals.refused)
    assert totals.output_tokens == sum(row.output_tokens for row in record.requests)
    firsts = sum(row.first_token is not None for row in record.requests)
    assert record.all_gaps().count == totals.output_tokens - firsts
    for unit in simulation.fleet.units:
        unit.replica.scheduler.check_idle()


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    steps = LinearSteps(step_s=0.01, prefill_token_s=0.001, decode_s=0.0, context_token_s=0.0)
    for overlap in (False, True):
        fleet = FleetSpec(ReplicaSpec(steps, 400, overlap=overlap))
        row = only(simulate(Listed([ask(1.0)]), fleet, GatewaySpec(hop_s=0.0), seconds=10.0))
        assert row.status == "served"
        assert row.output_tokens == 20
        assert row.ttft_s == pytest.approx(0.01 + 50 * 0.001)
        assert row.e2e_s == pytest.approx(0.01 + 50 * 0.001 + 19 * 0.01)
        assert row.longest_gap == pytest.approx(0.01)
        assert row.mean_gap_s == pytest.approx(0.01)


def test_an_arrival_waits_for_the_step_and_with_overlap_for_the_next() -> None:
    steps = LinearSteps(step_s=1.0, prefill_token_s=0.0, decode_s=0.0, context_token_s=0.0)
    for overlap, first in ((False, 7.0), (True, 8.0)):
        fleet = FleetSpec(ReplicaSpec(steps, 400, overlap=overlap))
        source = Listed([ask(0.0, output=50), ask(5.5, id=9)])
        record = simulate(source, fleet, GatewaySpec(hop_s=0.0), seconds=10.0)
        late = next(row for row in record.requests if row.at == 5.5)
        assert late.first_token == pytest.approx(first)


def test_the_next_turn_finds_its_conversation_in_the_cache() -> None:
    chats = Chats(rate=0.5, tenants=1, system=160, turns=3, think_s=0.1)
    record = simulate(chats, FleetSpec(REPLICA), seconds=20.0)
    later = [row for row in record.requests if row.label != "1"]
    assert later
    assert all(row.cached_tokens >= 160 for row in later)
    assert sum(row.cached_tokens for row in later) > 0.6 * sum(row.prompt_tokens for row in later)


def test_tenants_share_prefixes_only_when_told() -> None:
    requests = [ask(0.0, 320, tenant="a"), ask(5.0, 320, tenant="b")]
    for share, cached in ((False, 0), (True, 304)):
        record = simulate(Listed(requests), FleetSpec(REPLICA), GatewaySpec(share_prefixes=share), seconds=10.0)
        assert rows(record)[1].cached_tokens == cached


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two", "predicted"])
def test_nothing_is_lost_and_the_seed_decides(policy: str) -> None:
    def once(seed: int) -> Record:
        spec = FleetSpec(REPLICA, replicas=3, cold_start_s=2.0)
        faults = [Fault(0.8), Fault(1.2, back_after_s=None)]
        chats = Chats(rate=25.0, retries=2, stop=True)
        gateway = GatewaySpec(policy=policy, gateways=2, admission=AdmissionConfig(wait_s=1.0, queue=4))
        simulation = Simulation(chats, spec, gateway, 5.0, faults, seed)
        record = simulation.run()
        assert_conserved(simulation, record)
        return record

    first, again, other = once(1), once(1), once(2)
    assert rows(first) == rows(again)
    assert first.samples == again.samples
    assert rows(first) != rows(other)
    assert first.totals.failures == 2
    assert first.totals.failovers > 0
    assert first.totals.lost == first.totals.unfinished == 0
    assert first.totals.refused > 0
    assert any(row.attempt > 0 and row.first_at < row.at for row in first.requests)


def test_a_stream_continues_on_another_replica() -> None:
    steps = LinearSteps(step_s=0.01, prefill_token_s=0.001, decode_s=0.0, context_token_s=0.0)
    fleet = FleetSpec(ReplicaSpec(steps, 400), replicas=2, cold_start_s=100.0)
    source = Listed([ask(0.0, output=200), ask(0.0, output=200, id=8)])
    gateway = GatewaySpec(policy="round_robin", hop_s=0.0)
    record = simulate(source, fleet, gateway, seconds=10.0, faults=[Fault(1.0, target=0)])
    moved = next(row for row in record.requests if row.moves)
    assert moved.status == "served"
    assert moved.output_tokens == 200
    # It computes its prompt and what it had generated again: at most a step, then about 140 tokens.
    assert 0.1 < moved.longest_gap < 0.25
    assert record.totals.failures == 1


def test_a_node_takes_its_replicas_along_and_others_have_no_room_for_ever() -> None:
    fleet = FleetSpec(REPLICA, replicas=4, replicas_per_node=2, cold_start_s=1.0)
    simulation = Simulation(Chats(rate=20.0), fleet, GatewaySpec(), 6.0, [Fault(2.0, "node", target=1)])
    record = simulation.run()
    assert_conserved(simulation, record)
    assert record.totals.failures == 2
    assert record.totals.lost == 0
    assert min(sample.ready for sample in record.samples) == 2
    assert record.samples[-1].ready == 4


def test_without_a_replica_requests_are_parked_for_a_while() -> None:
    fleet = FleetSpec(REPLICA, cold_start_s=5.0)
    source = Listed([ask(0.0, output=100), ask(1.0, id=8), ask(9.0, id=9)])
    patient = GatewaySpec(resilience=Resilience(park_s=10.0))
    record = simulate(source, fleet, patient, seconds=12.0, faults=[Fault(0.5)])
    assert [row.status for row in record.requests] == ["served"] * 3
    assert max(row.longest_gap for row in record.requests) > 4.0
    hasty = GatewaySpec(resilience=Resilience(park_s=2.0, resume_s=3.0))
    record = simulate(source, fleet, hasty, seconds=12.0, faults=[Fault(0.5)])
    assert Counter((row.status, row.reason) for row in record.requests) == {
        ("refused", "unavailable"): 1,
        ("lost", "unavailable"): 1,
        ("served", ""): 1,
    }


def test_a_spot_replica_drains_on_notice_and_what_is_left_moves() -> None:
    fleet = FleetSpec(REPLICA, replicas=2, spot=0.5, notice_s=3.0, cold_start_s=2.0, price=4.0, spot_price=1.0)
    source = Listed([ask(0.0, output=150), ask(0.0, output=150, id=8), ask(0.1, output=600, id=9, tokens=100)])
    source.requests += [ask(0.2, output=600, id=10), *(ask(2.0, id=20 + n) for n in range(4))]
    gateway = GatewaySpec(policy="round_robin")
    record = simulate(source, fleet, gateway, seconds=20.0, faults=[Fault(1.0, "spot")])
    totals = record.totals
    assert totals.interruptions == 1
    assert totals.failures == 0
    assert totals.served == 8
    assert all(row.replica != "1" for row in record.requests if row.at == 2.0)
    assert sum(row.moves for row in record.requests) == 1, "the short one ended within the notice, the long one moved"
    assert record.samples[1].draining == 1
    # 20 s on demand; 4 s until the end of the notice and 19 s of the replacement, its cold start included, on spot.
    assert totals.gpu_seconds == pytest.approx(20.0)
    assert totals.spot_gpu_seconds == pytest.approx(4.0 + 19.0)
    assert totals.cost == pytest.approx((20.0 * 4.0 + 23.0 * 1.0) / 3600)


def test_interruptions_at_random_lose_nothing() -> None:
    fleet = FleetSpec(REPLICA, replicas=4, spot=1.0, interruptions_per_hour=900.0, notice_s=0.5, cold_start_s=1.0)
    simulation = Simulation(Chats(rate=10.0), fleet, GatewaySpec(), 10.0)
    record = simulation.run()
    assert_conserved(simulation, record)
    assert record.totals.interruptions > 3
    assert record.totals.lost == 0


def test_a_request_that_never_fits_is_refused() -> None:
    record = simulate(Listed([ask(0.0, 7000), ask(0.0, 100)]), FleetSpec(REPLICA), seconds=5.0)
    assert [(row.status, row.reason) for row in record.requests] == [("refused", "too_long"), ("served", "")]


def test_overload_is_shed_with_a_time_to_retry_and_premium_goes_first() -> None:
    crowd = [ask(0.01 * n, output=100, id=n, tenant=f"t{n % 3}") for n in range(400)]
    crowd += [ask(2.0 + 0.05 * n, id=1000 + n, tenant="p", rank=PREMIUM) for n in range(20)]
    source = Listed(sorted(crowd, key=lambda arrival: arrival.at))
    gateway = GatewaySpec(admission=AdmissionConfig(wait_s=2.0))
    record = simulate(source, FleetSpec(replace(REPLICA, max_running=8)), gateway, seconds=10.0)
    refused = [row for row in record.requests if row.status == "refused"]
    assert {row.reason for row in refused} >= {"load_shed"}
    assert all(row.retry_after_s is not None and row.retry_after_s >= 0 for row in refused)
    assert len(source.turned_away) == len(refused) > 100
    premium = [row for row in record.requests if row.tenant == "p"]
    assert sum(row.status == "served" for row in premium) > 15
    assert max(row.queued_s or 0.0 for row in record.requests) <= 2.0 + 1e-9


def test_the_autoscaler_follows_the_load_and_waits_for_cold_starts() -> None:
    config = AutoscaleConfig(min=1, max=6, stabilisation_s=10.0, scale_down_cooldown_s=5.0, scale_up_cooldown_s=2.0)
    fleet = FleetSpec(REPLICA, cold_start_s=3.0, autoscaler=Autoscaler(config), autoscale_every_s=1.0)
    busy = [ask(5 + 0.03 * n, output=80, id=n) for n in range(500)]
    record = simulate(Listed(busy), fleet, seconds=90.0)
    most = max(sample.ready for sample in record.samples)
    assert most > 2
    assert record.samples[-1].ready == 1
    first_start = next(at for at, text in record.notes if "starts" in text)
    assert all(sample.ready == 1 for sample in record.samples if sample.at < first_start + 3.0)
    assert record.totals.gpu_seconds < 6 * 90.0
    assert any("replicas:" in text for _, text in record.notes)


def test_scale_to_zero_wakes_on_demand_and_holds_requests() -> None:
    config = AutoscaleConfig(min=0, max=2, idle_s=5.0, scale_down_cooldown_s=1.0, stabilisation_s=1.0)
    fleet = FleetSpec(REPLICA, 0, cold_start_s=15.0, autoscaler=Autoscaler(config), autoscale_every_s=1.0)
    requests = [ask(10.0), ask(60.0, id=9), ask(60.1, id=10), ask(60.2, id=11)]
    record = simulate(Listed(requests), fleet, GatewaySpec(hold=HoldLimits(20.0, 2)), seconds=100.0)
    assert [row.status for row in record.requests] == ["served", "refused", "served", "served"]
    served = [row for row in record.requests if row.status == "served"]
    assert all(14.5 <= (row.ttft_s or 0.0) < 17.5 for row in served)
    assert rows(record)[1].reason == "queue_full"
    assert 14.0 < (rows(record)[1].retry_after_s or 0.0) <= 15.0
    assert record.samples[-1].ready == 0
    assert record.totals.gpu_seconds < 60.0


def test_a_model_that_starts_too_slowly_refuses_and_starts_all_the_same() -> None:
    config = AutoscaleConfig(min=0, max=2, idle_s=50.0)
    fleet = FleetSpec(REPLICA, 0, cold_start_s=30.0, autoscaler=Autoscaler(config), autoscale_every_s=1.0)
    gateway = GatewaySpec(hold=HoldLimits(5.0, 10))
    record = simulate(Listed([ask(10.0), ask(42.0, id=9)]), fleet, gateway, seconds=50.0)
    assert [(row.status, row.reason) for row in record.requests] == [("refused", "queue_timeout"), ("served", "")]
    assert rows(record)[0].retry_after_s == pytest.approx(30.0)


def test_a_thousand_replicas() -> None:
    fleet = FleetSpec(REPLICA, replicas=1000)
    gateway = GatewaySpec(policy="power_of_two")
    record = simulate(Chats(rate=30.0, turns=1), fleet, gateway, seconds=2.0)
    assert record.totals.served == record.totals.arrived > 40
    assert len({row.replica for row in record.requests}) > 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReplicaSpec(STEPS, 0),
        lambda: FleetSpec(REPLICA, replicas=-1),
        lambda: FleetSpec(REPLICA, spot=1.5),
        lambda: simulate(Listed([]), FleetSpec(REPLICA), seconds=0.0),
    ],
)
def test_impossible_fleets_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def beats(seconds: float, rate: float) -> None:
    """The workload of the former `bench replica-policies`."""
    figures = {}
    for policy in ("predicted", "round_robin", "random"):
        chats = Chats(1, rate, tenants=12, system=800, question=80, answer=120, turns=5, think_s=3.0)
        replica = ReplicaSpec(LinearSteps(), 4096, max_running=64, token_budget=1024, overlap=False)
        gateway = GatewaySpec(policy=policy, admission=AdmissionConfig(enabled=False))
        record = simulate(chats, FleetSpec(replica, replicas=4), gateway, seconds=seconds, drain_s=0.0)
        ttft = sorted(row.ttft_s for row in record.requests if row.ttft_s is not None)
        hits = record.totals.engine_cached_tokens / record.totals.engine_prompt_tokens
        figures[policy] = (hits, ttft[len(ttft) // 2], ttft[len(ttft) * 99 // 100], record.totals.output_tokens)
    ours = figures.pop("predicted")
    for policy, theirs in figures.items():
        assert ours[0] > theirs[0], policy
        assert ours[1] < theirs[1], policy
        assert ours[2] < theirs[2], policy
        assert ours[3] > theirs[3], policy


def test_our_policy_beats_round_robin_and_random() -> None:
    beats(seconds=6.0, rate=28.0)


def test_every_policy_gets_the_same_conversations() -> None:
    """Otherwise the tokens that one yields more than another may be those of other clients."""
    turns = []
    for policy in ("predicted", "round_robin"):
        chats = Chats(rate=4.0, turns=3)
        record = simulate(chats, FleetSpec(REPLICA, replicas=2), GatewaySpec(policy=policy), seconds=4.0)
        assert record.totals.served == record.totals.arrived
        turns.append(Counter((row.tenant, row.label, row.prompt_tokens, row.output_tokens) for row in record.requests))
    assert turns[0] == turns[1]


@pytest.mark.slow
def test_our_policy_beats_them_at_length() -> None:
    beats(seconds=120.0, rate=12.0)

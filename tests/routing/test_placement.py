"""Pools and regions, the pure parts: where a request may run, what a reservation keeps, which region is chosen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.pools import PoolConfig, PoolRuleConfig, ReserveConfig
from penstock.config.routing import RegionRuleConfig
from penstock.errors import ConfigError
from penstock.identity import Caller
from penstock.identity.data_rules import DataRules
from penstock.identity.labels import Labels, demand_of
from penstock.protocol.errors import DataRuleForbids, InvalidRequest
from penstock.routing.admission.fair_queue import FairQueue
from penstock.routing.admission.lanes import COMMON, LaneLoad, lanes_of
from penstock.routing.admission.queue import Capacity, QueueEntry
from penstock.routing.place import ReplicaPlace, labelled_endpoint, split_endpoint
from penstock.routing.placement import Placement, PlacementFacts, Placer
from penstock.routing.regions import RegionChoice

POOLS = ("interactive", "batch", "long")
names = st.sampled_from(POOLS)
rules = st.builds(
    PoolRuleConfig,
    pool=names,
    spill=st.lists(names, max_size=2, unique=True).map(tuple),
    tenants=st.sampled_from([(), ("acme",)]),
    tiers=st.sampled_from([(), ("gold",)]),
    classes=st.sampled_from([(), ("batch",), ("premium", "standard")]),
    min_prompt_tokens=st.sampled_from([None, 100, 5000]),
    batches=st.sampled_from([None, True, False]),
)
facts = st.builds(
    PlacementFacts,
    tenant=st.sampled_from(["acme", "other"]),
    tier=st.sampled_from(["gold", "free"]),
    priority=st.sampled_from(["premium", "standard", "batch"]),
    prompt_tokens=st.integers(1, 9000),
    batch_line=st.booleans(),
)


def placer(*rules: PoolRuleConfig, labels: dict[str, tuple[tuple[str, str], ...]] | None = None) -> Placer:
    return Placer([PoolConfig(name=name, labels=(labels or {}).get(name, ())) for name in POOLS], rules)


def holds(rule: PoolRuleConfig, about: PlacementFacts) -> bool:
    """The conditions of a rule, once more and in other words."""
    wanted = [
        not rule.tenants or about.tenant in rule.tenants,
        not rule.tiers or about.tier in rule.tiers,
        not rule.classes or about.priority in rule.classes,
        about.prompt_tokens >= (rule.min_prompt_tokens or 0),
        rule.batches in (None, about.batch_line),
    ]
    return all(wanted)


@settings(max_examples=20, deadline=None)
@given(st.lists(rules, max_size=4), facts, st.dictionaries(names, st.sampled_from([50, 4000, 100_000])))
def test_a_request_is_placed_by_the_first_rule_whose_pool_can_hold_it(
    given_rules: list[PoolRuleConfig], about: PlacementFacts, windows: dict[str, int]
) -> None:
    placed = placer(*given_rules).place(about, windows)
    matching = [rule for rule in given_rules if holds(rule, about)]
    fitting = [rule for rule in matching if windows.get(rule.pool, about.prompt_tokens + 1) > about.prompt_tokens]
    if fitting:
        assert placed.pools[0] == fitting[0].pool and set(placed.pools[1:]) <= set(fitting[0].spill)
        assert all(windows.get(pool, about.prompt_tokens + 1) > about.prompt_tokens for pool in placed.pools)
    elif matching:
        assert placed.window is not None and placed.window <= about.prompt_tokens, "so it is told how much would fit"
    else:
        assert placed.pools == ("interactive",), "the first pool, and never another one"
    assert placed.why


def demands(**labels: str) -> PlacementFacts:
    return PlacementFacts(demand=demand_of(labels.items(), "tenant acme"))


def test_the_data_rule_of_a_tenant_counts_whatever_the_pool() -> None:
    rules = DataRules(regions=(RegionRuleConfig(tenants=("acme",), regions=("eu",)),))
    acme, other = (rules.demand(Caller(tenant)) for tenant in ("acme", "other"))
    assert placer().place(PlacementFacts(demand=acme)).regions == ("eu",)
    assert placer().place(PlacementFacts(demand=other)).regions == ()
    assert Placer().place(demands(region="eu|ch")) == Placement((), ("eu", "ch"), "only in eu, ch")
    with pytest.raises(DataRuleForbids, match="No region"):
        Placer().place(PlacementFacts(demand=acme.narrowed(demands(region="us").demand)))


def test_pools_without_a_demanded_label_are_passed_over() -> None:
    found = placer(
        PoolRuleConfig(pool="batch", tiers=("free",), spill=("interactive",)),
        labels={"batch": (("certified", "yes"),), "long": (("certified", "yes"),)},
    )
    facts = demands(certified="yes")
    assert found.place(facts).pools == ("batch",), "the first one that is certified"
    assert found.place(PlacementFacts(tier="free", demand=facts.demand)).pools == ("batch",), "and no spill"
    assert found.place(demands(external="false")).pools == ("interactive",), "what runs here is not external"
    with pytest.raises(DataRuleForbids, match="certified=no"):
        found.place(demands(certified="no"))


def test_a_model_meets_a_demand_if_one_of_its_places_does() -> None:
    found = Placer([PoolConfig(name="a", labels=(("region", "eu"),)), PoolConfig(name="b")], (), Labels({"gpu": "own"}))
    demand = demands(region="us", gpu="own", external="false").demand
    assert [one.label for one in found.unmet(demand, [("a", "eu")])] == ["region"]
    assert not found.unmet(demand, [("b", "us")])
    assert found.labels_of("a") == {"region": "eu", "gpu": "own", "external": "false"}
    assert found.labels_of("a", "us")["region"] == "us", "where a replica says its region, that counts"


def test_only_a_pool_with_such_a_rule_can_be_asked_for() -> None:
    found = placer(PoolRuleConfig(pool="batch", asked=True), PoolRuleConfig(pool="interactive"))
    assert found.place(PlacementFacts(asked="batch")).pools == ("batch",)
    assert found.place(PlacementFacts()).pools == ("interactive",)
    with pytest.raises(InvalidRequest, match="those that can be: batch"):
        found.place(PlacementFacts(asked="long"))
    with pytest.raises(InvalidRequest, match="none can"):
        Placer().place(PlacementFacts(asked="long"))


RESERVES = (
    ReserveConfig(tenant="acme", slots=3),
    ReserveConfig(tier="gold", share=0.25, lend=True),
    ReserveConfig(priority="premium", slots=2, lend=True),
)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 12), st.randoms(use_true_random=False), st.sets(st.integers(0, 2), min_size=1))
def test_reserved_slots_are_never_used_by_others_and_the_pool_is_never_overrun(
    slots: int, rng: random.Random, chosen: set[int]
) -> None:
    """The lanes of a pool as gateways use them: requests come and go in any order."""
    reserves = [RESERVES[index] for index in sorted(chosen)]
    lanes = {name: FairQueue("fcfs") for name in (COMMON, *(reserve.name for reserve in reserves))}
    held: dict[str, str] = {}
    waiting: set[str] = set()

    def capacity(name: str) -> Capacity:
        loads = {name: LaneLoad(lane.held[0], int(lane.waits)) for name, lane in lanes.items()}
        return lanes_of(Capacity(slots, None), reserves, loads)[name]

    for number in range(40):
        lane = rng.choice(sorted(lanes))
        if held and rng.random() < 0.4:
            id = rng.choice(sorted(held))
            lane = held.pop(id)
            granted = lanes[lane].release(id, 1.0, capacity(lane), number).granted
        elif rng.random() < 0.2:
            granted = lanes[lane].tick(capacity(lane), number).granted
        else:
            entry = QueueEntry(str(number), lane or "other", slots=rng.choice([1, 1, 2]), arrived=number)
            waiting.add(entry.id)
            granted = lanes[lane].enter(entry, capacity(lane), 100, number).granted
        held |= dict.fromkeys(granted, lane)
        now = {name: lane.held[0] for name, lane in lanes.items()}
        assert sum(now.values()) <= slots
        strict = sum(min(one.slots or 0, slots) for one in reserves if not one.lend)
        assert now[COMMON] <= slots - strict, "what is not lent is kept free for its owner"


def test_slots_are_lent_only_while_their_owner_does_not_wait() -> None:
    lent = [ReserveConfig(tenant="acme", slots=4, lend=True)]
    name = lent[0].name

    def slots(**loads: LaneLoad) -> tuple[int | None, int | None]:
        found = lanes_of(
            Capacity(10, 1000), lent, {COMMON: loads.get("common", LaneLoad()), name: loads.get("own", LaneLoad())}
        )
        return found[COMMON].slots, found[name].slots

    assert slots() == (10, 4), "idle: everything is for everybody"
    assert slots(own=LaneLoad(3)) == (7, 4)
    assert slots(common=LaneLoad(9), own=LaneLoad(1, 1)) == (9, 1), "three are lent, and come back as they are free"
    assert slots(common=LaneLoad(6), own=LaneLoad(4, 1)) == (6, 4)
    kept = lanes_of(Capacity(10, 1000), [ReserveConfig(tenant="acme", slots=4)], {})
    assert (kept[COMMON].slots, kept[COMMON].kv_tokens, kept["acme//"].kv_tokens) == (6, 600, 400)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["eu", "us", "asia"]), st.floats(0, 3), st.floats(0, 0.3)), min_size=1, max_size=6
    )
)
def test_a_farther_region_is_used_only_for_a_gain_beyond_its_latency(found: list[tuple[str, float, float]]) -> None:
    choice = RegionChoice("eu", gain_s=0.05)
    picked = choice.choose([r for r, _, _ in found], [w for _, w, _ in found], [d for _, _, d in found], 0.0)
    region = found[picked[0]][0]
    assert picked == [index for index, one in enumerate(found) if one[0] == region]
    total = {r: min(w + d for name, w, d in found if name == r) for r, _, _ in found}
    nearest = min({r for r, _, _ in found}, key=lambda r: (min(d for n, _, d in found if n == r), r != "eu", r))
    assert region == nearest or total[nearest] - total[region] > 0.05
    assert total[region] <= min(total.values()) + 0.05 + 1e-9


def test_regions_are_left_late_and_returned_to_when_they_have_settled() -> None:
    choice = RegionChoice("eu", gain_s=0.1, return_s=10.0)
    both, trips = ["eu", "us"], [0.002, 0.08]

    def chosen(eu_wait: float, now: float) -> str:
        return both[choice.choose(both, [eu_wait, 0.0], trips, now)[0]]

    choice.seen(both, 0.0)
    assert [chosen(wait, 1.0) for wait in (0.0, 0.15, 0.17, 0.25, 0.15, 0.11)] == ["eu", "eu", "eu", "us", "us", "eu"]
    choice.seen(["us"], 2.0)
    assert choice.choose(["us"], [0.0], [0.08], 2.0) == [0]
    choice.seen(both, 5.0)
    assert [chosen(0.0, now) for now in (5.0, 14.9, 15.1)] == ["us", "us", "eu"]


def test_places_of_endpoints_that_are_given_by_hand() -> None:
    place = ReplicaPlace("batch", "eu", "a")
    assert split_endpoint(labelled_endpoint("tcp://h:1", place)) == ("tcp://h:1", place)
    assert split_endpoint("ipc:///run/x") == ("ipc:///run/x", ReplicaPlace())
    with pytest.raises(ConfigError, match="unknown label 'pol'"):
        split_endpoint("tcp://h:1?pol=batch")

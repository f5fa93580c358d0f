"""Where replicas go: nothing that runs is moved, nothing is placed where it does not fit, zones and spot shares."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.placement import SPOT, Host, Need, Placement, place
from penstock.fleet.rebalance import next_move

MODELS = ("m", "n")


def total(placement: Placement, model: str) -> int:
    return sum(counts.get(model, 0) for counts in placement.counts.values())


def spread(hosts: list[Host], *needs: Need) -> dict[str, dict[str, int]]:
    return place(hosts, needs, {}, {}).counts


def test_replicas_spread_over_zones_then_machines() -> None:
    hosts = [Host("a", 4, zone="1"), Host("b", 4, zone="1"), Host("c", 4, zone="2")]
    assert spread(hosts, Need("m", 2)) == {"a": {"m": 1}, "b": {}, "c": {"m": 1}}
    assert spread(hosts, Need("m", 4)) == {"a": {"m": 1}, "b": {"m": 1}, "c": {"m": 2}}


def test_what_does_not_fit_is_missing() -> None:
    hosts = [Host("a", 2, devices=1, memory=100), Host("b", 2, labels=frozenset(["big"]), memory=100)]
    assert place(hosts, [Need("m", 3, devices=1)], {}, {}).missing == {"m": 2}
    assert spread(hosts, Need("m", 1, labels=frozenset(["big"]))) == {"a": {}, "b": {"m": 1}}
    assert place(hosts, [Need("m", 4, memory=60)], {}, {}) == Placement({"a": {"m": 1}, "b": {"m": 1}}, {"m": 2})


def test_reserved_cores_limit_a_machine() -> None:
    hosts = [Host("a", 8, cpus=8), Host("b", 8, cpus=4)]
    assert place(hosts, [Need("m", 4, cpus=4)], {}, {}) == Placement({"a": {"m": 2}, "b": {"m": 1}}, {"m": 1})


def test_scarce_room_is_shared() -> None:
    assert spread([Host("a", 2)], Need("m", 4), Need("n", 1)) == {"a": {"m": 1, "n": 1}}


def test_a_spot_share_goes_to_spot_machines() -> None:
    hosts = [Host("a", 4), Host("s", 4, labels=frozenset([SPOT]))]
    assert spread(hosts, Need("m", 4, spot=2)) == {"a": {"m": 2}, "s": {"m": 2}}
    assert spread(hosts, Need("m", 2)) == {"a": {"m": 2}, "s": {}}


def test_a_machine_that_leaves_keeps_its_replicas_until_others_are_ready() -> None:
    hosts = [Host("a", 2, leaving=True), Host("b", 2)]
    need, there = [Need("m", 1)], {"a": {"m": 1}}
    first = place(hosts, need, there, there)
    assert first.counts == {"a": {"m": 1}, "b": {"m": 1}}
    assert place(hosts, need, first.counts, {"a": {"m": 1}, "b": {"m": 1}}).counts == {"a": {}, "b": {"m": 1}}


def test_what_cannot_be_replaced_stays_only_while_its_machine_holds_out() -> None:
    there = {"a": {"m": 1}}
    assert place([Host("a", 2, leaving=True)], [Need("m", 1)], there, there).counts == {"a": {}}
    assert place([Host("a", 2, leaving=True, holds_out=True)], [Need("m", 1)], there, there).counts == there


def test_a_machine_that_runs_what_it_was_told_counts_and_stays() -> None:
    hosts = [Host("a", 4, fixed=True), Host("b", 4)]
    assert place(hosts, [Need("m", 2)], {"a": {"m": 1}}, {}).counts == {"a": {"m": 1}, "b": {"m": 1}}
    assert place(hosts, [Need("m", 0)], {"a": {"m": 1}}, {}).counts == {"a": {"m": 1}, "b": {}}


hosts_of = st.lists(
    st.builds(
        Host,
        name=st.sampled_from("abcde"),
        room=st.integers(0, 4),
        devices=st.integers(0, 2),
        zone=st.sampled_from(["", "1", "2"]),
        labels=st.sampled_from([frozenset(), frozenset([SPOT])]),
        unable=st.sampled_from([frozenset(), frozenset(["m"])]),
        leaving=st.booleans(),
    ),
    unique_by=lambda host: host.name,
)
needs_of = st.tuples(
    st.builds(Need, slot=st.just("m"), replicas=st.integers(0, 6), spot=st.integers(0, 2)),
    st.builds(Need, slot=st.just("n"), replicas=st.integers(0, 6), devices=st.integers(0, 1)),
)


@settings(max_examples=20, deadline=None)
@given(hosts=hosts_of, needs=needs_of, lost=st.sampled_from("abcde"))
def test_in_any_fleet(hosts: list[Host], needs: tuple[Need, ...], lost: str) -> None:
    first = place(hosts, needs, {}, {})
    for host in hosts:
        counts = first.counts[host.name]
        assert sum(counts.values()) <= (0 if host.leaving else host.room)
        assert counts.get("n", 0) * needs[1].devices <= host.devices
        assert not (counts.get("m") and "m" in host.unable)
    for need in needs:
        assert total(first, need.slot) + first.missing.get(need.slot, 0) == need.replicas
    assert place(hosts, needs, first.counts, first.counts) == first, "it is stable"

    rest = [host for host in hosts if host.name != lost]
    after = place(rest, needs, first.counts, first.counts)
    for host in rest:
        for model in MODELS:
            assert after.counts[host.name].get(model, 0) >= first.counts[host.name].get(model, 0), "nothing is moved"
    back = place(hosts, needs, after.counts, after.counts)
    for host in rest:
        for model in MODELS:
            assert back.counts[host.name].get(model, 0) >= after.counts[host.name].get(model, 0)
    for need in needs:
        assert total(back, need.slot) <= need.replicas, "a machine that comes back is not doubled"


@settings(max_examples=30, deadline=None)
@given(hosts=hosts_of, needs=needs_of)
def test_moves_come_to_an_end_and_keep_every_replica(hosts: list[Host], needs: tuple[Need, ...]) -> None:
    counts = place(hosts, needs, {}, {}).counts
    totals = {need.slot: total(Placement(counts), need.slot) for need in needs}
    for _ in range(60):
        move = next_move(hosts, needs, counts)
        if move is None:
            break
        counts[move.source][move.slot] -= 1
        counts[move.target][move.slot] = counts[move.target].get(move.slot, 0) + 1
        again = place(hosts, needs, counts, counts)
        assert {need.slot: total(again, need.slot) for need in needs} == totals
        counts = again.counts
    else:
        raise AssertionError("it never ends")


def test_replicas_move_to_where_fewer_are() -> None:
    hosts = [Host("a", 8, cpus=4), Host("b", 8, cpus=4)]
    needs = [Need("m", 1), Need("n", 1), Need("o", 1), Need("p", 2)]
    crowded = {"a": {"m": 1, "n": 1, "o": 1, "p": 2}, "b": {}}
    first = next_move(hosts, needs, crowded)
    assert first is not None and (first.slot, first.source, first.target) == ("p", "a", "b")
    fuller = next_move(hosts, needs, {"a": {"m": 1, "n": 1, "o": 1, "p": 1}, "b": {"p": 1}})
    assert fuller is not None and fuller.slot in ("m", "n", "o") and "more engines" in fuller.why
    even = {"a": {"m": 1, "n": 1, "p": 1}, "b": {"o": 1, "p": 1}}
    assert next_move(hosts, needs, even) is None
    uneven = [Host("a", 8, cpus=4, busy=0.9), Host("b", 8, cpus=4, busy=0.1)]
    assert "busier" in str(next_move(uneven, needs, even))
    assert next_move(uneven, [Need("m", 1), Need("p", 1, labels=frozenset(["x"]))], {"a": {"p": 1}, "b": {}}) is None

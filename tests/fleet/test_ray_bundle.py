"""What replicas and gateways reserve on a Ray cluster, and where they go."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from penstock.config import Config, ModelConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.cluster import ClusterConfig
from penstock.config.fleet import FleetConfig
from penstock.config.load import conflicts
from penstock.config.placement import PlacementConfig
from penstock.config.pools import PoolConfig
from penstock.config.resources import ResourcesConfig
from penstock.config.schema import CountersConfig, ServerConfig, StoreConfig
from penstock.config.variants import variant, variant_at
from penstock.errors import ConfigError
from penstock.fleet.ray import cluster
from penstock.fleet.ray.bundle import (
    Bundle,
    Node,
    engine_bundle,
    engine_config,
    gateway_bundle,
    placed,
    problems,
    without_room,
)
from penstock.fleet.ray.choice import Reserved, preferred_node

CPU = [Node("a", "a", "10.0.0.1", {"CPU": 8, "memory": 2**34}), Node("b", "b", "10.0.0.2", {"CPU": 4})]
GPU = [Node("g", "g", "10.0.0.3", {"CPU": 32, "GPU": 8})]


def settings_of(model: ModelConfig, replica: int) -> ModelConfig:
    return variant_at(model, replica).of(model)


def bundle(nodes: list[Node], replica: int = 0, **settings: object) -> Bundle:
    return engine_bundle(Config(), settings_of(replace(ModelConfig(name="m"), **settings), replica), nodes)


def test_a_grid_is_one_bundle() -> None:
    assert bundle(GPU, tensor_parallel=4, pipeline_parallel=2) == Bundle(8.0, 8.0)
    assert bundle(CPU, tensor_parallel=2, threads=3) == Bundle(6.0)
    assert bundle(GPU, 1, replica_grids=("4x1", "1x2")) == Bundle(2.0, 2.0)


def test_what_is_configured_counts() -> None:
    asked = ResourcesConfig(cpus=3.0, gpus=0.5, memory=2**30, labels=("nvme", "license=2"))
    found = bundle(GPU, resources=asked)
    assert found.resources == {"CPU": 3.0, "GPU": 0.5, "memory": 2.0**30, "nvme": 0.001, "license": 2.0}
    assert bundle(GPU, memory_share=0.25).gpus == 0.25
    assert bundle(GPU, device="cpu", threads=2) == Bundle(2.0)
    assert bundle(CPU, device="cuda") == Bundle(1.0, 1.0)
    assert ResourcesConfig(gpus=1.5, labels=("=1", "x=0")).problems() == [
        "gpus: more than one must be a whole number",
        "labels: '=1' is not NAME or NAME=AMOUNT",
        "labels: 'x=0' is not NAME or NAME=AMOUNT",
    ]


def test_a_replica_on_cpu_leaves_room_for_a_gateway_and_uses_what_it_reserves() -> None:
    found = bundle(CPU, tensor_parallel=2)
    assert found == Bundle(6.0)  # 8 cores, less one for the gateway, in two equal parts
    model = placed(replace(ModelConfig(name="m"), tensor_parallel=2), found)
    assert (model.device, model.threads) == ("cpu", 3)
    assert placed(ModelConfig(name="m"), Bundle(1.0, 1.0)).device == "cuda"
    assert gateway_bundle(Config(server=ServerConfig(workers=3))) == Bundle(3.0)
    assert gateway_bundle(Config(cluster=ClusterConfig(gateway_cpus=0.5))) == Bundle(0.5)


def test_each_replica_gets_the_settings_of_its_pool_and_its_turn() -> None:
    pools = (PoolConfig(name="chat", replicas=2, threads=3), PoolConfig(name="batch", replica_grids=("2x1", "1x1")))
    model = replace(ModelConfig(name="m"), pools=pools, threads=1, device="cpu")
    found = [settings_of(model, replica) for replica in range(3)]
    assert [engine_bundle(Config(), each, CPU).cpus for each in found] == [3.0, 3.0, 2.0]
    assert variant(model, "chat", 7).of(model).threads == 3
    roles = replace(ModelConfig(name="m"), replica_roles=("prefill", "decode"))
    assert [variant_at(roles, replica).role for replica in range(3)] == ["prefill", "decode", "prefill"]
    # What an engine is started with is a valid configuration, also where models refer to each other.
    other = ModelConfig(name="other", fallback=("m",))
    config = engine_config(Config(models=(model, other)), placed(found[2], Bundle(2.0)))
    assert conflicts(config) == []
    assert [each.name for each in config.models] == ["m", "other"]


def test_what_no_node_can_hold_is_said() -> None:
    large = replace(ModelConfig(name="m"), tensor_parallel=16, autoscale=AutoscaleConfig(max=2))
    assert without_room(Config(models=(large,)), GPU) == ["no node has room for a replica of m (16 CPUs, 16 GPUs)"]
    assert without_room(Config(models=(replace(ModelConfig(name="m"), threads=2),)), CPU) == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"placement": PlacementConfig(machines=("local", "b"))}, "placement"),
        ({"replica_devices": ("cuda:0",)}, "replica_devices"),
        ({"device": "cuda:1"}, "device"),
        ({"time_slice": "one"}, "time_slice"),
    ],
)
def test_settings_of_one_machine_are_refused(settings: dict[str, object], word: str) -> None:
    config = Config(models=(replace(ModelConfig(name="m"), **settings),))
    (problem,) = problems(config, CPU[:1])
    assert word in problem


def test_several_nodes_need_shared_state() -> None:
    one = Config(models=(ModelConfig(name="m"),))
    assert problems(one, CPU[:1]) == []
    assert ["store.url" in problem for problem in problems(one, CPU)] == [True]
    shared = replace(one, store=StoreConfig(url="postgresql://db/penstock"))
    assert problems(shared, CPU) == []
    two = replace(shared, cluster=ClusterConfig(gateways=2))
    assert ["counters.url" in problem for problem in problems(two, CPU)] == [True]
    two = replace(two, counters=CountersConfig(url="redis://redis"))
    assert problems(two, CPU) == []
    assert ["cluster.gateways" in problem for problem in problems(two, CPU[:1])] == [True]


def test_replicas_of_a_model_are_spread() -> None:
    nodes, need, taken = CPU, Bundle(1.0), []
    for expected in ("a", "b", "a", "b"):
        found = preferred_node(need, "m", nodes, taken, "spread")
        assert found == expected
        taken.append(Reserved(found, need, "m"))
    assert preferred_node(need, "other", nodes, taken, "spread") == "a"  # 6 of 8 are free there, and 2 of 4 on b


def test_packed_replicas_fill_the_fullest_node_first() -> None:
    taken = [Reserved("b", Bundle(1.0))]
    for expected in ("b", "b", "b", "a"):
        found = preferred_node(Bundle(1.0), "m", CPU, taken, "pack")
        assert found == expected
        taken.append(Reserved(found, Bundle(1.0), "m"))


def test_a_replica_of_a_lost_node_goes_where_there_is_room_and_waits_where_there_is_none() -> None:
    taken = [Reserved("a", Bundle(4.0), "m"), Reserved("lost", Bundle(4.0), "m"), Reserved("", Bundle(9.0), "m")]
    assert preferred_node(Bundle(4.0), "m", CPU, taken, "spread") == "b"
    assert preferred_node(Bundle(5.0), "m", CPU, taken, "spread") == ""
    assert preferred_node(Bundle(1.0, 1.0), "m", CPU, [], "spread") == ""


def test_redis_is_not_where_ray_nodes_meet() -> None:
    config = Config(models=(ModelConfig(name="m"),), fleet=FleetConfig(url="redis://redis"))
    assert ["fleet.url" in problem for problem in problems(config, CPU[:1])] == [True]


def test_without_the_extra_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "penstock\[ray\]"'):
        cluster.connect("auto")

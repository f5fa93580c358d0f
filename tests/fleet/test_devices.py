"""GPUs of a machine: whole ones, neighbours for grids, certain ones, shares, and one for models that take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import ModelConfig
from penstock.config.fleet import FleetConfig
from penstock.config.load import check_model
from penstock.config.resources import ResourcesConfig
from penstock.config.variants import Variant, revision, slot, variant_at, variants, whole_revision
from penstock.errors import PenstockError
from penstock.fleet.devices import Claim, claim, packed
from penstock.fleet.machine_site import MachineSite
from penstock.fleet.records import Device, MachineRecord
from penstock.supervisor.unit import Unit
from tests.ports import free_port

GPU = ModelConfig(name="m", device="cuda")


def test_what_a_replica_claims() -> None:
    assert claim(replace(GPU, device="cpu"), 8) == Claim()
    assert claim(replace(GPU, device="auto"), 0) == Claim() and claim(replace(GPU, device="auto"), 2) == Claim(1)
    assert claim(replace(GPU, tensor_parallel=2, pipeline_parallel=2), 8) == Claim(4)
    assert claim(replace(GPU, device="cuda:2", tensor_parallel=2), 8) == Claim(2, (2, 3))
    assert claim(replace(GPU, devices=("cuda:1", "cuda:1"), tensor_parallel=2), 8) == Claim(1, (1,))
    assert claim(replace(GPU, memory_share=0.25), 8) == Claim(1, share=0.25)
    assert claim(replace(GPU, resources=ResourcesConfig(gpus=0.5)), 8) == Claim(1, share=0.5)
    assert claim(replace(GPU, resources=ResourcesConfig(gpus=0)), 8) == Claim()


def test_what_fits_beside_each_other() -> None:
    assert packed([Claim(2), Claim(1), Claim(1)], 4) and not packed([Claim(2), Claim(2), Claim(1)], 4)
    assert packed([Claim(1), Claim(1, (0,)), Claim(2)], 4), "the certain one first"
    assert not packed([Claim(1, (0,)), Claim(1, (0,))], 4) and not packed([Claim(1, (4,))], 4)
    assert packed([Claim(1, share=0.5)] * 4 + [Claim(2)], 4) and not packed([Claim(1, share=0.6)] * 3, 2)
    assert packed([Claim(1, group="g")] * 3, 1), "they have it in turn"


def test_the_engines_of_a_machine_get_devices_of_their_own() -> None:
    first = 20_000 + free_port() % 10_000
    config = FleetConfig(url="redis://x", ports=f"{first}-{first + 50}")
    site = MachineSite(config, MachineRecord(name="a", address="127.0.0.1", devices=[Device("gpu", 80)] * 4))
    running: list[Unit] = []

    def start(model: ModelConfig) -> str | None:
        site.endpoints()
        found = site.device(model)
        running.append(Unit(f"{len(running)}", [], model=model.name))
        site.started(running[-1])
        return found

    assert start(GPU) == "cuda:0"
    assert start(replace(GPU, memory_share=0.5)) == "cuda:1"
    assert start(replace(GPU, memory_share=0.5)) == "cuda:1", "what is shared already comes first"
    assert start(replace(GPU, tensor_parallel=2)) == "cuda:2"
    with pytest.raises(PenstockError, match="no 1 free GPUs"):
        start(GPU)
    running[0].dismissed = True
    assert start(replace(GPU, time_slice="g")) == "cuda:0" and start(replace(GPU, time_slice="g")) == "cuda:0"
    assert start(replace(GPU, device="cpu")) == "cpu"


def test_variants_follow_from_the_number_of_replicas() -> None:
    model = check_model({"name": "m", "replicas": 3, "replica_roles": ["prefill", "decode"], "replica_grids": ["2x1"]})
    assert variants(model, "", 3) == {Variant(role="prefill", grid="2x1"): 2, Variant(role="decode", grid="2x1"): 1}
    assert slot("m", variant_at(model, 0)) == "m (prefill, 2x1)" and slot("m") == "m"
    pooled = check_model(
        {
            "name": "m",
            "pools": [{"name": "a", "replicas": 2, "replica_devices": ["cuda:0", "cuda:1"]}, {"name": "b"}],
            "pool_rules": [{"pool": "a"}, {"pool": "b"}],
        }
    )
    assert [str(variant_at(pooled, index)) for index in range(3)] == ["pool a, cuda:0", "pool a, cuda:1", "pool b"]
    assert variant_at(pooled, 1).of(pooled).device == "cuda:1"


def test_a_revision_changes_with_what_engines_read() -> None:
    base = {"name": "m", "pools": [{"name": "a"}, {"name": "b"}], "pool_rules": [{"pool": "a"}, {"pool": "b"}]}
    model = check_model(base)
    same = check_model({**base, "input_price": 3.0, "aliases": ["mm"], "pool_rules": [{"pool": "b"}, {"pool": "a"}]})
    more = check_model({**base, "pools": [{"name": "a", "replicas": 4}, {"name": "b"}]})
    assert whole_revision(model) == whole_revision(same) == whole_revision(more)
    other = check_model({**base, "pools": [{"name": "a", "max_running": 3}, {"name": "b"}]})
    assert revision(other, "b") == revision(model, "b") and revision(other, "a") != revision(model, "a")
    assert whole_revision(other) != whole_revision(model)
    assert revision(check_model({"name": "m", "dtype": "float32"})) != revision(check_model({"name": "m"}))

"""The fixed workloads mean the same requests everywhere."""

import random

import pytest

from penstock.bench import workloads
from penstock.bench.workloads import WORKLOADS
from penstock.errors import ConfigError


def test_every_published_name_exists() -> None:
    assert list(WORKLOADS) == [
        "b1",
        "b64",
        "b256",
        "mix",
        "prefill",
        "ttft128",
        "ttft2048",
        "moe-ttft128",
        "long30k",
        "long100k",
        "long8x30k",
        "long32x16k",
        "c1",
        "c8",
        "c16",
        "c32",
        "c64",
    ]


def test_mix_draws_lengths_in_then_out_from_seed_zero() -> None:
    rng = random.Random(0)
    expected = []
    for _ in range(256):
        inputs = rng.randint(100, 1024)
        expected.append((inputs, rng.randint(100, 1024)))
    assert list(WORKLOADS["mix"].lengths()) == expected


def test_lengths_do_not_depend_on_the_vocabulary() -> None:
    small, large = (WORKLOADS["mix"].build(vocab) for vocab in (256, 128256))
    assert [len(r.prompt) for r in small] == [len(r.prompt) for r in large]
    assert max(max(r.prompt) for r in small) < 256


def test_prompts_are_the_same_every_time_and_never_shared() -> None:
    once, again = (WORKLOADS["c16"].build(49152) for _ in range(2))
    assert [r.prompt for r in once] == [r.prompt for r in again]
    assert len({tuple(r.prompt[:16]) for r in once}) == 64


def test_runs_with_different_salts_share_no_prefix() -> None:
    first, second = (WORKLOADS["b1"].build(1000, salt=salt)[0] for salt in ("a", "b"))
    assert first.prompt == second.prompt
    assert first.cache_salt != second.cache_salt
    assert first.request_id != second.request_id


def test_closed_loop_has_four_requests_per_slot() -> None:
    workload = WORKLOADS["c64"]
    assert (workload.requests, workload.concurrency) == (256, 64)
    assert set(workload.lengths()) == {(128, 128)}


def test_warm_up_passes_through_falling_batch_sizes() -> None:
    outputs = [request.params.max_tokens for request in workloads.warm_up(WORKLOADS["b64"], 1000)]
    assert len(outputs) == 64
    alive = {sum(length >= step for length in outputs) for step in range(1, max(outputs) + 1)}
    assert {1, 2, 64} <= alive
    assert len(alive) > 12


def test_a_workload_of_a_model_with_experts_brings_its_shape() -> None:
    def shape(*names: str, given: str | None = None, model_is_default: bool = True) -> str | None:
        return workloads.shape_of(names, given, model_is_default=model_is_default)

    assert WORKLOADS["moe-ttft128"].build(1000)[0].prompt == WORKLOADS["ttft128"].build(1000)[0].prompt
    assert shape("moe-ttft128") == "qwen3-30b-a3b:24" and shape("b1", "mix") is shape() is None
    assert shape("b1", "moe-ttft128", given="mixtral-8x7b") == "mixtral-8x7b"
    assert shape("moe-ttft128", model_is_default=False) is None
    with pytest.raises(ConfigError, match="b1, moe-ttft128 are of different models"):
        shape("b1", "moe-ttft128")


def test_an_unknown_name_lists_the_others() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload 'c3'.*mix"):
        workloads.named("c3")

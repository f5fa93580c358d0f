"""Which products of one token are one launch whose blocks wait for each other, and where there are none of these."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

from penstock.engine.backends.cuda import chains, exclusive, nvrtc
from penstock.engine.backends.cuda.chains import ONE_TOKEN, Chains
from penstock.engine.backends.cuda.kernels.chain_plan import ChainShape
from penstock.engine.backends.interface import Link
from penstock.errors import ConfigError
from tests.gpu.chain_cases import LLAMA_8B, QWEN3_06B, QWEN3_4B, Sizes, make_links

DEVICE = torch.device("cpu")
META = torch.device("meta")


class Made:
    """See `LinkedProducts`."""

    def __init__(self, links: Sequence[Any], shape: ChainShape, counter: torch.Tensor) -> None:
        self.links, self.shape, self.counter = links, shape, counter

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A device that nobody else uses."""
    monkeypatch.delenv(ONE_TOKEN, raising=False)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(exclusive, "_owners", WeakValueDictionary())
    monkeypatch.setattr(chains, "has_kernel", lambda device: True)
    monkeypatch.setattr(chains, "shape_on", lambda device: ChainShape(132))
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(nvrtc, "is_shared", lambda device: False)


def _of(found: Chains, sizes: Sizes = LLAMA_8B, count: int = 4) -> Made | None:
    made: Any = found.of(make_links(sizes, bias=False, device=META)[:count])
    return made


def test_large_layers_have_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, behind which no other comes."""
    found = Chains(DEVICE, Made)
    whole, last = _of(found), _of(found, count=3)
    assert whole is not None and last is not None
    assert whole.counter is last.counter and whole.shape == ChainShape(132)
    assert _of(found, QWEN3_4B) is None and _of(found, QWEN3_06B) is None
    monkeypatch.setenv(ONE_TOKEN, "launches")
    assert _of(Chains(DEVICE, Made)) is None


def test_the_environment_may_ask_for_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ONE_TOKEN, "chain")
    found = Chains(DEVICE, Made)
    assert _of(found, QWEN3_06B) is not None
    for _ in range(2):
        assert found.of([Link(torch.empty(64, 64, dtype=torch.bfloat16, device=META))]) is None
    assert caplog.messages == [
        f"{ONE_TOKEN}=chain has no effect on weights that are not in FP8 with a scale for each row"
    ]
    monkeypatch.setenv(ONE_TOKEN, "chains")
    with pytest.raises(ConfigError, match="PENSTOCK_ONE_TOKEN: 'chains' must be auto, chain or launches"):
        Chains(DEVICE, Made)


def test_other_devices_have_none_and_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chains, "has_kernel", lambda device: False)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no CUDA here")
    for value in ("auto", "chain"):
        monkeypatch.setenv(ONE_TOKEN, value)
        assert _of(Chains(DEVICE, Made)) is None
    assert not caplog.records


@pytest.mark.parametrize("reason", ["no compiler", "MPS", "a share", "a pipe", "no room", "does not build"])
def test_where_blocks_might_not_all_run_there_are_none(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Said once, and not tried for every layer."""
    tries: list[int] = []

    def make(links: Sequence[Any], shape: ChainShape, counter: torch.Tensor) -> Made:
        tries.append(1)
        if reason == "no room":
            raise nvrtc.CudaDriverError("the device has room for 66 of the 132 blocks")
        raise nvrtc.CudaBuildError("compiling product_chain.cu failed")

    expected = {"no compiler": "no usable libnvrtc", "no room": "room for 66", "does not build": "compiling"}
    if reason == "no compiler":
        monkeypatch.setattr(nvrtc, "unavailable", lambda: "no usable libnvrtc")
    elif reason == "MPS":
        monkeypatch.setattr(nvrtc, "is_shared", lambda device: True)
    elif reason == "a share":
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    elif reason == "a pipe":
        (tmp_path / "control").touch()
    found = Chains(DEVICE, make)
    with caplog.at_level(logging.WARNING):
        assert [_of(found) for _ in range(3)] == [None] * 3
    (said,) = caplog.messages
    assert said.startswith("steps of one token launch their products one by one")
    assert expected.get(reason, "share the multiprocessors (MPS)") in said
    assert len(tries) == (reason in ("no room", "does not build"))


def test_one_engine_of_a_process_has_them(caplog: pytest.LogCaptureFixture) -> None:
    """Until it is gone, even if its parts refer to each other."""
    first, second = Chains(DEVICE, Made), Chains(DEVICE, Made)
    assert _of(first) is not None and _of(first) is not None and _of(second) is None
    assert "another engine of this process" in caplog.text
    assert exclusive.claim(META, second)  # another device
    first.itself = first  # type: ignore[attr-defined]
    gc.disable()
    try:
        del first
        assert _of(Chains(DEVICE, Made)) is not None
    finally:
        gc.enable()

"""Weights from safetensors straight to the device, and the default model: the same answer as on the CPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_harness import DEVICE, MODE, Row, bandwidth, rand
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.loading.checkpoint import SafetensorsCheckpoint, open_checkpoint  # noqa: E402
from penstock.engine.request import Request, SamplingParams  # noqa: E402
from penstock.errors import CheckpointError, PenstockError  # noqa: E402
from penstock.sources.resolve import resolve  # noqa: E402
from tests.engine.harness import collect, drain  # noqa: E402
from tests.engine.quantization.layouts import LAYOUTS  # noqa: E402

ON_DEVICE = MODE == "device"
# "What is the capital of France?" in the default model's chat format.
PARIS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
         198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]  # fmt: skip


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text("{}")
    half = len(tensors) // 2
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        save_file({name: tensors[name] for name in names}, folder / f"part-{number}.safetensors")


def test_tensors_arrive_as_stored() -> None:
    if not ON_DEVICE:
        return
    kinds = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.int32)
    shapes = ((3,), (70, 300), (4096, 4096), (1, 1), (129, 2048))
    tensors = {
        f"model.layers.{layer}.w{i}": (rand(*shape) * 3).to(kind).cpu()
        for layer in (10, 2, 1)
        for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    }
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), tensors)
        checkpoint = SafetensorsCheckpoint(folder)
        for _ in range(2):  # a tensor may be asked for again
            for name in reversed(list(tensors)):
                got = checkpoint.tensor(name, DEVICE)
                assert got.dtype == tensors[name].dtype and got.is_cuda
                assert torch.equal(got.cpu().view(torch.uint8), tensors[name].view(torch.uint8)), name


def test_quantized_layouts_on_the_device() -> None:
    """Every layout reads to its values there too, also where groups and tiles do not divide the matrix."""
    if not ON_DEVICE:
        return
    weight = torch.randn(160, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
    base = "model.layers.0.mlp.down_proj."
    for layout, (settings, make) in LAYOUTS.items():
        made = make(weight)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
            parts = {f"{base}{suffix}": part.contiguous() for suffix, part in made.tensors.items()}
            save_file(parts, path / "model.safetensors")
            got = open_checkpoint(path).tensor(f"{base}weight", DEVICE)
            assert got.is_cuda
            torch.testing.assert_close(
                got.cpu().double(), torch.from_numpy(made.dense), rtol=1e-6, atol=1e-6, msg=layout
            )


def test_a_file_cut_short_is_refused() -> None:
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), {"a": torch.ones(10), "b": torch.ones(1000, 1000)})
        checkpoint = SafetensorsCheckpoint(folder)
        os.truncate(Path(folder) / "part-1.safetensors", 10_000)
        try:
            checkpoint.tensor("b", DEVICE)
        except CheckpointError as error:
            assert "cut short" in str(error)
        else:
            raise AssertionError("a damaged file was accepted")


def test_the_default_model_answers_the_same_on_gpu_and_cpu() -> None:
    if not ON_DEVICE:
        return
    try:
        path = str(resolve("smollm2-135m"))
    except PenstockError as error:
        print(f"    SKIPPED: the default model is not here and cannot be fetched ({error})")
        return
    prompts = [PARIS, PARIS[:-8] + [8711, 28, 1531, 13] + PARIS[-8:]]
    answers = []
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        engine = Engine.load(EngineConfig(model=path, device=device, dtype=dtype, weights="dense", max_model_len=512))
        for index, prompt in enumerate(prompts):
            engine.submit(
                Request(str(index), prompt, SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(2,)))
            )
        answers.append(collect(drain(engine)))
    assert answers[0] == answers[1], answers
    assert answers[0]["0"] == answers[2]["0"], answers
    print(f"    {len(answers[0]['0'])} tokens, the same on both")


def bench_loading() -> Iterator[Row]:
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        tensors = {f"model.layers.{i}.w": torch.zeros(14336, 4096, dtype=torch.bfloat16) for i in range(32)}
        _write(Path(folder), tensors)
        size = sum(t.numel() * 2 for t in tensors.values())
        for label, reader in {
            "one by one": lambda c, n: c.tensor(n).to(DEVICE),
            "in parallel": lambda c, n: c.tensor(n, DEVICE),
        }.items():
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                checkpoint = SafetensorsCheckpoint(folder)
                for name in tensors:
                    reader(checkpoint, name)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            yield bandwidth(f"3.8 GB of safetensors to the device, {label}", sorted(times)[1] * 1e6, size)

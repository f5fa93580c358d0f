"""`penstock bench engine --calibrate`: what is measured, how it is fitted, what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penstock.bench import calibration
from penstock.bench.engine import Step, Trace
from penstock.bench.fit import Observation, factor, fit
from penstock.bench.offline import OfflineBenchSettings
from penstock.bench.step_walk import walk
from penstock.bench.workloads import Workload
from penstock.errors import ConfigError
from penstock.planning.calibration import (
    Calibration,
    WeightFactors,
    calibration_for,
    read_calibration,
    write_calibration,
)
from penstock.planning.catalogue import device
from penstock.planning.deployment import Deployment
from penstock.planning.model_shape import model_shape
from penstock.planning.step_time import StepTime, StepWork, attended
from tests.engine.tiny import write_checkpoint

H200 = device("h200")
LLAMA = Deployment(shape=model_shape("llama-8b"), device=H200)
TRUTH = calibration_for(H200)


def observed(name: str, works: list[StepWork], truth: Calibration = TRUTH) -> Observation:
    time = StepTime(LLAMA, truth)
    return Observation(name, LLAMA, works, sum(time.seconds(work) for work in works))


def measurements() -> list[Observation]:
    streams = [
        observed(f"{count} at {context}", [StepWork(count, count * context, 0, 0, count)])
        for count in (1, 4, 16, 64, 128, 256)
        for context in (100, 2000)
    ]
    prompts = [
        observed(f"{length} after {start}", [StepWork(0, 0, length, attended(start, length), 1)])
        for length, start in ((64, 0), (512, 0), (4096, 0), (8192, 0), (4096, 60_000))
    ]
    return streams + prompts


def test_the_fit_finds_the_factors_that_made_the_times() -> None:
    start = replace(
        TRUTH, weights={"bf16": WeightFactors(0.7, 0.7, 0.4)}, kv_read=0.6, attention=0.3, sequence_s=8e-6, layer_s=1e-5
    )
    factors = calibration.factors_of(LLAMA)
    found = fit(start, factors, measurements())
    for name in ("bf16.compute", "kv_read", "attention", "sequence_s"):
        assert factor(found, name) == pytest.approx(factor(TRUTH, name), rel=0.1), name
    assert max(abs(item.error(found)) for item in measurements()) < 0.02


def test_a_factor_that_nothing_shows_stays() -> None:
    start = replace(TRUTH, attention=0.33)
    found = fit(start, ["kv_read", "attention"], [observed("decode", [StepWork(64, 64_000, 0, 0, 64)])])
    assert found.attention == pytest.approx(0.33)


def test_prompts_and_decode_steps_are_measured_apart() -> None:
    workload = Workload("2 x 8/7", 2, (8, 8), (7, 7))
    works = list(walk(workload, max_running=4, token_budget=512))
    steps = [Step(0.5, 2, 18, decode_only=False)]
    steps += [Step(0.1, 2, 2 * (9 + index), decode_only=True) for index in range(6)]
    found = list(calibration._measurements(workload, works, Trace(steps=steps)))
    assert found[0] == ("2 x 8/7, prompts", [StepWork(0, 0, 16, 72, 2)], 0.5)
    assert [(name, len(works)) for name, works, _ in found[1:]] == [
        ("2 x 8/7, 2 decoding at 9", 2),
        ("2 x 8/7, 2 decoding at 11", 2),
        ("2 x 8/7, 2 decoding at 13", 2),
    ]
    assert [seconds for _, _, seconds in found[1:]] == pytest.approx([0.2, 0.2, 0.2])
    (alone,) = calibration._measurements(workload, works, Trace(steps=steps[:1]))
    assert alone == found[0], "a workload of one token each decodes nothing"


@pytest.mark.parametrize(
    "title, name",
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
     ("NVIDIA L4", "l4"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA L40S", "l40s"), ("NVIDIA H100 80GB HBM3", "h100")],
)  # fmt: skip
def test_the_device_is_found_in_the_catalogue(monkeypatch: pytest.MonkeyPatch, title: str, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: title)
    assert calibration.hardware_of(None, "cuda:0").name == name


def test_a_device_that_the_catalogue_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla K80")
    with pytest.raises(ConfigError, match="the catalogue has no Tesla K80; name the nearest with --hardware"):
        calibration.hardware_of(None, "cuda:0")
    assert calibration.hardware_of("h100", "cuda:0").name == "h100"
    assert calibration.hardware_of(None, "cpu").name == "this-machine"


SMALL = [Workload("2 x 12/8", 2, (12, 12), (8, 8)), Workload("1 x 40/7", 1, (40, 40), (7, 7))]


def test_a_machine_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "default_workloads", lambda on_cpu: SMALL)
    model = write_checkpoint("llama-gqa", tmp_path / "model")
    settings = OfflineBenchSettings(model=str(model), device="cpu", dtype="float32")
    path, console = tmp_path / "mine.yaml", Console(record=True, width=120)
    calibration.main(settings, (), path, "cpu-2", tmp_path / "fit.json", console)
    printed = console.export_text()
    assert "2 x 12/8, prompts" in printed and "fp32.compute" in printed and "largest" in printed
    written = read_calibration(path)
    assert written.device == "cpu-2" and set(written.weights) == {"fp32"} and written.borrowed_for is None
    assert written.source.date and written.source.commit and "fp32" not in written.source.machine
    assert json.loads((tmp_path / "fit.json").read_text())["results"][0]["measured_s"] > 0


@pytest.mark.slow
def test_another_weight_format_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "default_workloads", lambda on_cpu: SMALL)
    model = write_checkpoint("llama-gqa", tmp_path / "model")
    settings = OfflineBenchSettings(model=str(model), device="cpu", weights="int8")
    path = tmp_path / "mine.yaml"
    start = replace(calibration_for(device("cpu-2")), weights={"fp32": WeightFactors(0.5, 0.5, 0.5)})
    write_calibration(start, path)
    calibration.main(settings, (), path, "cpu-2", None, Console(quiet=True))
    written = read_calibration(path)
    assert written.weights["fp32"] == start.weights["fp32"] and written.weights["int8"] != start.weights["fp32"]
    assert written.kv_read == start.kv_read and written.source != start.source


def test_a_file_of_another_device(tmp_path: Path) -> None:
    write_calibration(calibration_for(device("cpu-2")), tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match="is a calibration of cpu-2, not cpu-64; write to another file"):
        calibration.main(OfflineBenchSettings(device="cpu"), (), tmp_path / "mine.yaml", "cpu-64", None, Console())


def test_a_file_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the calibration .*\n(.|\n)*kv_read"):
        write_calibration(TRUTH, tmp_path / "file" / "mine.yaml")

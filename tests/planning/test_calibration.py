"""Calibration files: read, written, borrowed, and refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.planning.calibration import calibration_for, packaged, read_calibration, write_calibration
from penstock.planning.catalogue import device, devices
from penstock.planning.numbers import WEIGHT_FORMATS, WeightFormat

H200 = calibration_for(device("h200"))


def test_packaged_files_name_their_source() -> None:
    assert {"h200", "cpu-2"} <= {calibration.device for calibration in packaged()}
    for calibration in packaged():
        source = calibration.source
        assert source.machine and source.date and source.commit and source.command.startswith("penstock bench ")
        assert device(calibration.device).name == calibration.device


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    original = packaged()[0]
    write_calibration(original, tmp_path / "new" / "mine.yaml")
    assert read_calibration(tmp_path / "new" / "mine.yaml") == original


def test_every_device_has_a_calibration_and_a_borrowed_one_says_so() -> None:
    for entry in devices():
        calibration = calibration_for(entry)
        assert device(calibration.device).kind == entry.kind
        assert (calibration.borrowed_for == entry.name) == (calibration.device != entry.name)
    assert calibration_for(device("h200")).title.startswith("h200, from runs on NVIDIA H200")
    assert calibration_for(device("l4")).title.startswith(
        "l4 was never measured: fractions of peak are those of h200, from runs on NVIDIA"
    )


def test_nothing_of_the_same_kind_to_borrow_from() -> None:
    with pytest.raises(ConfigError, match=r"no calibration for l4 or another gpu .*--calibrate"):
        calibration_for(device("l4"), tuple(item for item in packaged() if item.device.startswith("cpu")))


def test_a_format_that_was_not_measured_has_the_nearest_factors() -> None:
    factors = H200.factors
    assert factors(WEIGHT_FORMATS["fp16"]) == factors(WEIGHT_FORMATS["bf16"])
    assert factors(WeightFormat("gguf 8.5 bits", 8.5 / 8, 2, "bf16")) == factors(WEIGHT_FORMATS["fp8"])


@pytest.mark.parametrize(
    "change, message",
    [
        (("kv_read: 0.", "kv_read: -0."), "kv_read must be a number of at least 0"),
        (("kv_read: 0.", "kv_raed: 0."), "unknown key 'kv_raed'"),
        (("  bf16:", "  bf17:"), "unknown format 'bf17'; there are: fp32, bf16"),
        (("  machine:", "  maschine:"), "source: unknown key 'maschine'"),
        (("weights:", "weights: 3\nother:"), "weights must map weight formats"),
        (("device: h200", "device: [h200"), "not valid YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "wrong.yaml"
    write_calibration(H200, path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_calibration(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the calibration"):
        read_calibration(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="a calibration is a mapping of factors"):
        read_calibration(tmp_path / "list.yaml")

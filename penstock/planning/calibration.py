"""Efficiency factors of a device, measured: which part of its peaks the engine reaches, and what a step costs besides.

A calibration is a YAML file with its source: `penstock bench engine --calibrate FILE` writes one from runs on the
machine itself, and those under `calibrations/` are packaged. A device that was never measured borrows from one of the
same kind, and the calibration says so: `borrowed_for`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError
from penstock.planning.numbers import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from penstock.planning.catalogue import Device


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightFactors:
    """How well matrices in one weight format are read and multiplied. Fractions of the device's peaks."""

    read_few: float
    """Of memory bandwidth, reading weights in a step of few tokens, which has kernels of its own."""
    read: float
    """Of memory bandwidth, reading weights in a step of more tokens."""
    compute: float
    """Of the peak in the format's arithmetic, in matrix products."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the factors come from."""

    machine: str
    date: str
    commit: str
    command: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """All factors of one device."""

    device: str
    """Its name in the catalogue."""
    source: Source
    weights: Mapping[str, WeightFactors] = field(hash=False)
    """By weight format (`numbers.WEIGHT_FORMATS`)."""
    kv_read: float
    """Fraction of memory bandwidth at which decode attention reads keys and values."""
    attention: float
    """Fraction of peak bfloat16 FLOP/s of attention over prompts."""
    step_s: float
    """Of every step: scheduling, inputs, sampling, whatever does not overlap with the device."""
    prompt_step_s: float
    """More for a step with prompt tokens."""
    layer_s: float
    """Per layer and step: starting kernels and their tails, norms, rotary embedding."""
    sequence_s: float
    """Per sampled token and step."""
    few_tokens: int = 8
    """Up to how many tokens a step is of few tokens."""
    expert_layer_s: float = 0.0
    """More per layer of experts: routing, and gathering the tokens of each expert."""
    launch_layer_s: float = 0.0
    """Per layer, the least time of a step that is launched kernel by kernel, as those of several ranks are."""
    verify_s: float = 0.0
    """More for a step that verifies draft tokens: it cannot be launched before the last one has ended."""
    link: float = 0.8
    """Fraction of the link's bandwidth in an all-reduce."""
    borrowed_for: str | None = None
    """The device for which these factors are used though they were measured on `device`."""

    @property
    def title(self) -> str:
        """One line for reports."""
        measured = f"from runs on {self.source.machine}, {self.source.date}, commit {self.source.commit}"
        if self.borrowed_for is None:
            return f"{self.device}, {measured}"
        return f"{self.borrowed_for} was never measured: fractions of peak are those of {self.device}, {measured}"

    def factors(self, form: WeightFormat) -> WeightFactors:
        """Of a weight format; one that was not measured has those of the nearest in bytes per weight."""
        if form.name in self.weights:
            return self.weights[form.name]

        def distance(name: str) -> tuple[float, bool]:
            measured = WEIGHT_FORMATS[name]
            return abs(log(measured.matrix_bytes / form.matrix_bytes)), measured.compute != form.compute

        return self.weights[min(self.weights, key=distance)]


def read_calibration(path: Path) -> Calibration:
    """From a file; an error says which key is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the calibration {path}: {error.strerror or error}") from None
    return _parse(text, str(path))


def write_calibration(calibration: Calibration, path: Path) -> None:
    import yaml

    tree = {key: value for key, value in dataclasses.asdict(calibration).items() if value is not None}
    text = yaml.safe_dump(_rounded(tree), sort_keys=False, width=110, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the calibration {path}: {error.strerror or error}; it would be:\n{text}"
        ) from None


@cache
def packaged() -> tuple[Calibration, ...]:
    """Those that come with Penstock."""
    folder = resources.files("penstock.planning") / "calibrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return tuple(_parse(file.read_text(encoding="utf-8"), file.name) for file in files)


def calibration_for(device: Device, among: tuple[Calibration, ...] | None = None) -> Calibration:
    """The device's own, or else that of the nearest device of its kind: of the same architecture if there is one, and
    nearest in FLOPs per byte, since that decides which of the factors count."""
    known = packaged() if among is None else among
    for calibration in known:
        if calibration.device == device.name:
            return calibration
    from penstock.planning.catalogue import device as named

    alike = [calibration for calibration in known if named(calibration.device).kind == device.kind]
    if not alike:
        kinds = ", ".join(sorted({calibration.device for calibration in known}))
        raise ConfigError(
            f"there is no calibration for {device.name} or another {device.kind} (there are: {kinds}); "
            "`penstock bench engine --calibrate FILE` writes one"
        )
    nearest = min(alike, key=lambda calibration: _distance(named(calibration.device), device))
    return dataclasses.replace(nearest, borrowed_for=device.name)


def _distance(one: Device, other: Device) -> tuple[bool, float]:
    def intensity(device: Device) -> float:
        return max(device.flops.values()) / device.bandwidth

    ratio = intensity(one) / intensity(other)
    return one.arch != other.arch, max(ratio, 1 / ratio)


def _parse(text: str, name: str) -> Calibration:
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: a calibration is a mapping of factors; see `penstock bench engine --calibrate`")
    formats = tree.get("weights")
    if not isinstance(formats, dict) or not formats:
        raise ConfigError(f"{name}: weights must map weight formats (bf16, fp8, ...) to their factors")
    unknown = [str(form) for form in formats if form not in WEIGHT_FORMATS]
    if unknown:
        raise ConfigError(f"{name}: weights: unknown format {unknown[0]!r:.60}; there are: {', '.join(WEIGHT_FORMATS)}")
    weights = {
        str(form): _build(WeightFactors, factors, f"{name}: weights.{form}", positive=True)
        for form, factors in formats.items()
    }
    source = _build(Source, tree.get("source"), f"{name}: source")
    rest = {key: value for key, value in tree.items() if key not in ("weights", "source")}
    checked = _build(Calibration, rest, name, weights=weights, source=source)
    for key in ("kv_read", "attention", "link"):
        if not getattr(checked, key) > 0:
            raise ConfigError(f"{name}: {key} is a fraction of a peak and must be greater than 0")
    return checked


def _build(kind: type[T], tree: Any, name: str, positive: bool = False, **given: Any) -> T:
    """A dataclass from a mapping; every key known, none missing, numbers not negative."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} must be a mapping")
    known = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [key for key in tree if key not in known or key in given]
    if unknown:
        raise ConfigError(f"{name}: unknown key {unknown[0]!r}; there are: {', '.join(known)}")
    for key, item in known.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if key not in tree and key not in given and required:
            raise ConfigError(f"{name}: {key} is missing")
    values = {key: _checked(value, str(known[key].type), f"{name}: {key}", positive) for key, value in tree.items()}
    return kind(**values, **given)


def _checked(value: Any, wanted: str, name: str, positive: bool) -> Any:
    if wanted in ("float", "int"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value < 0 or (positive and value == 0):
            raise ConfigError(
                f"{name} must be a number {'greater than' if positive else 'of at least'} 0, not {value!r}"
            )
        return value
    if value is None and wanted.endswith("None"):
        return None
    return str(value)


def _rounded(value: Any) -> Any:
    """Four significant digits are more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value

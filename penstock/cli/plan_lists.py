"""What `penstock plan` knows, as lists: devices, models, API prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.lists import Column

if TYPE_CHECKING:
    from penstock.planning.catalogue import ApiPrice, Device
    from penstock.planning.model_shape import ModelShape


def hardware() -> list[Column[Device]]:
    return [
        Column("name", lambda device: device.name, rank=0),
        Column("GiB", lambda device: round(device.memory_bytes / 2**30), rank=1),
        Column("GB/s", lambda device: round(device.bandwidth / 1e9), rank=2),
        Column("TFLOP/s bf16", _sixteen, lambda device: _figure(_sixteen(device), 1), rank=3),
        Column("8 bits", _eight, lambda device: _figure(_eight(device), 1), rank=5),
        Column("link", lambda device: device.link.name, rank=6),
        Column("per node", lambda device: device.devices_per_node, rank=6),
        Column("$/h on demand", lambda device: device.prices.on_demand, lambda d: _figure(d.prices.on_demand), rank=1),
        Column("$/h reserved", lambda device: device.prices.reserved, lambda d: _figure(d.prices.reserved), rank=4),
        Column("$/h spot", lambda device: device.prices.spot, lambda d: _figure(d.prices.spot), rank=4),
        Column("as of", lambda device: device.date, rank=7),
    ]


def models() -> list[Column[ModelShape]]:
    return [
        Column("name", lambda shape: shape.name, rank=0),
        Column("parameters", lambda shape: shape.parameters, lambda shape: f"{shape.parameters / 1e9:.3g} B", rank=1),
        Column("active", lambda shape: shape.active_parameters, lambda s: f"{s.active_parameters / 1e9:.3g} B", rank=4),
        Column("layers", lambda shape: shape.layers, rank=3),
        Column("heads/KV", lambda shape: f"{shape.heads}/{shape.kv_heads if shape.mla is None else 'MLA'}", rank=5),
        Column("context", lambda shape: shape.max_positions, rank=2),
        Column("KV KiB per token", _kv, lambda shape: f"{_kv(shape):,.4g}", rank=2),
        Column("stored as", lambda shape: "dense" if shape.stored is None else shape.stored.name, rank=6),
    ]


def apis() -> list[Column[ApiPrice]]:
    return [
        Column("name", lambda price: price.name, rank=0),
        Column("$/1M input", lambda price: price.input, lambda price: f"{price.input:g}"),
        Column("$/1M cached", lambda price: price.cached, lambda price: f"{price.cached:g}", rank=3),
        Column("$/1M output", lambda price: price.output, lambda price: f"{price.output:g}"),
        Column("serves", lambda price: price.serves, rank=2),
        Column("as of", lambda price: price.date, rank=4),
    ]


def _tera(flops: float | None) -> float | None:
    return flops / 1e12 if flops else None


def _sixteen(device: Device) -> float | None:
    return _tera(device.flops.get("bf16"))


def _eight(device: Device) -> float | None:
    return _tera(device.flops.get("fp8") or device.flops.get("int8"))


def _kv(shape: ModelShape) -> float:
    return shape.kv_bytes_per_token(2) / 1024


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"

"""What `penstock plan` knows, as tables: devices, models, API prices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.planning.catalogue import ApiPrice, Device


def hardware(devices: Iterable[Device]) -> Table:
    from penstock.bench.report import table

    listed = table(
        "Devices (prices in dollars per device and hour)",
        "name", "GiB", "GB/s", "TFLOP/s bf16", "8 bits", "link", "per node", "on demand", "reserved", "spot", "as of",
    )  # fmt: skip
    for device in devices:
        eight = device.flops.get("fp8") or device.flops.get("int8")
        listed.add_row(
            device.name,
            f"{device.memory_bytes / 2**30:.0f}",
            f"{device.bandwidth / 1e9:,.0f}",
            _figure(device.flops.get("bf16", 0.0) / 1e12 or None, 1),
            _figure(None if eight is None else eight / 1e12, 1),
            device.link.name,
            str(device.devices_per_node),
            *(_figure(price) for price in (device.prices.on_demand, device.prices.reserved, device.prices.spot)),
            device.date,
        )
    return listed


def models() -> Table:
    from penstock.bench.report import table
    from penstock.planning.model_shape import known_models, model_shape

    listed = table(
        "Models", "name", "parameters", "active", "layers", "heads/KV", "context", "KV KiB per token", "stored as"
    )
    for shape in map(model_shape, known_models()):
        listed.add_row(
            shape.name,
            f"{shape.parameters / 1e9:.3g} B",
            f"{shape.active_parameters / 1e9:.3g} B",
            str(shape.layers),
            f"{shape.heads}/{shape.kv_heads}" if shape.mla is None else f"{shape.heads}/MLA",
            f"{shape.max_positions:,}",
            f"{shape.kv_bytes_per_token(2) / 1024:,.4g}",
            "dense" if shape.stored is None else shape.stored.name,
        )
    return listed


def apis(prices: Iterable[ApiPrice]) -> Table:
    from penstock.bench.report import table

    listed = table("API prices (dollars per 1M tokens)", "name", "input", "cached input", "output", "serves", "as of")
    for price in prices:
        listed.add_row(
            price.name,
            *(f"{value:g}" for value in (price.input, price.cached, price.output)),
            price.serves or "–",
            price.date,
        )
    return listed


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"

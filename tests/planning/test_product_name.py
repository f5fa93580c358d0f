from __future__ import annotations

import pytest

from penstock.planning.catalogue import devices
from penstock.planning.product_name import by_product_name


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A10G", None),
        ("", None),
    ],
)
def test_a_driver_s_name_leads_to_the_catalogue(product: str, name: str | None) -> None:
    found = by_product_name(product, devices())
    assert (found.name if found is not None else None) == name

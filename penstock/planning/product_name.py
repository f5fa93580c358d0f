"""From a device's name as its driver reports it ("NVIDIA A100-SXM4-80GB") to its entry in the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.planning.catalogue import Device

_WORDS = re.compile(r"[a-z0-9]+")


def by_product_name(product: str, known: Iterable[Device]) -> Device | None:
    """The device whose name's words all occur in `product`, the most words first; None when there is none. A number
    among them, such as the 80 of a100-80, is gigabytes there."""
    words = _WORDS.findall(product.lower())
    found = [device for device in known if all(_occurs(word, words) for word in _WORDS.findall(device.name))]
    return max(found, key=lambda device: (len(_WORDS.findall(device.name)), len(device.name)), default=None)


def _occurs(word: str, words: list[str]) -> bool:
    return word in words or (word.isdigit() and f"{word}gb" in words)

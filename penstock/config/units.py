"""Sizes in bytes and shares, as written by people: `2GiB`, `500MB`, `1.5 GiB`, or a plain number; `5%`, `0.05`."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
SIZE_HELP = 'a size such as "512MiB", "2GiB" or a number of bytes'

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
SHARE_HELP = "a share such as 5% or 0.05, from 0 to 1"


def parse_share(text: str) -> float:
    """The share that `5%` or `0.05` means; ValueError when it is neither."""
    match = _PERCENT.fullmatch(text)
    share = float(text) if match is None else float(match[1]) / 100
    if not 0 <= share <= 1:
        raise ValueError(text)
    return share


def parse_size(text: str) -> int:
    """Bytes in `text`; ValueError when it is not a size."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or factor is None:
        raise ValueError(text)
    return int(float(match[1]) * factor)


def format_size(size: int) -> str:
    """`size` in the largest binary unit that is not below one; exact sizes have no decimals."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size // factor}{unit}" if size % factor == 0 else f"{size / factor:.1f}{unit}"
    return str(size)

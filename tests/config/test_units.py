"""Sizes as people write them."""

from __future__ import annotations

import pytest

from penstock.config.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("7b", 7),
        ("2KB", 2000),
        ("2kib", 2048),
        ("3MB", 3 * 10**6),
        ("3 MiB", 3 * 2**20),
        ("1GB", 10**9),
        (" 1.5 GiB ", 3 * 2**29),
        ("1TB", 10**12),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.GiB", "1 XB", "1e3", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1024, "1023KiB"),
        (2**20, "1MiB"),
        (3 * 2**30, "3GiB"),
        (2**40, "1TiB"),
        (5 * 2**39, "2.5TiB"),
    ],
)
def test_a_size_is_written_in_its_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text

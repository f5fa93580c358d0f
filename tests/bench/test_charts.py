"""Charts as SVG: well formed, to scale, with round numbers at the axis."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from penstock.bench import charts


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (0, 8, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (277, 27067, [5000, 10000, 15000, 20000, 25000]),
        (3, 3, [3]),
        (0, 0.4, [0, 0.05]),
    ],
)
def test_ticks_are_round(first: float, last: float, ticks: list[float]) -> None:
    assert charts._ticks(first, last)[: len(ticks)] == pytest.approx(ticks)
    assert len(charts._ticks(first, last)) <= 9


def test_lines_and_bars_are_drawn_to_scale() -> None:
    drawn = charts.lines("A <title>", {"one": {"a": [(0, 0.0), (10, 4.0)], "b": [(5, 2.0)]}}, shaded=(2, 4), unit="ms")
    root = ElementTree.fromstring(drawn)
    names = {"svg": "http://www.w3.org/2000/svg"}
    lines = [line.attrib["points"].split() for line in root.findall("svg:polyline", names)]
    (left, low), (right, high), (middle, half) = (
        tuple(map(float, point.split(","))) for point in (*lines[0], lines[1][0])
    )
    assert middle == pytest.approx((left + right) / 2) and half == pytest.approx((low + high) / 2) and high < low
    assert "A &lt;title&gt;" in drawn and "10 ms" in drawn
    bars = ElementTree.fromstring(charts.bars("B", {"panel": {"x": 1.0, "y": 4.0}}))
    heights = [float(bar.attrib["height"]) for bar in bars.findall("svg:rect", names)[:2]]
    assert heights[1] == pytest.approx(4 * heights[0])

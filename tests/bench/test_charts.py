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


NAMES = {"svg": "http://www.w3.org/2000/svg"}


def rectangles(drawn: str) -> list[dict[str, str]]:
    return [rect.attrib for rect in ElementTree.fromstring(drawn).findall("svg:rect", NAMES)]


def texts(drawn: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(drawn).findall("svg:text", NAMES)]


def test_stacked_bars_follow_each_other_and_end_with_their_sum() -> None:
    drawn = charts.stacked("Bill", {"a & b": {"x": 30.0, "y": 10.0}, "c": {"x": 10.0}}, marked="c")
    first, second, third = rectangles(drawn)[:3]
    assert float(first["width"]) == pytest.approx(3 * float(second["width"]), rel=0.01)
    assert float(second["x"]) == pytest.approx(float(first["x"]) + float(first["width"]), abs=0.2)
    assert third["width"] == second["width"] and third["x"] == first["x"] and third["fill"] == first["fill"]
    assert {"a & b", "40", "10", "x", "y"} <= set(texts(drawn))


def test_a_tornado_has_the_widest_bar_first_and_every_end_labelled() -> None:
    rows = {"small": (("1", 95.0), ("2", 105.0)), "large": (("-50%", 160.0), ("+50%", 50.0))}
    drawn = charts.tornado("T", 100.0, rows)
    words = texts(drawn)
    assert words.index("large") < words.index("small")
    assert {"-50%", "+50%", "100"} <= set(words)
    lower, higher = rectangles(drawn)[:2]
    assert float(higher["x"]) < float(lower["x"]) and float(lower["width"]) == pytest.approx(
        60 / 50 * float(higher["width"]), rel=0.01
    )


def test_logarithmic_lines_have_equal_distances_for_equal_ratios() -> None:
    drawn = charts.lines("L", {"p": {"a": [(1, 1.0), (4, 10.0), (16, 100.0)]}}, unit="tokens", logarithmic=True)
    (line,) = ElementTree.fromstring(drawn).findall("svg:polyline", NAMES)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1 tokens", "2 tokens", "16 tokens", "100", "10"} <= set(texts(drawn))
    level = charts.lines("L", {"p": {"a": [(1, 5.0), (2, 5.0)]}}, logarithmic=True)
    assert "nan" not in level

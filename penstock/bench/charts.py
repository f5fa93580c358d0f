"""Small charts as SVG, without a plotting library: grouped bars, and lines. Readable on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fde", "#e08a1e", "#7a7f87", "#b14aa0", "#2a9d6f", "#c2413b")
INK, GRID = "#6b7280", "#9ca3af55"
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def bars(title: str, panels: Mapping[str, Mapping[str, float]], *, digits: int = 2) -> str:
    """One panel per figure, one bar per name; a panel's title says what it shows and in which unit."""
    width, height, bar = 190, 190, 120
    body: list[str] = []
    for column, (panel, values) in enumerate(panels.items()):
        left, most = 10 + column * width, max(values.values(), default=0.0) or 1.0
        body.append(_text(left, 46, panel, weight="600"))
        step = (width - 30) / max(len(values), 1)
        for index, (name, value) in enumerate(values.items()):
            tall = bar * value / most
            x, y = left + index * step, 72 + bar - tall
            body.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 6:.1f}" height="{max(tall, 1):.1f}" rx="2" '
                f'fill="{COLOURS[index % len(COLOURS)]}"><title>{escape(name)}: {value:.4g}</title></rect>'
            )
            body.append(_text(x + (step - 6) / 2, y - 4, f"{value:.{digits}f}", anchor="middle", size=10))
    names = list(next(iter(panels.values())))
    legend = _legend(names, height + 24)
    return _drawing(title, 20 + width * len(panels), height + 40, body + legend)


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    shaded: tuple[float, float] | None = None,
    unit: str = "s",
) -> str:
    """One panel per figure under each other, lines over a common axis in `unit`; `shaded` marks a span of it."""
    wide, tall, left, top = 640, 110, 56, 54
    every = [x for series in panels.values() for points in series.values() for x, _ in points]
    first, last = min(every), max(every)

    def at(x: float) -> float:
        return left + wide * (x - first) / ((last - first) or 1.0)

    body: list[str] = []
    names: list[str] = []
    for row, (panel, series) in enumerate(panels.items()):
        y = top + row * (tall + 44)
        most = max((value for points in series.values() for _, value in points), default=0.0) or 1.0
        if shaded is not None:
            begin, end = at(shaded[0]), at(shaded[1])
            body.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{tall}" fill="#e08a1e" '
                'fill-opacity="0.12"/>'
            )
        body.append(_text(left, y - 6, panel, weight="600"))
        for share in (0.0, 0.5, 1.0):
            level = y + tall * (1 - share)
            body.append(f'<line x1="{left}" x2="{left + wide}" y1="{level}" y2="{level}" stroke="{GRID}"/>')
            body.append(_text(left - 6, level + 4, _figure(most * share), anchor="end", size=10))
        for name, points in series.items():
            if name not in names:
                names.append(name)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn = " ".join(f"{at(x):.1f},{y + tall * (1 - value / most):.1f}" for x, value in points)
            body.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    bottom = top + len(panels) * (tall + 44)
    for tick in _ticks(first, last):
        body.append(_text(at(tick), bottom - 28, f"{_figure(tick)} {unit}", anchor="middle", size=10))
    return _drawing(title, left + wide + 40, bottom + 14, body + _legend(names, bottom))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ticks(first: float, last: float) -> list[float]:
    """At most nine, at round numbers."""
    least = (last - first) / 8 or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [step * n for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


def _legend(names: Sequence[str], y: float) -> list[str]:
    drawn: list[str] = []
    x = 12.0
    for index, name in enumerate(names):
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        drawn.append(_text(x + 15, y, name))
        x += 30 + 7 * len(name)
    return drawn


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", size: int = 12) -> str:
    font = FONT.replace('"12"', f'"{size}"')
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {font} font-weight="{weight}" fill="{INK}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _drawing(title: str, width: float, height: float, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    name = f"<title>{escape(title)}</title>" + _text(10, 20, title, weight="700", size=14)
    return "\n".join([head, name, *body, "</svg>"]) + "\n"

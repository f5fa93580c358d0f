"""Small charts as SVG, without a plotting library: bars upright and lying, lines, tornadoes. For light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2f6fde", "#e08a1e", "#7a7f87", "#b14aa0", "#2a9d6f", "#c2413b")
INK, GRID = "#6b7280", "#9ca3af55"
_LEGEND_ROW = 18
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


def stacked(title: str, rows: Mapping[str, Mapping[str, float]], *, form: str = "{:,.0f}", marked: str = "") -> str:
    """Lying bars under each other, each of parts that add up to the figure at its end; the row `marked` is in bold."""
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    left = 16 + 6.6 * max((len(row) for row in rows), default=0)
    wide, tall, top = max(200.0, 660 - left), 15, 36
    most = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    body: list[str] = []
    for index, (row, parts) in enumerate(rows.items()):
        y, x = top + index * (tall + 7), left
        body.append(_text(left - 8, y + 12, row, anchor="end", weight="700" if row == marked else "400", size=11))
        for part, value in parts.items():
            length = wide * value / most
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{tall}" '
                f'fill="{COLOURS[names.index(part) % len(COLOURS)]}"><title>{escape(f"{row}, {part}: ")}'
                f"{form.format(value)}</title></rect>"
            )
            x += length
        body.append(_text(x + 6, y + 12, form.format(sum(parts.values())), size=11))
    bottom = top + len(rows) * (tall + 7) + 16
    return _drawing(title, left + wide + 90, bottom + 10, body + _legend(names, bottom))


def tornado(title: str, base: float, rows: Mapping[str, tuple[tuple[str, float], tuple[str, float]]]) -> str:
    """What a figure becomes when one input is lower or higher: the widest bar first, `base` as the middle line.

    Each row has two ends: a label (the input's value) and the figure it gives.
    """
    ordered = sorted(rows.items(), key=lambda row: -abs(row[1][0][1] - row[1][1][1]))
    left, wide, tall, top = 170, 400, 18, 58
    ends = [base, *(figure for _, pair in ordered for _, figure in pair)]
    least, most = min(ends), max(ends)

    def at(value: float) -> float:
        return left + 60 + wide * (value - least) / ((most - least) or 1.0)

    body = [_text(at(base), top - 10, _figure(base), anchor="middle", weight="600")]
    for index, (name, pair) in enumerate(ordered):
        y = top + index * (tall + 8)
        body.append(_text(left - 8, y + 13, name, anchor="end"))
        # Both ends may lie on one side of the base: the farther one is drawn first, and its label beyond it.
        for colour, (label, figure) in zip((COLOURS[0], COLOURS[1]), pair, strict=True):
            begin, end = sorted((at(base), at(figure)))
            body.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 0.5):.1f}" height="{tall}" fill="{colour}" '
                f'fill-opacity="0.85"><title>{escape(f"{name} {label}: ")}{_figure(figure)}</title></rect>'
            )
        for label, figure, side in _beside(pair):
            body.append(
                _text(at(figure) + 5 * side, y + 13, label, anchor="end" if side < 0 else "start", size=10),
            )
    bottom = top + len(ordered) * (tall + 8)
    body.append(f'<line x1="{at(base):.1f}" x2="{at(base):.1f}" y1="{top - 6}" y2="{bottom}" stroke="{INK}"/>')
    for tick in _ticks(least, most):
        body.append(_text(at(tick), bottom + 16, _figure(tick), anchor="middle", size=10))
    return _drawing(title, left + wide + 130, bottom + 44, body + _legend(["lower", "higher"], bottom + 36))


def _beside(pair: tuple[tuple[str, float], tuple[str, float]]) -> list[tuple[str, float, int]]:
    """Where the labels of a bar's two ends go: the one with the smaller figure to its left, the other to its right."""
    (low_label, low), (high_label, high) = sorted(pair, key=lambda end: end[1])
    return [(low_label, low, -1), (high_label, high, 1)]


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    shaded: tuple[float, float] | None = None,
    unit: str = "s",
    logarithmic: bool = False,
) -> str:
    """One panel per figure under each other, lines over a common axis in `unit`; `shaded` marks a span of it.

    `logarithmic`: both axes are, the common one by powers of two; all values must be greater than 0.
    """
    wide, tall, left, top = 640, 110, 56, 54
    every = [x for series in panels.values() for points in series.values() for x, _ in points]
    first, last = min(every), max(every)
    scale = math.log if logarithmic else float

    def at(x: float) -> float:
        return left + wide * (scale(x) - scale(first)) / ((scale(last) - scale(first)) or 1.0)

    body: list[str] = []
    names: list[str] = []
    for row, (panel, series) in enumerate(panels.items()):
        y = top + row * (tall + 44)
        values = [value for points in series.values() for _, value in points]
        most = max(values, default=0.0) or 1.0
        least = min(values) if logarithmic else 0.0
        if logarithmic and least == most:
            least = most / 10

        def up(value: float, least: float = least, most: float = most) -> float:
            """The share of the panel's height."""
            return (scale(value) - scale(least)) / (scale(most) - scale(least)) if logarithmic else value / most

        if shaded is not None:
            begin, end = at(shaded[0]), at(shaded[1])
            body.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{tall}" fill="#e08a1e" '
                'fill-opacity="0.12"/>'
            )
        body.append(_text(left, y - 6, panel, weight="600"))
        for mark in (least, math.sqrt(least * most) if logarithmic else most / 2, most):
            level = y + tall * (1 - up(mark))
            body.append(f'<line x1="{left}" x2="{left + wide}" y1="{level}" y2="{level}" stroke="{GRID}"/>')
            body.append(_text(left - 6, level + 4, _figure(mark), anchor="end", size=10))
        for name, points in series.items():
            if name not in names:
                names.append(name)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            drawn = " ".join(f"{at(x):.1f},{y + tall * (1 - up(value)):.1f}" for x, value in points)
            body.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    bottom = top + len(panels) * (tall + 44)
    for tick in _powers(first, last) if logarithmic else _ticks(first, last):
        body.append(_text(at(tick), bottom - 28, f"{_figure(tick)} {unit}", anchor="middle", size=10))
    width = left + wide + 40
    height = bottom + 14 + _legend_height(names, width)
    return _drawing(title, width, height, body + _legend(names, bottom, width))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ticks(first: float, last: float) -> list[float]:
    """At most nine, at round numbers."""
    least = (last - first) / 8 or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [step * n for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


def _powers(first: float, last: float) -> list[float]:
    """Powers of two, at most nine."""
    low, high = math.ceil(math.log2(first)), math.floor(math.log2(last))
    step = max(1, math.ceil((high - low + 1) / 9))
    return [2.0**power for power in range(low, high + 1, step)]


def _legend(names: Sequence[str], y: float, width: float = math.inf) -> list[str]:
    """Names beside their colours, in rows as wide as the drawing."""
    drawn: list[str] = []
    x = 12.0
    for index, name in enumerate(names):
        if x > 12 and x + 15 + 7 * len(name) > width:
            x, y = 12.0, y + _LEGEND_ROW
        drawn.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        drawn.append(_text(x + 15, y, name))
        x += 30 + 7 * len(name)
    return drawn


def _legend_height(names: Sequence[str], width: float) -> float:
    """Of the rows after the first."""
    rows, x = 0, 12.0
    for name in names:
        if x > 12 and x + 15 + 7 * len(name) > width:
            rows, x = rows + 1, 12.0
        x += 30 + 7 * len(name)
    return rows * _LEGEND_ROW


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

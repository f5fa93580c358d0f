"""The table of clients in docs/clients.md: one row for each thing that was run, written by `make test-clients`.

Rows of a run that was not repeated stay, so a part of the suite may run alone; rows whose test is gone are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "clients.md"
BEGIN, END = "<!-- clients:begin -->", "<!-- clients:end -->"
HEADER = ("client", "version", "what was run", "against", "result")


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    what: str
    against: str
    """`model`: the real default model; `script`: the real gateway over a scripted engine."""
    result: str

    @property
    def key(self) -> tuple[str, str]:
        return self.client, self.what


@dataclass(slots=True)
class Report:
    known: set[tuple[str, str]] = field(default_factory=set)
    """Client and run of every test that there is."""
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.rows[row.key] = row

    def write(self, page: Path = PAGE) -> None:
        text = page.read_text()
        kept = {row.key: row for row in read(text) if row.key in self.known}
        rows = sorted({**kept, **self.rows}.values(), key=lambda row: (row.client.lower(), row.what))
        before, _, rest = text.partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{render(rows)}\n{END}{rest.partition(END)[2]}")


def render(rows: list[Row]) -> str:
    lines = [HEADER, tuple("---" for _ in HEADER)]
    lines += [(row.client, row.version, row.what, row.against, row.result) for row in rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def read(text: str) -> list[Row]:
    """The rows of a page."""
    inside = text.partition(BEGIN)[2].partition(END)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.splitlines() if line]
    return [Row(*row) for row in cells[2:] if len(row) == len(HEADER)]

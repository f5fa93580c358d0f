"""`penstock bench soak`: here and not in `penstock.bench`, because forms of answers and tool calls are text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from penstock.bench.soak.traffic import Form
    from penstock.tools.toolbox import Toolbox

_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d( and (19|20)\d\d){0,3}!"
_CHOICES = ["yes", "no", "perhaps not", "yesterday"]


def soak(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of all requests and what happens to them.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="Stop after so many rounds.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Number of the first round, to repeat one that failed.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 60,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.")
    ] = None,
) -> None:
    """
    Everything at once on tiny random models: adapters, grammars, tool calls, speculation, preemption, the host tier,
    cancellations, deadlines, failing steps. Nothing may leak, and every answer must be that of the request alone.

    Examples:

        penstock bench soak

        penstock bench soak --minutes 60 --seed 7

        penstock bench soak --minutes 2 --device cuda
    """
    import dataclasses

    from rich.console import Console

    from penstock.bench import report as shown
    from penstock.bench.soak.run import Report, Settings, Soak
    from penstock.bench.soak.traffic import VOCABULARY
    from penstock.engine.grammar.guidance import GuidanceCompiler
    from penstock.errors import PenstockError

    console = Console()
    settings = Settings(seed=seed, minutes=minutes, rounds=rounds, start=start, requests=requests, device=device)
    with console.status("starting") as status:

        def tell(report: Report, what: str) -> None:
            done = f"{report.seconds / 60:.1f} of {minutes:g} min, {report.requests:,} requests compared"
            status.update(f"{done}; {what}")

        try:
            report = Soak(settings, forms(), lambda size: GuidanceCompiler(VOCABULARY, size), tell).run()
        except PenstockError as error:
            typer.secho(f"Error: {error}", fg="red", err=True)
            raise typer.Exit(1) from None
    console.print(shown.machine_line())
    table = shown.table(f"Soak, seed {seed}, {report.seconds / 60:.1f} minutes", "what", "how often")
    rows = {"rounds": report.rounds, "requests compared": report.requests, "tokens compared": report.tokens}
    rows |= {"wrong answers": 0, "leaked blocks, rows, slots": 0, "tokens that were ties": report.ties}
    for name, count in (rows | {"steps made to fail": report.faults} | dict(sorted(report.counts.items()))).items():
        table.add_row(name, f"{count:,}")
    table.add_row("MiB at the end", f"{report.memory_mib:,.0f}")
    table.add_row("MiB more than after a quarter", f"{report.growth_mib:+,.1f}")
    console.print(table)
    if json_file is not None:
        shown.write_json(json_file, "soak", dataclasses.asdict(settings), report.as_dict())


def forms() -> list[Form]:
    """The forms that answers of a soak may have to have, with what it means to have it."""
    from penstock.bench.soak.traffic import Form, text_of
    from penstock.text import grammars
    from penstock.tools.formats import FORMATS
    from penstock.tools.toolbox import Tool, Toolbox

    def json_with(check: Callable[[Any], bool]) -> Callable[[list[int]], bool]:
        return lambda tokens: check(json.loads(text_of(tokens)))

    def person(value: Any) -> bool:
        known = sorted(value) == sorted(_PERSON["required"]) and len(value["name"]) <= 8
        return known and 0 <= value["age"] <= 150 and set(value["tags"]) <= {"red", "green"}

    def date(tokens: list[int]) -> bool:
        return re.fullmatch(_DATE, text_of(tokens)) is not None

    tools = (Tool("weather", parameters=_CITY, strict=True), Tool("now"))
    found = [
        Form("a person in JSON", grammars.check(grammars.json_schema(_PERSON)), json_with(person)),
        Form("a date", grammars.check(grammars.regex(_DATE)), date),
        Form("a choice", grammars.check(grammars.choice(_CHOICES)), lambda tokens: text_of(tokens) in _CHOICES),
    ]
    for form in FORMATS.values():
        box = Toolbox(tools, form, use="required", parallel=form.name in ("hermes", "smollm2"))
        found.append(Form(f"calls as {form.name} has them", grammars.check(box.grammar()), _calls_of(box)))
    return found


def _calls_of(box: Toolbox) -> Callable[[list[int]], bool]:
    """Whether a text is calls of the box's functions, read whole and character by character alike."""
    from penstock.bench.soak.traffic import text_of
    from penstock.tools.events import gather

    def valid(tokens: list[int]) -> bool:
        text = text_of(tokens)
        readings = []
        for pieces in ([text], list(text)):
            parser = box.parser()
            readings.append(gather([event for piece in pieces for event in parser.push(piece)] + parser.flush()))
        whole = readings[0]
        arguments = [(call.name, sorted(json.loads(call.arguments or "{}"))) for call in whole.calls]
        wanted = {"weather": ["city", "unit"], "now": []}
        return readings[1] == whole and bool(arguments) and all(keys == wanted[name] for name, keys in arguments)

    return valid

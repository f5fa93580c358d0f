"""`penstock doctor`: what this machine can do, and what to do about what it cannot."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import ConfigFile


def doctor(
    config_file: ConfigFile = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """
    Check Python, torch, devices, kernels, memory, disk, model cache, port and limits; say what to do.

    Exit status: 0 when everything needed is there (warnings included), 1 when something fails.

    Examples:

        penstock doctor

        penstock doctor -c penstock.yaml

        penstock doctor --json
    """
    from penstock.cli.terminal import stderr
    from penstock.config import load
    from penstock.supervisor.diagnostics import CheckState, examine

    config = load(config_file)
    with stderr().status("looking around"):
        findings = examine(config)
    if json_output:
        import msgspec

        typer.echo(msgspec.json.encode(findings).decode())
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        colours = {CheckState.OK: "green", CheckState.WARN: "yellow", CheckState.FAIL: "bold red"}
        for finding in findings:
            mark = Text(f"{finding.state.value:5}", style=colours[finding.state])
            console.print(Text.assemble(mark, (f"{finding.name:14}", "bold"), finding.detail), soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"{'':19}→ {finding.remedy}", style="yellow"), soft_wrap=True)
    raise typer.Exit(1 if any(finding.state is CheckState.FAIL for finding in findings) else 0)

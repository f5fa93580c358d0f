"""`penstock doctor`: checks whether this machine can serve, and says how to fix what is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import ConfigFile


def doctor(
    config_file: ConfigFile = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """
    Check Python, torch, devices, kernels, memory, disk, model cache, port and limits, and suggest fixes.

    Exit status: 0 when no check fails (warnings are allowed), 1 otherwise.

    Examples:

        penstock doctor

        penstock doctor -c penstock.yaml

        penstock doctor --json
    """
    from penstock.cli.terminal import stderr
    from penstock.config import load
    from penstock.supervisor.diagnostics import CheckState, examine

    config = load(config_file)
    with stderr().status("checking"):
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

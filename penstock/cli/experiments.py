"""`penstock route arms|promote|rollback|detect`: experiments of a server, and how soon one notices a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Key, Url
from penstock.cli.lists import Output

Name = Annotated[str, typer.Argument(help="The experiment.")]
Arm = Annotated[str | None, typer.Option(help="The canary; only needed where there are several.")]
Why = Annotated[str, typer.Option(help="For the list of changes.")]
Share = Annotated[str, typer.Option(metavar="SHARE", help="Share of the requests, such as 5% or 0.05.")]


def arms(
    name: Annotated[str | None, typer.Argument(help="The experiment; by default all of them.")] = None,
    output: Output = "table",
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Show the arms of experiments: shares, errors, latency, quality and cost, each with its confidence interval.

    Examples:

        penstock route arms

        penstock route arms assistant -o csv
    """
    from penstock.cli.admin import call
    from penstock.cli.lists import Column, show

    found = [call("GET", url, key, _path(name))] if name else call("GET", url, key, "/experiments")["data"]
    rows = [{**arm, "experiment": one["id"], "status": one["status"]} for one in found for arm in one["arms"]]
    columns: list[Column[Any]] = [
        Column("experiment", lambda row: row["experiment"], rank=0),
        Column("arm", lambda row: row["arm"], rank=0),
        Column("kind", lambda row: row["kind"], rank=3),
        Column("model", lambda row: row["model"], rank=4),
        Column("share", lambda row: row["share"], lambda row: _percent(row["share"]), rank=0),
        Column("requests", lambda row: row["requests"], rank=0),
    ]
    for measure, unit, rank in (
        ("errors", "%", 0),
        ("ttft", "s", 1),
        ("latency", "s", 3),
        ("speed", "", 4),
        ("grades", "", 2),
        ("dislikes", "%", 2),
        ("cost", "$", 2),
    ):
        columns += _columns(measure, unit, rank, output)
    columns.append(Column("rolled back", lambda row: row["rolled_back"], rank=1, fold=True))
    show(columns, rows, output, empty="There are no experiments; add one under `experiments` in the configuration.")


def promote(
    name: Name,
    arm: Arm = None,
    to: Share = "100%",
    why: Why = "",
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Give a canary more of the requests; all of them, unless --to says how many. Its users stay in it.

    Examples:

        penstock route promote assistant --to 25%

        penstock route promote assistant
    """
    from penstock.cli.admin import call

    body = {"arm": arm, "to": _share(to), "why": why}
    _tell(call("POST", url, key, f"{_path(name)}/promote", body))


def rollback(name: Name, arm: Arm = None, why: Why = "", url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Give a canary no more requests, or all canaries if none is named: the control answers.

    Examples:

        penstock route rollback assistant --why "wrong prices in answers"
    """
    from penstock.cli.admin import call

    _tell(call("POST", url, key, f"{_path(name)}/rollback", {"arm": arm, "why": why}))


def detect(
    share: Share = "5%",
    errors: Annotated[str, typer.Option(metavar="SHARE", help="Error rate of the control.")] = "1%",
    canary_errors: Annotated[str, typer.Option(metavar="SHARE", help="Error rate of the canary.")] = "1%",
    slower: Annotated[
        float, typer.Option(min=0.01, help="Time to first token of the canary, over the control's.")
    ] = 1.0,
    requests: Annotated[int, typer.Option(min=100, help="Requests of an experiment, both arms together.")] = 10_000,
    experiments: Annotated[int, typer.Option(min=1, help="How many experiments are simulated.")] = 200,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999999, help="As in the configuration.")] = 0.99,
) -> None:
    """
    Simulate experiments: how often is a canary rolled back, and after how many requests?

    With equal arms, the share that is rolled back is how often the test is wrong.

    Examples:

        penstock route detect --experiments 1000

        penstock route detect --canary-errors 10% --share 5%
    """
    from penstock.routing.experiments.simulation import Scenario, simulate
    from penstock.routing.experiments.verdict import Rules

    scenario = Scenario(
        share=_share(share),
        errors=_share(errors),
        canary_errors=_share(canary_errors),
        slower=slower,
        requests=requests,
    )
    found = simulate(scenario, Rules(confidence=confidence), experiments)
    typer.echo(f"rolled back: {found.rolled_back} of {experiments} ({found.share:.1%})")
    if found.requests:
        middle = sorted(found.requests)[len(found.requests) // 2]
        met = sorted(found.canary_errors)[len(found.canary_errors) // 2]
        typer.echo(f"median until then: {middle:,} requests, {met} of them failed by the canary")


def _columns(measure: str, unit: str, rank: int, output: str) -> list[Any]:
    from penstock.cli.lists import Column

    def part(name: str) -> Callable[[Any], Any]:
        return lambda row: row[measure][name]

    if output == "table":
        return [Column(measure, part("mean"), lambda row: _shown(row[measure], unit), rank=rank)]
    names = {measure: "mean", **{f"{measure}_{name}": name for name in ("low", "high", "n")}}
    return [Column(shown, part(name)) for shown, name in names.items()]


def _shown(figure: dict[str, Any], unit: str) -> str:
    if figure["mean"] is None:
        return "-"

    def text(value: float) -> str:
        return f"{value:.1%}" if unit == "%" else f"{'$' if unit == '$' else ''}{value:.3g}{'s' if unit == 's' else ''}"

    if figure["low"] is None:
        return text(figure["mean"])
    return f"{text(figure['mean'])} [{text(figure['low'])}, {text(figure['high'])}]"


def _percent(share: float) -> str:
    return f"{share * 100:.4g}%"


def _path(name: str) -> str:
    from urllib.parse import quote

    return f"/experiments/{quote(name, safe='/')}"


def _share(given: str) -> float:
    from penstock.config.units import SHARE_HELP, parse_share
    from penstock.errors import PenstockError

    try:
        return parse_share(given)
    except ValueError:
        raise PenstockError(f"{given}: write {SHARE_HELP}") from None


def _tell(experiment: dict[str, Any]) -> None:
    arms = [arm for arm in experiment["arms"] if arm["kind"] != "shadow"]
    shares = ", ".join(f"{arm['arm']} {_percent(arm['share'])}" for arm in arms)
    typer.echo(f"{experiment['id']}: {experiment['status']}; {shares}")

"""`penstock route arms|promote|rollback|detect` against a gateway, and how an experiment is written down."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config.check import Checker
from penstock.config.experiments import ExperimentConfig
from penstock.config.load import check, load
from penstock.config.tree import parse_yaml
from penstock.errors import ConfigError, PenstockError
from penstock.text import TextModel
from tests.gateway.conftest import Serving, serving, text
from tests.gateway.generation.test_experiments import other, split

__all__ = ["serving", "text"]

MODELS = "models: [{name: v1, source: a}, {name: v2, source: b}]\n"


async def penstock(*words: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["route", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


async def test_arms_are_shown_promoted_and_rolled_back(serving: Serving, text: TextModel) -> None:
    async with serving(more=[other(text)], experiments=(split(0.05),)) as gateway:
        for number in range(10):
            await gateway.chat(model="assistant", user=f"u{number}")
        url = ("--url", f"http://127.0.0.1:{gateway.port}")
        table = await penstock("arms", "assistant", *url)
        assert "control" in table and "95%" in table and "5%" in table and "errors" in table
        rows = json.loads(await penstock("arms", "-o", "json", *url))
        assert [row["arm"] for row in rows] == ["control", "v2"]
        assert (
            rows[0]["errors"] == 0.0 and rows[0]["errors_high"] < 1 and rows[0]["requests"] + rows[1]["requests"] == 10
        )
        assert (await penstock("arms", "-o", "csv", *url)).startswith("experiment,arm,kind,model,share,requests,errors")
        assert (
            await penstock("promote", "assistant", "--to", "25%", *url) == "assistant: running; control 75%, v2 25%\n"
        )
        done = await penstock("rollback", "assistant", "--why", "slow", *url)
        assert done == "assistant: rolled back; control 100%, v2 0%\n"
        with pytest.raises(PenstockError, match="There is no experiment `other`"):
            await penstock("promote", "other", *url)
        with pytest.raises(PenstockError, match="a share such as 5%"):
            await penstock("promote", "assistant", "--to", "200%", *url)


async def test_how_soon_a_difference_is_noticed() -> None:
    said = await penstock("detect", "--canary-errors", "100%", "--requests", "1000", "--experiments", "5")
    assert said.startswith("rolled back: 5 of 5 (100.0%)\nmedian until then: ")


def test_shares_are_written_as_people_write_them() -> None:
    config = check(parse_yaml(f"{MODELS}experiments: [{{name: a, control: v1, canary: {{v2: 5%}}, judge: 0.2}}]", "x"))
    (found,) = config.experiments
    assert found.canaries == {"v2": 0.05} and found.judge == 0.2
    assert load(Path(__file__).parents[2] / "examples/experiment.yaml", environ={}).experiments[0].canaries


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{name: a, control: v1, canary: {v2: 105%}}", "a share such as 5%"),
        ("{name: a, control: v1, canary: {v2: 5}}", "a share such as 5%"),
        ("{name: a, control: v1, canary: [v2]}", "expected a mapping of names"),
        ("{name: a, canary: {v2: 5%}}", "control is needed"),
        ("{name: a, control: v1}", "canary or shadow is needed"),
        ("{name: a, control: v1, canary: {v3: 5%}}", 'there is no model or route "v3"'),
        ("{name: a, control: v1, canary: {v1: 5%}}", "is the control"),
        ("{name: v1, canary: {v2: 60%}, stages: [50%, 20%]}", "rising shares"),
        ("{canary: {v2: 5%}, control: v1}", "name is needed"),
        ("{name: a, control: v1, canari: {v2: 5%}}", 'did you mean "canary"'),
    ],
)
def test_mistakes_are_named(written: str, problem: str) -> None:
    with pytest.raises(ConfigError) as found:
        check(parse_yaml(f"{MODELS}experiments: [{written}]", "x"))
    assert problem in str(found.value)


def test_a_share_survives_the_way_to_a_child() -> None:
    node = parse_yaml(json.dumps({"name": "a", "control": "b", "canary": {"v2": 0.05}}), "x")
    checker = Checker()
    made: ExperimentConfig = checker.section(ExperimentConfig, node, "")
    assert made.canary == {"v2": 0.05} and not checker.problems

"""Manifests stay in step with the program: commands, options, settings, metrics, health paths and the image."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from penstock.cli.app import app
from penstock.config import load
from penstock.fleet.kubernetes import Deployment, chart, scaler
from penstock.fleet.kubernetes.extras import service_monitor
from penstock.fleet.kubernetes.gateways import first_key
from penstock.fleet.kubernetes.instructions import instructions
from penstock.fleet.kubernetes.manifests import objects
from penstock.fleet.kubernetes.pods import HOME, USER
from penstock.gateway.api.endpoints import ENDPOINTS
from tests.fleet.kubernetes.cases import EVERYTHING, EXAMPLES, RICH, ROOT, deployment

COMMANDS: click.Command = typer.main.get_command(app)


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> list[Deployment]:
    rich = deployment(RICH, tmp_path_factory.mktemp("rich"))
    return [rich, *(Deployment.of(file, EVERYTHING) for file in EXAMPLES)]


def containers(deployments: list[Deployment]) -> Iterator[dict[str, Any]]:
    for deployed in deployments:
        for thing in [*objects(deployed), deployed.parameters.plain(first_key(deployed))]:
            pod = thing.get("spec", {}).get("template", {}).get("spec", {})
            yield from [*pod.get("initContainers", []), *pod.get("containers", [])]


def check_command(words: list[str]) -> None:
    """The command exists, each option belongs to it, and every option that takes a value has one."""
    line, command = " ".join(words), COMMANDS
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    while words:
        word, *words = words
        if word.startswith("-"):
            assert word in options, f"{line}: no option {word}"
            if not getattr(options[word], "is_flag", False):
                assert words and not words[0].startswith("--"), f"{line}: {word} takes a value"
                words = words[1:]


def test_commands_and_options_exist(deployments: list[Deployment]) -> None:
    seen = set()
    for container in containers(deployments):
        check_command(container["args"])
        seen.add(container["args"][0])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container.get(probe, {}).get("exec", {}).get("command")
            if command:
                assert command[0] == "penstock"
                check_command(command[1:])
    assert seen == {"engine", "gateway", "join", "keys", "pull"}


def test_commands_that_the_operator_is_told_exist(deployments: list[Deployment]) -> None:
    lines = [line.strip() for deployed in deployments for line in instructions(deployed, None, helm=False)]
    commands = {line.partition(" >")[0] for line in lines if line.startswith("penstock ")}
    assert commands, "keys of ranks"
    for command in commands:
        check_command(command.split()[1:])


def test_the_mounted_configuration_is_accepted_with_the_variables(
    deployments: list[Deployment], tmp_path: Path
) -> None:
    for deployed in deployments:
        file = tmp_path / "penstock.yaml"
        file.write_text(deployed.pods.text)
        values = {"postgresql": "postgresql://u:p@db/p", "fleet": "redis://r", "headers": "[x-a=b]"}
        environ = {
            setting.variable: values["headers"] if "headers" in setting.key else values["fleet"]
            for setting in deployed.pods.secrets
        }
        environ["PENSTOCK_STORE__URL"] = values["postgresql"]
        for container in containers([deployed]):
            for entry in container["env"]:
                if "value" in entry and "__" in entry["name"]:
                    environ[entry["name"]] = entry["value"]
        config = load(file, environ=environ)
        assert [model.name for model in config.models] == [model.name for model in deployed.config.models]
        assert config.store.url == values["postgresql"]
        assert config.server.drain_delay_s > 0


def test_metrics_are_those_that_gateways_export(deployments: list[Deployment]) -> None:
    documented = set(re.findall(r"(?:penstock_|vllm:)\w+", (ROOT / "docs/operations.md").read_text()))
    code = "".join(path.read_text() for path in (ROOT / "penstock").rglob("*.py") if "kubernetes" not in path.parts)
    queries = [
        trigger["metadata"]["query"]
        for deployed in deployments
        for thing in objects(deployed)
        if thing["kind"] == "ScaledObject"
        for trigger in thing["spec"]["triggers"]
        if "query" in trigger["metadata"]
    ]
    rules = scaler.adapter_rules(deployments[0])["rules"]["external"]
    queries += [rule[key] for rule in rules for key in ("seriesQuery", "metricsQuery")]
    names = {name for query in queries for name in re.findall(r"(?:penstock_|vllm:)\w+", query)}
    assert len(names) >= 5
    for name in names:
        assert name in documented, f"{name} is not in the table of metrics"
        assert f'"{name}"' in code, f"nothing exports {name}"


def test_health_paths_exist(deployments: list[Deployment]) -> None:
    known = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "GET"}
    for container in containers(deployments):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = container.get(probe, {}).get("httpGet", {}).get("path")
            assert path is None or path in known, path
    monitor = deployments[0].parameters.plain(service_monitor(deployments[0]))
    assert {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]} <= known


def test_ports_are_named_once_and_used_by_that_name(deployments: list[Deployment]) -> None:
    for deployed in deployments:
        named = {port["name"] for container in containers([deployed]) for port in container.get("ports", [])}
        for thing in objects(deployed):
            if thing["kind"] == "Service":
                assert {port["targetPort"] for port in thing["spec"].get("ports", [])} <= named


def test_every_volume_that_is_mounted_exists(deployments: list[Deployment]) -> None:
    for deployed in deployments:
        for thing in objects(deployed):
            pod = thing.get("spec", {}).get("template", {}).get("spec")
            if pod is None:
                continue
            claims = {claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", [])}
            there = {volume["name"] for volume in pod["volumes"]} | claims
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= there


def test_selectors_select(deployments: list[Deployment]) -> None:
    """Every selector of a Service, budget, policy or pool matches the pods that it is for."""
    for deployed in deployments:
        things = objects(deployed)
        pods = [thing["spec"]["template"]["metadata"]["labels"] for thing in things if thing["kind"] in WORKLOADS]
        for thing in things:
            spec = thing.get("spec", {})
            selectors = [spec[key] for key in ("selector", "podSelector") if key in spec]
            for selector in selectors:
                wanted = selector.get("matchLabels", selector)
                assert any(wanted.items() <= labels.items() for labels in pods), (thing["kind"], wanted)


WORKLOADS = ("Deployment", "StatefulSet", "Job")


def test_scale_targets_exist_and_have_no_fixed_number(deployments: list[Deployment]) -> None:
    for options in (EVERYTHING, replace(EVERYTHING, scaler="hpa")):
        deployed = Deployment.of(ROOT / "examples/autoscale.yaml", options)
        sets = {thing["metadata"]["name"]: thing for thing in objects(deployed) if thing["kind"] == "StatefulSet"}
        scalers = [thing for thing in objects(deployed) if "scaleTargetRef" in thing.get("spec", {})]
        assert len(scalers) == 1
        for one in scalers:
            assert "replicas" not in sets[one["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_the_image_has_the_user_folders_and_targets_that_pods_use(deployments: list[Deployment]) -> None:
    text = (ROOT / "deploy/image/Containerfile").read_text()
    assert re.search(rf"^USER {USER}:{USER}$", text, re.M)
    assert re.search(r'^ENTRYPOINT \["penstock"\]$', text, re.M)
    assert f"HOME={HOME}" in text and "EXPOSE 8000" in text
    targets = {container["image"].rpartition("-")[2] for container in containers(deployments)}
    assert targets == {"gateway", "cpu", "cuda"}
    for target in targets:
        assert re.search(rf"^FROM runtime AS {target}$", text, re.M), f"no image {target}"


def test_values_are_used_by_the_templates(tmp_path: Path) -> None:
    """A value of the chart that nothing reads would be an option that is ignored."""
    files = chart(deployment(RICH, tmp_path))
    templates = "".join(text for name, text in files.items() if name.startswith("templates/"))

    def used(path: tuple[str, ...]) -> bool:
        dotted, quoted = re.escape(".Values." + ".".join(path)), re.escape(" ".join(f'"{part}"' for part in path))
        return re.search(rf"(?:{dotted}|{quoted})(?: \||\)| }})", templates) is not None

    def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, value in tree.items():
            here = (*path, key)
            if used(here):
                yield here
            else:
                assert isinstance(value, dict) and value, f"nothing uses {'.'.join(here)}"
                yield from leaves(value, here)

    assert len(list(leaves(yaml.safe_load(files["values.yaml"])))) > 20

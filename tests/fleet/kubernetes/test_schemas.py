"""Manifests against the API's own schemas, and the Helm chart rendered by the real Helm: the same objects."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.fleet.kubernetes import ClusterOptions, Deployment, chart
from penstock.fleet.kubernetes.manifests import objects
from tests import parts
from tests.fleet.kubernetes.cases import EVERYTHING, EXAMPLES, RICH, deployment
from tests.fleet.kubernetes.custom_resources import SCHEMAS
from tests.fleet.kubernetes.helm import helm

VERSIONS = ("1.32", "1.37")
CHECK = """
import json, sys, kubernetes_validate
for version in sys.argv[1:]:
    for thing in json.load(open("objects.json")):
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except Exception as error:
            print(version, thing["kind"], thing["metadata"]["name"], error)
"""


def all_deployments(folder: Path) -> Iterator[Deployment]:
    yield deployment(RICH, folder)
    for file in EXAMPLES:
        yield Deployment.of(file, ClusterOptions())
        yield Deployment.of(file, EVERYTHING)
    yield Deployment.of(next(file for file in EXAMPLES if file.stem == "autoscale"), replace(EVERYTHING, scaler="hpa"))


def is_custom(thing: dict[str, Any]) -> bool:
    return (thing["apiVersion"], thing["kind"]) in SCHEMAS


def test_custom_resources_have_the_fields_of_their_definitions(tmp_path: Path) -> None:
    kinds = set()
    for deployed in (deployment(RICH, tmp_path), Deployment.of(EXAMPLES[-1], EVERYTHING)):
        for thing in filter(is_custom, objects(deployed)):
            jsonschema.validate(thing, SCHEMAS[thing["apiVersion"], thing["kind"]])
            kinds.add(thing["kind"])
    assert kinds == {kind for _, kind in SCHEMAS}


@pytest.mark.slow
def test_the_api_accepts_every_object(tmp_path: Path) -> None:
    things = [thing for one in all_deployments(tmp_path) for thing in objects(one) if not is_custom(thing)]
    assert len({thing["kind"] for thing in things}) >= 10
    (tmp_path / "objects.json").write_text(json.dumps(things))
    command = [parts.python("kubernetes"), "-c", CHECK, *VERSIONS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_helm_renders_the_same_objects(tmp_path: Path) -> None:
    program = helm(tmp_path)
    seen = set()
    for number, deployed in enumerate(all_deployments(tmp_path)):
        kinds = frozenset(thing["kind"] for thing in objects(deployed))
        if kinds in seen:
            continue  # each takes half a minute under emulation
        seen.add(kinds)
        folder = write(chart(deployed), tmp_path / f"chart-{number}")
        if number == 0:
            assert "0 chart(s) failed" in run(*program, "lint", "--strict", str(folder))
        rendered = run(*program, "template", "penstock", str(folder), "--namespace", "penstock")
        assert by_name(yaml.safe_load_all(rendered)) == by_name(objects(deployed))
    assert len(seen) >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_values_of_the_chart_change_what_they_say(tmp_path: Path) -> None:
    program = helm(tmp_path)
    folder = write(chart(deployment(RICH, tmp_path)), tmp_path / "chart")
    given = ["gateway.replicas=5", "secret.name=mine", "image.gateway=other:1", "networkPolicy.enabled=false"]
    given += ["engines.llama-8b-decode.replicas=7", "engines.spot.max=20", "serviceMonitor.enabled=false"]
    options = [word for value in given for word in ("--set", value)]
    things = by_name(yaml.safe_load_all(run(*program, "template", "llm", str(folder), "-n", "prod", *options)))
    assert things["Deployment", "llm-gateway"]["spec"]["replicas"] == 5
    assert things["StatefulSet", "llm-llama-8b-decode"]["spec"]["replicas"] == 7
    assert things["ScaledObject", "llm-spot"]["spec"]["maxReplicaCount"] == 20
    gateway = things["Deployment", "llm-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert gateway["image"] == "other:1"
    assert {one["valueFrom"]["secretKeyRef"]["name"] for one in gateway["env"] if "secretKeyRef" in str(one)} == {
        "mine"
    }
    assert "minilm=tcp://llm-minilm-0.llm-minilm.prod.svc:5555" in gateway["args"]
    assert not {"NetworkPolicy", "ServiceMonitor"} & {kind for kind, _ in things}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def by_name(things: Any) -> dict[tuple[str, str], Any]:
    found = {}
    for thing in filter(None, things):
        # Who manages an object is the one thing that differs.
        thing["metadata"]["labels"].pop("app.kubernetes.io/managed-by", None)
        found[thing["kind"], thing["metadata"]["name"]] = thing
    return found

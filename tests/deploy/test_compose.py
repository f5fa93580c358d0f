"""The Compose project: valid by the specification's schema, every flag exists, and it matches deploy/compose."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import typer
import yaml

from penstock.cli.app import app
from penstock.config import load
from penstock.errors import ConfigError
from penstock.fleet.compose import ComposeOptions, project
from tests import parts
from tests.engine_host.client import eventually
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def written(options: ComposeOptions | None = None, **flags: str) -> dict[str, Any]:
    config = load(environ={}, flags={key.replace("__", "."): value for key, value in flags.items()})
    made: dict[str, Any] = yaml.safe_load(project(config, options or ComposeOptions())["compose.yaml"])
    return made


def test_the_committed_project_is_that_of_an_empty_configuration() -> None:
    folder = ROOT / "deploy" / "compose"
    made = project(load(environ={}), ComposeOptions())
    assert {name: (folder / name).read_text() for name in made} == made, "run: penstock deploy compose --output"


def test_every_command_and_flag_of_its_services_exists_and_every_image_is_a_target_of_the_containerfile() -> None:
    targets = {
        line.split()[-1] for line in (ROOT / "deploy/image/Containerfile").read_text().splitlines() if " AS " in line
    }
    root: Any = typer.main.get_command(app)
    checked = 0
    for service in written(ComposeOptions(device="cuda"))["services"].values():
        lines = [service["healthcheck"]["test"]]
        if service["image"].startswith("penstock:"):
            assert service["image"].rpartition("-")[2] in targets
            lines.append(["CMD", "penstock", *service["command"]])
        for _, program, *words in lines:
            if program == "penstock":
                command = root.commands[words[0]]
                command.make_context(words[0], words[1:], resilient_parsing=False)  # raises for an unknown flag
                checked += 1
    assert checked == 6


def test_it_follows_the_configuration() -> None:
    services = written(ComposeOptions(gateways=3), server__port="9000", server__drain_s="90")["services"]
    assert [services[f"gateway-{n}"]["ports"] for n in (1, 2, 3)] == [["9000:9000"], ["9001:9000"], ["9002:9000"]]
    assert services["gateway-1"]["stop_grace_period"] == "120s"
    engine = written(ComposeOptions(device="cuda"), **{"models__*__tensor_parallel": "2", "models__*__replicas": "3"})
    devices = engine["services"]["engine-smollm2-135m"]["deploy"]
    assert devices["replicas"] == 3 and devices["resources"]["reservations"]["devices"][0]["count"] == 2
    with pytest.raises(ConfigError, match="no models"):
        project(dataclasses.replace(load(environ={}), models=()), ComposeOptions())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("models: [{source: smollm2-135m, autoscale: {min: 1, max: 3}}]", r"autoscale: nothing here starts containers"),
        ("models: [{source: smollm2-135m, pools: [{name: a, autoscale: {max: 2}}]}]", r"autoscale: nothing here"),
        ("models: [{source: smollm2-135m, time_slice: gpu0}]", r"the gateways of `penstock serve`"),
        ("models: [{replicas: 2, replica_roles: [prefill, decode]}]", r"containers of a service are alike"),
        ("models: [{source: ./model}]", r"write an absolute path"),
        ("models: [{host_memory: 1GiB, disk_memory: 1GiB, disk_path: /var/cache}]", r"name a folder there"),
        ("watermark: {secret_file: w.secret}", r"watermark.secret_file: w.secret is mounted .* write an absolute path"),
        ("tool_servers: [{name: t, openapi: shop.yaml}]", r"tool_servers\[0\].openapi: .* write an absolute path"),
        (
            "remotes: [{name: r, model: m, urls: ['http://localhost:9001/v1']}]",
            r"remotes\[0\].urls: localhost is the container itself",
        ),
    ],
)
def test_what_a_project_cannot_do_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        project(load(file, environ={}), ComposeOptions())


SURROUNDED = """
models:
  - {name: own, source: /srv/own, adapters: [{name: a, source: /srv/a}]}
  - {name: far, source: hf:o/n, host_memory: 1GiB, disk_memory: 1GiB, disk_path: /var/lib/penstock/blocks}
  - {name: stored, source: /srv/c:$x, adapters: [{name: b, source: s3://bucket/b}]}
remotes: [{name: r, model: m, urls: ['https://api.example.com/v1'], key_env: THEIR_KEY}]
watermark: {secret_file: /srv/watermark.secret}
tool_servers:
  - {name: shop, openapi: /srv/shop.yaml, headers: ['Authorization: Bearer ${SHOP_KEY}']}
  - {name: inline, openapi: '{"openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "paths": {}}'}
"""


def surrounded(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "penstock.yaml"
    file.write_text(SURROUNDED)
    made: dict[str, Any] = yaml.safe_load(project(load(file, environ={}), ComposeOptions())["compose.yaml"])
    return made


def test_files_of_this_machine_are_mounted_and_keys_passed_on(tmp_path: Path) -> None:
    services = surrounded(tmp_path)["services"]

    def mounted(name: str) -> set[str]:
        binds = [volume for volume in services[name]["volumes"] if isinstance(volume, dict)]
        for bind in binds:
            assert bind["target"] == bind["source"] and bind["read_only"] and not bind["bind"]["create_host_path"]
        return {bind["source"] for bind in binds}

    # A colon separates nothing there, and a dollar sign is doubled, as Compose reads it.
    of_models = {"/srv/own", "/srv/a", "/srv/c:$$x"}
    assert mounted("gateway-1") == of_models | {"/srv/watermark.secret", "/srv/shop.yaml"}
    assert mounted("engine-own") == {"/srv/own", "/srv/a"}
    assert mounted("engine-stored") == {"/srv/c:$$x"} and not mounted("engine-far")

    def passed_on(name: str) -> set[str]:
        return {key for key, value in services[name]["environment"].items() if value is None}

    store = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"}
    assert passed_on("gateway-1") == {"THEIR_KEY", "SHOP_KEY", "HF_TOKEN"} | store
    assert passed_on("engine-far") == {"HF_TOKEN"} and passed_on("engine-stored") == store
    assert not passed_on("engine-own")


def test_no_password_is_in_a_file_of_the_project_and_secrets_are_made_once(tmp_path: Path) -> None:
    for name, text in project(load(environ={}), ComposeOptions()).items():
        (tmp_path / name).write_text(text)
    make = ["sh", "make-secrets.sh"]
    subprocess.run(make, cwd=tmp_path, check=True)
    before = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    subprocess.run(make, cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == before
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert set(before) == set(written()["secrets"])
    assert before["redis-url"] == f"redis://:{before['redis-password']}@redis:6379/0"
    assert len(before["fleet-secret"]) == 64


@pytest.mark.slow
def test_it_is_valid_by_the_schema_of_the_compose_specification(tmp_path: Path) -> None:
    (found,) = parts.folder("compose").rglob("specs/compose-spec.json")
    schema = json.loads(found.read_text())
    for options in (ComposeOptions(), ComposeOptions(device="cuda", gateways=5)):
        jsonschema.validate(written(options), schema)
    jsonschema.validate(surrounded(tmp_path), schema)
    wrong = written()
    wrong["services"]["redis"]["restrat"] = "always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_gateways_and_engines_find_each_other_and_share_keys(
    default_model: Path, valkey: Any, postgres_url: str, tmp_path: Path
) -> None:
    """The commands and variables of the project as processes on this machine, with a real Redis and PostgreSQL."""
    (tmp_path / "penstock.yaml").write_text(
        f"models: [{{name: tiny, source: {default_model}, kv_memory: 32MiB, max_model_len: 512, max_running: 4}}]\n"
    )
    config = load(tmp_path / "penstock.yaml", environ={})
    for name, text in project(config, ComposeOptions()).items():
        (tmp_path / name).write_text(text)
    subprocess.run(["sh", "make-secrets.sh"], cwd=tmp_path, check=True)
    (tmp_path / "secrets" / "redis-url").write_text(valkey.connection_url)
    (tmp_path / "secrets" / "store-url").write_text(postgres_url + "\n")
    ports = {name: str(free_port()) for name in ("gateway-1", "gateway-2", "engine-tiny")}
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    places = {"/run/secrets": str(tmp_path / "secrets"), "/etc/penstock": str(tmp_path), "0.0.0.0": "127.0.0.1"}

    def command(name: str, words: list[str]) -> list[str]:
        instead = places | {"8000": ports[name], ":5555": f":{ports[name]}"}
        for there, here in instead.items():
            words = [word.replace(there, here) for word in words]
        return [sys.executable, "-m", "penstock", *words]

    def environment(name: str) -> dict[str, str]:
        here = {
            key: value.replace("/run/secrets", places["/run/secrets"])
            for key, value in services[name]["environment"].items()
        }
        return os.environ | here | {"PENSTOCK_STATE": str(tmp_path / name), "PENSTOCK_FLEET__ADVERTISE": "127.0.0.1"}

    def check(name: str) -> bool:
        test = services[name]["healthcheck"]["test"]
        assert test[:2] == ["CMD", "penstock"]
        return subprocess.run(command(name, test[2:]), env=environment(name), cwd=tmp_path).returncode == 0

    create = command("gateway-1", ["keys", "create", "--tenant", "t"])
    made = subprocess.run(create, env=environment("gateway-1"), cwd=tmp_path, capture_output=True, text=True)
    key = made.stdout.split()[-1]
    processes = [
        subprocess.Popen(command(name, services[name]["command"]), env=environment(name), cwd=tmp_path)
        for name in ports
    ]
    try:
        assert all(eventually(lambda name=name: check(name), 300) for name in ports)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        headers = {"authorization": f"Bearer {key}"}
        for name in ("gateway-1", "gateway-2"):
            url = f"http://127.0.0.1:{ports[name]}"
            assert eventually(lambda url=url: httpx.get(f"{url}/health/ready", timeout=180).status_code == 200, 300)
            assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).status_code == 401
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
            assert answer.status_code == 200, answer.text
        for process in processes:
            process.terminate()
        assert [process.wait(120) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()

"""Settings that name files of the machine that deploys: none reaches a ConfigMap as it is, unless it is mounted."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.fleet.kubernetes import ClusterOptions
from penstock.fleet.kubernetes.instructions import instructions, secret_keys
from penstock.fleet.kubernetes.manifests import objects
from tests.fleet.kubernetes.cases import deployment, found

HERE = "/srv/of-this-machine/thing"
NO_FILES = {
    "input_files.url_hosts": "hosts",
    "input_files.url_networks": "networks",
    "log_pipeline.clickhouse": "a URL, and of a program that runs elsewhere",
    "models.trust_remote_code": "names, which `models.source` has to have too",
    "models.disk_path": "the folder at which a volume of the pod is mounted",
}
"""Settings whose names or explanations speak of files, and why they need nothing."""
VALUES: dict[str, Any] = {"store.url": f"sqlite:///{HERE}", "knowledge.url": f"sqlite:///{HERE}"}
BASE: dict[str, Any] = {
    "store": {"url": "postgresql://db/penstock"},
    "models": [{"name": "m", "source": "hf:org/m"}],
    "encoders": [{"name": "e", "source": "hf:org/e"}],
    "remotes": [{"name": "r", "urls": ["https://llm.example.org/v1"], "model": "x"}],
    "tool_servers": [{"name": "t", "mcp_url": "https://tools.example.org/mcp"}],
}
PLACED = {"machines": ["local", "box"], "listen": "tcp://0.0.0.0:7001"}


def settings(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every setting of a class of settings, with its explanation."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, inner = hints[field.name], None
        for one in (kind, *typing.get_args(kind)):
            inner = next((each for each in (one, *typing.get_args(one)) if dataclasses.is_dataclass(each)), inner)
        if inner is not None:
            yield from settings(typing.cast(type, inner), (*path, field.name))
        elif "str" in str(kind):
            yield ".".join((*path, field.name)), field.metadata.get("doc", "")


def names_files(setting: str, doc: str) -> bool:
    return re.search(r"\b(file|folder|path|directory)", f"{setting.replace('_', ' ')} {doc}".lower()) is not None


FILES = sorted({name for name, doc in settings(Config) if names_files(name, doc)} - set(NO_FILES))


def with_setting(setting: str) -> dict[str, Any]:
    tree = yaml.safe_load(yaml.safe_dump(BASE))
    *sections, name = setting.split(".")
    holder = tree
    for section in sections:
        holder = holder.setdefault(section, dict(PLACED) if section == "placement" else {})
        holder = holder[0] if isinstance(holder, list) else holder
    holder[name] = VALUES.get(setting, HERE)
    if setting.startswith("models.placement"):
        tree["models"][0]["pipeline_parallel"] = 2
    if setting == "tool_servers.openapi":
        del holder["mcp_url"]
    elif setting == "models.placement.curve_key":
        holder["curve_clients"] = HERE
    elif setting == "models.placement.curve_clients":
        holder["curve_key"] = HERE
    return typing.cast("dict[str, Any]", tree)


def test_there_are_such_settings() -> None:
    assert {"watermark.secret_file", "remotes.key_file", "fleet.secret_file", "models.source"} <= set(FILES)
    assert set(NO_FILES) <= {name for name, _ in settings(Config)}


@pytest.mark.parametrize("setting", FILES)
def test_files_of_this_machine_are_mounted_or_refused(setting: str, tmp_path: Path) -> None:
    try:
        made = deployment(yaml.safe_dump(with_setting(setting)), tmp_path)
    except ConfigError as error:
        assert "cannot be deployed" in str(error), "the configuration itself is valid"
        assert setting.rpartition(".")[2] in str(error) or HERE in str(error), "it says which"
        return
    assert HERE not in yaml.safe_dump(objects(made)), "a path of this machine, which no pod has"


@pytest.mark.parametrize("text", ['{"openapi": "3.1.0", "paths": {}}', "openapi: 3.1.0\npaths: {}\n"])
def test_openapi_documents_become_part_of_the_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "api").write_text(text)
    made = deployment(yaml.safe_dump({**BASE, "tool_servers": [{"name": "t", "openapi": "api"}]}), tmp_path)
    written = yaml.safe_load(found(made, "ConfigMap", "penstock")["data"]["penstock.yaml"])
    assert written["tool_servers"][0]["openapi"] == text


def test_secrets_of_gateways_are_keys_of_the_secret(tmp_path: Path) -> None:
    tree = {**BASE, "watermark": {"secret_file": "my files/mark"}}
    tree["remotes"] = [{**BASE["remotes"][0], "key_file": "/srv/key"}]
    made = deployment(yaml.safe_dump(tree), tmp_path)
    written = yaml.safe_load(found(made, "ConfigMap", "penstock")["data"]["penstock.yaml"])
    assert written["watermark"]["secret_file"] == "/etc/penstock/secret/watermark-secret"
    assert written["remotes"][0]["key_file"] == "/etc/penstock/secret/remote-0-key"

    def keys(kind: str, name: str) -> list[str]:
        volumes = found(made, kind, name)["spec"]["template"]["spec"]["volumes"]
        (secret,) = [volume["secret"] for volume in volumes if volume["name"] == "secret"]
        assert all(item["key"] == item["path"] for item in secret["items"])
        return [item["key"] for item in secret["items"]]

    assert keys("Deployment", "penstock-gateway") == ["fleet-secret", "watermark-secret", "remote-0-key"]
    assert keys("StatefulSet", "penstock-m") == ["fleet-secret"], "engines need neither"
    assert secret_keys(made)["watermark-secret"] == "file"
    said = "\n".join(instructions(made, None, helm=False))
    assert "--from-file=watermark-secret='my files/mark' --from-file=remote-0-key=/srv/key" in said
    assert "--from-literal=watermark-secret" not in said
    assert ClusterOptions().secret_name in said

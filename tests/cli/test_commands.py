"""The command line: quick, explains itself, and turns mistakes into one line."""

import json
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.app import app, narrowed
from penstock.config.describe import keys
from penstock.protocol.transport import public_key
from tests.cli.command import penstock

COMMANDS = ["serve", "engine", "gateway", "chat", "pull", "quantize", "doctor", "config"]


def process(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, timeout=200, cwd=cwd
    )


def test_help_is_quick() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert process("--help").returncode == 0
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime

    # Processor time, and of several runs one: others on the same core make a run longer.
    assert any(seconds() < 0.9 for _ in range(4))


def test_standard_streams_that_are_closed_are_no_place_for_anything_else() -> None:
    script = (
        "import os; from penstock.cli import open_standard_streams as opens; opens(); os.write(2, b'%d %d' % os.pipe())"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, script]
    opened = subprocess.run(shell, capture_output=True, text=True, timeout=180).stderr
    assert [int(number) > 2 for number in opened.split()] == [True, True]


@pytest.mark.slow
def test_help_never_imports_the_heavy_parts() -> None:
    script = (
        "import sys; from penstock.cli.app import app\n"
        f"for command in {[*COMMANDS, 'bench']}:\n"
        "    try: app([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'zmq', 'httpx', 'fastapi', 'tokenizers', 'yaml'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{command} imported {heavy}')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert result.output.count(f"penstock {command}") >= 2


def test_the_help_of_every_command_can_be_shown() -> None:
    def paths(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
        for name, command in getattr(group, "commands", {}).items():
            yield (*before, name)
            yield from paths(command, *before, name)

    tree = typer.main.get_command(app)  # built once, which takes longer than all the help
    found = list(paths(tree))
    assert ("bench", "engine") in found
    for path in found:
        result = click.testing.CliRunner().invoke(tree, [*path, "--help"], env={"COLUMNS": "120"})
        assert result.exit_code == 0 and "Usage:" in result.output, (path, result.exception)


def test_version() -> None:
    assert process("--version").stdout.startswith("penstock 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "0"], "flag server.port: server.port: expected a whole number from 1 to 65535"),
        (["serve", "--set", "server.prot=1"], 'did you mean "port"'),
        (["serve", "--set", "nonsense"], "write it as KEY=VALUE"),
        (["serve", "no-such-model", "--port", "18999"], "no model 'no-such-model'"),
        (["config", "--check", "missing.yaml"], "missing.yaml: no such file"),
        (["pull", "no-such-model"], "Aliases: "),
        (["engine", "--endpoint", "tcp://0.0.0.0:5555", "."], "needs CURVE keys"),
        (["engine", "--curve-key", "missing.key", "."], "must be given together"),
        (["gateway"], "--engine MODEL=ENDPOINT is needed"),
        (["gateway", "-e", "m=tcp://h:1", "--curve-key", "k"], "must be given together"),
        (["gateway", "--engine", "oops"], "write it as MODEL=ENDPOINT"),
        (["chat", "hello", "--url", "http://127.0.0.1:1"], "start one with `penstock serve`"),
        (["chat", "hello", "--url", "nonsense"], "no server at http://nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = penstock(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_ends_the_process_with_its_status(tmp_path: Path) -> None:
    result = process("config", "--check", "missing.yaml", cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("error: missing.yaml: no such file")


def test_config_documents_every_key() -> None:
    output = CliRunner().invoke(app, ["config"], env={"COLUMNS": "300"}).output
    for key in keys():
        assert key.path in output and key.doc in output and key.variable in output


def test_config_example_passes_its_own_check(tmp_path: Path) -> None:
    example = CliRunner().invoke(app, ["config", "--example"]).output
    (tmp_path / "penstock.yaml").write_text(example)
    result = penstock("config", "--check", "penstock.yaml", cwd=tmp_path)
    assert result.stdout == "penstock.yaml: ok (smollm2-135m on 127.0.0.1:8000)\n"


def test_config_check_points_at_the_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("server:\n  prot: 1\n")
    result = penstock("config", "--check", "bad.yaml", cwd=tmp_path)
    assert result.returncode == 2 and "bad.yaml:2: server.prot" in result.stderr


def test_pull_prints_the_path_of_a_model_that_is_here(default_model: Path, tmp_path: Path) -> None:
    assert penstock("pull").stdout.strip() == str(default_model)
    assert penstock("pull", str(tmp_path)).stdout.strip() == str(tmp_path)


def test_pull_lists_known_models() -> None:
    assert "smollm2-135m" in penstock("pull", "--list").stdout


def test_doctor_finds_this_machine_fit() -> None:
    result = penstock("doctor", "--json")
    findings = json.loads(result.stdout)
    names = {finding["name"] for finding in findings}
    assert names >= {
        "python",
        "torch",
        "device",
        "cpu",
        "kernels",
        "memory",
        "model cache",
        "model",
        "port",
        "file limit",
    }
    assert result.returncode == 0, findings
    for finding in findings:
        assert finding["state"] == "ok" or finding["remedy"] or finding["name"] == "port", finding


def test_doctor_fails_when_a_model_cannot_exist(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text("models: [{source: ./nowhere}]")
    result = penstock("doctor", cwd=tmp_path)
    assert result.returncode == 1
    assert "fail" in result.stdout and "nowhere" in result.stdout


def test_doctor_judges_the_configured_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "penstock.yaml").write_text("models: [{source: smollm2-135m, device: cuda}]")
    result = penstock("doctor", "--json", cwd=tmp_path)
    assert result.returncode == 1
    failed = [finding for finding in json.loads(result.stdout) if finding["state"] == "fail"]
    assert [finding["name"] for finding in failed] == ["device"] and "use device: cpu" in failed[0]["detail"]


def test_config_check_finds_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(
        """
models:
  - {source: ./weights, adapters: [{name: tuned, source: ./tuned}, {name: far, source: "s3://bucket/far"}]}
encoders: [{source: ./vectors}]
routes: [{name: auto, small: weights, large: weights, classifier: ./auto.json}]
"""
    )
    result = penstock("config", "--check", "penstock.yaml", cwd=tmp_path)
    assert result.returncode == 2
    said = " ".join(result.stderr.split())
    for part in ("models[0]: no model './weights'", "adapters[0]: there is no adapter folder './tuned'", "encoders[0]"):
        assert part in said
    assert "routes[0].classifier: there is no file ./auto.json" in said and "s3://" not in said.replace(
        "s3://BUCKET", ""
    )


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/v1"])
@pytest.mark.parametrize("command", [["models", "list"], ["bench", "serve"], ["top", "--once"], ["ingest", "."]])
def test_no_server_is_one_sentence(command: list[str], url: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    result = penstock(*command, "--url", url, cwd=tmp_path)
    said = " ".join(result.stderr.split())
    assert result.returncode == 2 and "127.0.0.1:1" in said and "penstock serve" in said and "Traceback" not in said


def test_completion_for_the_shell() -> None:
    """Of that from which it is asked for."""
    asks = ["bash", "-c", '"$0" -m penstock --show-completion; exit $?', sys.executable]
    result = subprocess.run(asks, capture_output=True, text=True, timeout=200)
    assert "_PENSTOCK_COMPLETE" in result.stdout or "complete" in result.stdout.lower()


def test_a_new_engine_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "engine.key"
    made = penstock("engine", "--make-curve-key", str(file))
    assert made.stdout.strip() == public_key(file.read_text().strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert penstock("engine", "--make-curve-key", str(file)).returncode == 2


def test_a_draft_models_source_becomes_a_path(tmp_path: Path) -> None:
    from penstock.cli.terminal import resolve_drafts, stderr
    from penstock.config import load

    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    file = tmp_path / "penstock.yaml"
    file.write_text(f"models: [{{source: a, speculation: draft, draft_model: {tmp_path / 'small'}}}, {{source: b}}]")
    first, second = resolve_drafts(load(file), stderr()).models
    assert first.draft_model == str(tmp_path / "small") and second.draft_model is None


def test_a_command_is_found_without_reading_all_others() -> None:
    for name, entry in (("serve", "command"), ("log-pipeline", "group"), ("keys", "group")):
        narrow = typer.main.get_command(narrowed(name))
        assert isinstance(narrow, typer.core.TyperGroup) and list(narrow.commands) == [name], entry
    whole = typer.main.get_command(app)
    assert isinstance(whole, typer.core.TyperGroup)
    for name in whole.commands:
        found = typer.main.get_command(narrowed(name))
        assert isinstance(found, typer.core.TyperGroup) and list(found.commands) == [name]
    assert narrowed("no-such-command") is narrowed("") is narrowed("--help") is app

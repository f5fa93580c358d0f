"""What `penstock serve` shows, and the commands it starts."""

import dataclasses
import io
import json
from pathlib import Path

from rich.console import Console

from penstock.cli.terminal_reporter import TerminalReporter
from penstock.config import Config, LoggingConfig, ModelConfig, load_resolved
from penstock.engine.request import EngineInfo
from penstock.supervisor.launch import resolved, units
from penstock.supervisor.runtime import RuntimeFolder

INFO = EngineInfo("small", "i", 2048, 1000, 16, 100, 8, "cpu", "float32", {"import": 1.0, "weights": 2.0})


def tell_everything(config: Config, *, keys: bool = False) -> str:
    out = io.StringIO()
    reporter = TerminalReporter(Console(file=out, width=200, highlight=False), config, keys=keys)
    reporter.progress("engine small", "weights", 0.0)
    reporter.progress("engine small", "weights", 0.5)
    reporter.line("gateway", "[bold]not markup[/]")
    reporter.engine_started("engine small", INFO)
    reporter.ready([INFO], 3.21)
    reporter.exited("engine small", "killed by SIGKILL", 0.5)
    reporter.draining(30)
    reporter.stopped()
    return out.getvalue()


def test_the_banner_says_everything_needed_to_use_the_server() -> None:
    shown = tell_everything(Config())
    for expected in (
        "ready after 3.2 s",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/docs",
        'penstock chat "Hello"',
        "curl http://127.0.0.1:8000/v1/chat/completions",
        '"model": "smollm2-135m"',
        "import 1.0 s, weights 2.0 s",
        "gateway │ [bold]not markup[/]",
        "died (killed by SIGKILL); restarting in 0.5 s",
    ):
        assert expected in shown
    assert shown.count("engine small: weights") == 1
    assert shown.index("http://127.0.0.1:8000/ ") < shown.index("http://127.0.0.1:8000/v1"), "the console comes first"
    assert "PENSTOCK_API_KEY" not in shown


def test_where_keys_are_needed_the_commands_carry_one() -> None:
    shown = tell_everything(Config(), keys=True)
    assert 'penstock chat "Hello" --key $PENSTOCK_API_KEY' in shown
    assert '-H "authorization: Bearer $PENSTOCK_API_KEY"' in shown


def test_with_json_logs_every_line_of_ours_is_json() -> None:
    config = Config(logging=LoggingConfig(format="json"))
    lines = [line for line in tell_everything(config).splitlines() if "not markup" not in line]
    assert len(lines) >= 4
    assert all("message" in json.loads(line) for line in lines)


def test_children_get_the_resolved_configuration_and_each_others_addresses(tmp_path: Path) -> None:
    several = ModelConfig(
        name="b", source="hf:x/b", replicas=2, replica_devices=("cuda:0", "cuda:1"), replica_grids=("4x1", "1x2")
    )
    first = ModelConfig(name="a", source="hf:x/a", disk_persistent=True)
    config = Config(models=(first, several), encoders=())
    config = resolved(config, {"a": Path("/cache/a"), "b": Path("/cache/b")})
    with RuntimeFolder(tmp_path) as folder:
        engines, (gateway,) = units(config, folder)
        assert [unit.name for unit in engines] == ["engine a", "engine b/0", "engine b/1"]
        assert [unit.save_s for unit in engines] == [first.save_s, 0.0, 0.0]
        for unit, device, tensor, pipeline in zip(engines[1:], ("cuda:0", "cuda:1"), "41", "12", strict=True):
            options = ["--device", device, "--tensor-parallel", tensor, "--pipeline-parallel", pipeline]
            assert unit.command[-6:] == options
        assert len({unit.endpoint for unit in engines}) == 3
        for unit, name in zip(engines, "abb", strict=True):
            endpoint = unit.command[unit.command.index("--endpoint") + 1]
            assert f"{name}={endpoint}" in gateway.command
        file = gateway.command[gateway.command.index("--resolved") + 1]
        assert load_resolved(file) == config
        assert dataclasses.asdict(load_resolved(file))["models"][1]["source"] == "/cache/b"

"""A plain `pip install penstock` runs gateways and the command line; what needs an extra says which."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

WITHOUT = """
import sys
from importlib.machinery import PathFinder

LEFT_OUT = set('''
torch triton transformers safetensors pynvml usearch pypdf asyncpg redis confluent_kafka clickhouse_connect
regex mcp obstore opentelemetry ray
'''.split())

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in LEFT_OUT else super().find_spec(name, path, target)

sys.meta_path[:] = [WithoutExtras if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Hides the modules of all extras from an interpreter."""

IMPORTS = """
import pkgutil
from importlib import import_module
import penstock.cli
for found in pkgutil.iter_modules(penstock.cli.__path__, "penstock.cli."):
    import_module(found.name)
for name in ("gateway.process.main", "planning.plan", "simulation.command", "bench.serve", "supervisor.supervisor"):
    import_module(f"penstock.{name}")
loaded = LEFT_OUT & {name.partition(".")[0] for name in sys.modules}
print("imported", *sorted(loaded) or ["nothing that was left out"])
"""

COMMANDS = """
import penstock.cli
for line in (["engine", "m"], ["serve", "--port", "47"], ["quantize", "m", "--to", "int8"]):
    sys.argv = ["penstock", *line]
    try:
        penstock.cli.main()
    except SystemExit as end:
        print(line[0], end.code, file=sys.stderr)
"""


def test_gateways_and_the_command_line_need_no_extra_and_other_commands_say_which(tmp_path: Path) -> None:
    root = str(Path(penstock.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "COLUMNS": "300", "PENSTOCK_STATE": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT + IMPORTS + COMMANDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "imported nothing that was left out\n", done.stderr
    said = done.stderr.splitlines()
    assert said[1::2] == ["engine 2", "serve 2", "quantize 2"], done.stderr
    assert all(line.startswith("error: ") and "pip install 'penstock[engine]'" in line for line in said[::2]), said


def test_every_data_file_is_in_the_wheel() -> None:
    package = Path(penstock.__file__).parent
    tracked = subprocess.run(["git", "ls-files", "."], cwd=package, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a clone")
    patterns = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {str(path.relative_to(package)) for pattern in patterns["penstock"] for path in package.glob(pattern)}
    left_out = [name for name in tracked.stdout.split() if not name.endswith(".py") and name not in packed]
    assert not left_out, "add them to package-data in pyproject.toml"

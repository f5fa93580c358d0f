"""The clients themselves: which versions, and an environment of its own for each, made once.

`clients.toml` pins them. An environment is a folder under `.clients/` (or `$PENSTOCK_CLIENTS`): a virtual environment
for Python packages, `node_modules` for npm. One that has the pinned packages in their versions is used as it is, so
nothing is installed twice, and a changed pin installs again. torch is pinned for all: an open range would pull the
build for CUDA, several gigabytes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Client:
    """An entry of `clients.toml`."""

    name: str
    python: tuple[str, ...] = ()
    """Pinned requirements, `package==version`; the first is the client itself."""
    npm: tuple[str, ...] = ()
    """Pinned packages, `package@version`; the first is the client itself."""
    command: str = ""
    """A program of the operating system, which nothing installs."""
    interpreter: str = ""
    """The least Python that it runs on, such as `python3.12`, where ours may be too old."""

    @property
    def folder(self) -> Path:
        home = os.environ.get("PENSTOCK_CLIENTS")
        return (Path(home).expanduser() if home else ROOT / ".clients") / self.name


@functools.cache
def clients() -> dict[str, Client]:
    listed = tomllib.loads((HERE / "clients.toml").read_text())
    return {
        name: Client(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for name, entry in listed.items()
    }


@dataclass(frozen=True, slots=True)
class Environment:
    """A client that is there and can be run."""

    client: Client
    version: str

    @property
    def python(self) -> str:
        return str(self.client.folder / "bin" / "python")

    def program(self, name: str) -> str:
        """A command that the client's package brings."""
        if self.client.command:
            return self.client.command
        inside = self.client.folder / ("node_modules/.bin" if self.client.npm else "bin")
        return str(inside / name)

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 240,
        stdin: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to its end and fails with its output when it fails. It sees no key and no proxy of this machine."""
        line = [str(part) for part in command]
        done = subprocess.run(
            line,
            env={**_clean(), **(env or {})},
            cwd=cwd,
            timeout=timeout,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(line)[:300]} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
            )
        return done

    def script(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> dict[str, object]:
        """Runs `programs/NAME` with the client's own interpreter (python, or node for `.mjs`) and returns the JSON
        object that it printed last."""
        path = HERE / "programs" / name
        if path.suffix == ".py":
            done = self.run(self.python, path, *arguments, env=env, timeout=timeout)
        else:
            # Node finds packages beside the program only.
            copy = self.client.folder / name
            shutil.copyfile(path, copy)
            done = self.run("node", copy, *arguments, env=env, timeout=timeout)
        last = done.stdout.strip().rpartition("\n")[2]
        try:
            return json.loads(last)
        except ValueError:
            raise AssertionError(
                f"{name} did not end with JSON:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ) from None


def ready(name: str, say: Say = print) -> Environment:
    """The environment of a client; made, or brought to its pins, when it is not there."""
    client = clients()[name]
    if client.command:
        return Environment(client, _command_version(client.command))
    wanted = dict(_split(pin) for pin in (*client.python, *client.npm))
    have = _installed(client)
    if any(have.get(_plain(package)) != version for package, version in wanted.items()):
        _install(client, say)
        have = _installed(client)
    first = next(iter(wanted))
    return Environment(client, have[_plain(first)])


def _install(client: Client, say: Say) -> None:
    folder, started = client.folder, time.monotonic()
    say(f"installing {', '.join((*client.python, *client.npm))} into {folder} (once)")
    if client.npm:
        folder.mkdir(parents=True, exist_ok=True)
        _call(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.npm])
    else:
        if not (folder / "bin" / "python").exists():
            _call([_interpreter(client), "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _call([*pip, "install", "-q", "--no-compile", "-c", str(CONSTRAINTS), *client.python])
    say(f"{client.name}: installed in {time.monotonic() - started:.0f} s")


def _interpreter(client: Client) -> str:
    if not client.interpreter:
        return sys.executable
    versions = sorted(Path("~/.pyenv/versions").expanduser().glob(f"*/bin/{client.interpreter}"))
    for candidate in (shutil.which(client.interpreter), *map(str, versions)):
        # pyenv puts a script of that name in the path even where that version is not in use.
        if candidate and subprocess.run([candidate, "--version"], capture_output=True).returncode == 0:
            return candidate
    pytest.skip(f"{client.name} needs {client.interpreter}, which is not installed")


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _split(pin: str) -> tuple[str, str]:
    """`name[extra]==1.2` or `@scope/name@1.2` as name and version."""
    name, mark, version = pin.rpartition("==" if "==" in pin else "@")
    if not mark or not name:
        raise AssertionError(f"{pin} in clients.toml has no version")
    return name.partition("[")[0], version


def _installed(client: Client) -> dict[str, str]:
    """The version of every package of the environment, by plain name."""
    folder = client.folder
    if client.npm:
        files = [folder / "node_modules" / _split(pin)[0] / "package.json" for pin in client.npm]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        return {_plain(package["name"]): package["version"] for package in found}
    infos = folder.glob("lib/python3*/site-packages/*.dist-info")
    pairs = (info.name.removesuffix(".dist-info").rpartition("-") for info in infos)
    return {_plain(name): version for name, _, version in pairs}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _command_version(command: str) -> str:
    said = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\d+(?:\.\d+)+", said)
    return found[0] if found else "?"


def _clean() -> dict[str, str]:
    """The environment variables without those that would point a client elsewhere."""
    gone = re.compile(
        r"(?i)(OPENAI|ANTHROPIC|OLLAMA|CLAUDE|CODEX|LITELLM|HF|HUGGING|PENSTOCK)\w*|\w*_(API_KEY|PROXY)|PYTHONPATH"
    )
    kept = {key: value for key, value in os.environ.items() if not gone.fullmatch(key)}
    return {**kept, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    for chosen in sys.argv[1:] or clients():
        print(chosen, ready(chosen).version, flush=True)

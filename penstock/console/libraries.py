"""The browser libraries of the console: Vue, Quasar, ECharts and two fonts.

They are published together inside a wheel of another project, so a machine that reaches only a package index can have
them, without node. Its files are taken out; the package is not installed, and none of its code runs. Penstock's own
wheel brings them along (`lib/`). In a clone they are fetched on first use and kept in the user's cache, as the native
kernels are: `make` does it while packages are installed.

The wheel is pinned by its hash, which pins every file. What each library is and its licence: THIRD_PARTY.md. Nothing
but the standard library is imported, because this also runs as a script, before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from penstock.errors import ConfigError, PenstockError
from penstock.interpreter import module, python

REQUIREMENT = "nicegui==3.18.0"
SHA256 = "a2bd51642312d98aab6d8b641245d796ff1b89da5829777170bcc488140c3dcd"

PACKAGED = Path(__file__).parent / "lib"
"""Where Penstock's wheel has them."""

_FILES = {
    "vue.js": "nicegui/static/vue.esm-browser.prod.js",
    "quasar.js": "nicegui/static/quasar.umd.prod.js",
    "quasar.css": "nicegui/static/quasar.unimportant.prod.css",
    "quasar.important.css": "nicegui/static/quasar.important.prod.css",
    "fonts.css": "nicegui/static/fonts.css",
    "echarts/index.js": "nicegui/elements/echart/dist/index.js",
    "echarts/index-DlVyZyb_.js": "nicegui/elements/echart/dist/index-DlVyZyb_.js",
}
"""Files that the console loads, and their paths in the wheel."""

_FONTS = "nicegui/static/"
_FAMILIES = {"Material Icons", "Roboto"}
"""The font families that the console uses, of the eight in the wheel."""


def folder() -> Path:
    """The folder with the libraries; fetches them if they are nowhere yet."""
    if PACKAGED.is_dir():
        return PACKAGED
    kept = _cache() / SHA256[:16]
    if not kept.is_dir():
        try:
            _cache().mkdir(parents=True, exist_ok=True)
            with (_cache() / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together fetch them once
                if not kept.is_dir():
                    fetch(kept)
        except OSError as error:
            raise ConfigError(f"the console's libraries cannot be kept in {_cache()}: {error}") from error
    return kept


def fetch(target: Path) -> None:
    """Download the wheel, check it, and put the libraries into `target`, which appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(Path(scratch))
        made = Path(scratch) / "lib"
        _unpack(wheel, made)
        shutil.rmtree(target, ignore_errors=True)
        made.replace(target)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock" / "console"


def _download(scratch: Path) -> Path:
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    command += ["--quiet", "--retries=2", f"--dest={scratch}", REQUIREMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise ConfigError(
            f"the console's libraries could not be fetched: pip download {REQUIREMENT}: "
            f"{said[-1].removeprefix('ERROR: ')}. Check that this machine reaches its package index "
            "(`pip config list`), or set server.console: false"
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"the package index served another {REQUIREMENT} (sha256 {found}, expected {SHA256}); nothing of it was "
            "kept. Use an index that mirrors PyPI unchanged, or set server.console: false"
        )
    return wheels[0]


def _pip() -> list[str]:
    """How to run pip: this Python's own, or any on the path (the wheel suits every version)."""
    if subprocess.run(python("-c", "import pip"), capture_output=True, check=False).returncode == 0:
        return module("pip")
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ConfigError(
            "the console's libraries are fetched with pip, which is not installed: "
            f"run `{sys.executable} -m ensurepip`, or set server.console: false"
        )
    return [found]


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(path) for name, path in _FILES.items()}
        styles = _used_styles(content["fonts.css"].decode())
        content["fonts.css"] = styles.encode()
        for name in sorted(set(re.findall(r"url\((fonts/[^)]+)\)", styles))):
            content[name] = archive.read(_FONTS + name)
    for name, body in content.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def _used_styles(css: str) -> str:
    """The rules of the font families that the console uses."""
    rules = re.findall(r"[^{}]*\{[^{}]*\}", css)
    return "".join(
        rule for rule in rules if (named := re.search(r'font-family: "([^"]+)"', rule)) and named[1] in _FAMILIES
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the console's browser libraries into the user's cache.")
    parser.add_argument("--output", type=Path, help="put them into this folder instead, to be shipped")
    output = parser.parse_args().output
    try:
        if output is None:
            output = folder()
        else:
            fetch(output)
    except PenstockError as error:
        sys.exit(str(error))
    print(f"console libraries: {output}")


if __name__ == "__main__":
    main()

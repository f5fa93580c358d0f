"""What every test may use: the real default model, fetched once into the user's model cache, and real servers."""

from __future__ import annotations

import os

# Read when torch is loaded: oneDNN would otherwise wake a thread for each product of these tiny models, which takes
# longer than the product. Engines set the number of their own threads; where those outnumber the free cores, as beside
# other tests, the ones that wait for each other must not take the core from the ones that work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import functools
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _pytest.logging
import httpx._config
import httpx._transports.default
import httpx2._config
import httpx2._transports.default
import hypothesis
import pytest
import typer.main
import typer.testing
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadFileScheduling

from penstock.sources.resolve import resolve
from tests.collection import (
    pytest_collection,
    pytest_configure_node,
    pytest_xdist_setupnodes,
)
from tests.encoders import encoder_endpoint, encoder_model
from tests.services import postgres_url, valkey

__all__ = [
    "encoder_endpoint",
    "encoder_model",
    "postgres_url",
    "pytest_collection",
    "pytest_configure_node",
    "pytest_xdist_setupnodes",
    "valkey",
]

# Properties are tried with the same examples in every run, and however long one takes. `--hypothesis-profile=default`
# looks for new ones. Constants of our modules would be among them: which are imported depends on the tests before.
hypothesis.settings.load_profile("ci")
providers.is_local_module_file = lambda path: False

LONG = (
    "tests/e2e/",
    "tests/fuzz/",
    "tests/deploy/test_alerts.py",
    "tests/engine/test_greedy_equals_reference.py",
    "tests/engine/test_default_model.py",
    "tests/supervisor/",
    "tests/gateway/workers/",
    "tests/engine/parallel/",
    "tests/engine/test_sliding_window.py",
    "tests/console/",
    "tests/compat/",
)
"""The longest first: a process takes whole files, and one that begins a long file last keeps the others waiting."""

ONE_SERVER = frozenset(
    f"tests/e2e/test_{name}.py"
    for name in (
        "adapters",
        "api_families",
        "bad_input",
        "batches",
        "conversations",
        "defaults",
        "knowledge",
        "loading",
        "openai_sdk",
        "streams",
        "structured_output",
    )
)
"""Files that use the server of tests/e2e/conftest.py: one process takes them all, so that it starts once."""

EVERY_FAMILY = frozenset(
    f"tests/engine/{name}.py"
    for name in ("test_greedy_equals_reference", "models/test_family_descriptors", "loading/test_gguf_families")
)
"""Files that need the reference of every model family: one process takes them all, so that each is imported once."""


class FileScheduling(LoadFileScheduling):
    """A process takes whole files, and all of those that share a server or what takes long to import."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith("tests/compat/"):
            return "compat server"
        if file in EVERY_FAMILY:
            return "every family"
        return "one server" if file in ONE_SERVER else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


# Every HTTP client reads all trusted certificates, which takes longer than most tests; once per process is enough.
for transport in (httpx._transports.default, httpx2._transports.default):
    transport.create_ssl_context = functools.cache(transport.create_ssl_context)

# Five seconds, unless said otherwise, are too few for a server on a busy machine.
for default in (httpx._config.DEFAULT_TIMEOUT_CONFIG, httpx2._config.DEFAULT_TIMEOUT_CONFIG):
    default.connect = default.read = default.write = default.pool = 120.0

# All commands are built anew for each one that is run.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)


class RootCatchesLogs(_pytest.logging.catching_logs[Any]):
    """As all loggers propagate (`pytest_collection_modifyitems`), the root has every record: to look at hundreds of
    loggers six times a test takes longer than many tests."""

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        logging.root.addHandler(self.handler)
        self.attached_loggers.append(logging.root)
        return self.handler


_pytest.logging.catching_logs = RootCatchesLogs  # type: ignore[misc]

# Thousands of modules are imported now, and nothing of them becomes garbage.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Input nested too deeply is refused where the stack ends. What an earlier test left behind may be found just
    there, and its finalizer fails for want of stack: no fault of either test, and pytest fails when it tells of it."""
    tell = sys.unraisablehook
    sys.unraisablehook = lambda args: None if args.exc_type is RecursionError else tell(args)


SLOW_TIMEOUT_S = 1800
"""What takes minutes on a quiet machine takes far longer beside other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # tests leave little behind: it need not be looked for as often as by default
    gc.enable()
    # torch has dozens of loggers that do not propagate.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True

    def place(item: pytest.Item) -> int:
        return next((at for at, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG))

    items.sort(key=place)


def pytest_runtest_setup() -> None:
    """Budgets and usage are by the day, which ends at midnight (UTC): no test sees two of them."""
    left = 86_400 - time.time() % 86_400
    if left < 30:
        time.sleep(left + 1)


@pytest.fixture(scope="session", autouse=True)
def state() -> Iterator[None]:
    """Keys and accounts of the tests, never the user's own."""
    with tempfile.TemporaryDirectory(prefix="penstock-state-") as folder:
        os.environ["PENSTOCK_STATE"] = folder
        yield
        del os.environ["PENSTOCK_STATE"]


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A command run inside a test sets up logging for its process: undone, so that the next one finds a fresh one."""
    kept = [(logger, logger.level, list(logger.handlers)) for logger in map(logging.getLogger, ("", "penstock"))]
    yield
    for logger, level, handlers in kept:
        if logger.level != level:  # for each, all loggers forget what they log
            logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of `smollm2-135m` (98 MB, downloaded on first use)."""
    return resolve("smollm2-135m")

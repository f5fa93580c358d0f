"""Importing PyTorch without its Python kernels for tensors that have no storage (device `meta`): a quarter of the time.

They serve compilers and `torch.export`; an engine runs nothing on that device. Invariant: behind the import nothing is
left of the placeholder, so whoever imports those kernels later gets them. `with_meta_kernels` is for code that uses the
device without importing them.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType

_META = "torch._meta_registrations"


def import_torch() -> None:
    """Import PyTorch, unless it is there already."""
    if "torch" in sys.modules:
        return
    sys.modules[_META] = placeholder = ModuleType(_META)
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_META) is placeholder:
            del sys.modules[_META]
    if vars(torch).get("_meta_registrations") is placeholder:
        del vars(torch)["_meta_registrations"]
    _allow_generators(torch)


def _allow_generators(torch: ModuleType) -> None:
    """A module that came with those kernels gives `torch.Generator` its metaclass, without which newer versions of
    PyTorch make none. It may do so again later."""
    give = getattr(torch._C, "_set_generator_metaclass", None)
    if give is not None:
        with suppress(ImportError, AttributeError):
            give(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


def with_meta_kernels() -> None:
    """Import what `import_torch` left out."""
    importlib.import_module(_META)

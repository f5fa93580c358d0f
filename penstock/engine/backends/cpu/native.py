"""The C side of the CPU kernels, as Python sees it: argument structs, prototypes, handles.

Nothing here knows tensors beyond `data_ptr()`; shapes and dtypes are checked by the callers in `ops` and the linears.
The structs come from csrc/common/arguments.def, from which the C++ structs are made too. A `Handle` owns a thread pool;
libraries are loaded once per instruction set and stay loaded.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

from penstock.engine.backends.cpu.build import SOURCES, BuildError, build
from penstock.engine.backends.host_memory import Slabs

_SPIN_US: Final = 50
"""How long an idle worker spins before it sleeps: longer than the gap between two kernels of one step."""

_TYPES: Final[dict[str, Any]] = {"int64_t": c_int64, "int32_t": c_int32, "float": c_float}
_DECLARATION: Final = re.compile(r"^PK_(STRUCT|FIELD|ARRAY)\(([^)]*)\)", re.MULTILINE)


def _described_structs() -> dict[str, list[tuple[str, Any]]]:
    """Names and types of the fields of every struct in arguments.def."""
    structs: dict[str, list[tuple[str, Any]]] = {}
    fields: list[tuple[str, Any]] = []
    for kind, inside in _DECLARATION.findall((SOURCES / "common" / "arguments.def").read_text()):
        words = [word.strip() for word in inside.split(",")]
        if kind == "STRUCT":
            fields = structs.setdefault(words[0], [])
            continue
        ctype = c_void_p if words[0].endswith("*") else _TYPES[words[0]]
        fields.append((words[1], ctype * int(words[2]) if kind == "ARRAY" else ctype))
    return structs


_STRUCTS: Final = _described_structs()


class RopeArgs(ctypes.Structure):
    _fields_ = _STRUCTS["RopeArgs"]


class AttentionArgs(ctypes.Structure):
    _fields_ = _STRUCTS["AttentionArgs"]


class LatentArgs(ctypes.Structure):
    _fields_ = _STRUCTS["LatentArgs"]


class LinearArgs(ctypes.Structure):
    _fields_ = _STRUCTS["LinearArgs"]


class DenseArgs(ctypes.Structure):
    _fields_ = _STRUCTS["DenseArgs"]


class Float8Args(ctypes.Structure):
    _fields_ = _STRUCTS["Float8Args"]


class Mxfp4Args(ctypes.Structure):
    _fields_ = _STRUCTS["Mxfp4Args"]


class LoraStep(ctypes.Structure):
    _fields_ = _STRUCTS["LoraStep"]


class LoraArgs(ctypes.Structure):
    _fields_ = _STRUCTS["LoraArgs"]


class RecordedCall(ctypes.Structure):
    _fields_ = _STRUCTS["RecordedCall"]


class CountPatch(ctypes.Structure):
    _fields_ = _STRUCTS["CountPatch"]


class DecodeArgs(ctypes.Structure):
    _fields_ = _STRUCTS["DecodeArgs"]


STRUCTS: Final = (
    RopeArgs, AttentionArgs, LatentArgs, LinearArgs, DenseArgs, Float8Args, Mxfp4Args, LoraStep, LoraArgs,
    RecordedCall, CountPatch, DecodeArgs,
)  # fmt: skip

PROTOTYPES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "pk_isa": (c_char_p, ()),
    "pk_create": (c_void_p, (c_int, c_int)),
    "pk_destroy": (None, (c_void_p,)),
    "pk_widen": (None, (c_void_p, *[c_void_p] * 2, c_int64, c_int64, c_int)),
    "pk_store_rows": (c_int, (c_void_p, *[c_void_p] * 3, *[c_int64] * 4, c_int, c_int)),
    "pk_rms_norm": (None, (c_void_p, *[c_void_p] * 3, c_int64, c_int64, c_float, c_int, c_int, c_int)),
    "pk_add_rms_norm": (None, (c_void_p, *[c_void_p] * 5, c_int64, c_int64, c_float, c_int, c_int, c_int)),
    "pk_centre": (None, (c_void_p, *[c_void_p] * 3, c_int64, c_int64, c_int, c_int)),
    "pk_norm_rows": (None, (c_void_p, *[c_void_p] * 4, *[c_int64] * 4, c_float, c_int, c_int)),
    "pk_silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_gelu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_clamped_swiglu": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_int)),
    "pk_bounded_silu": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int)),
    "pk_pointwise": (None, (c_void_p, c_void_p, c_int64, c_int64, c_int, *[c_float] * 4, c_int)),
    "pk_add_row": (None, (c_void_p, *[c_void_p] * 2, c_int64, c_int64, c_int, c_int)),
    "pk_rope_and_cache": (c_int, (c_void_p, POINTER(RopeArgs))),
    "pk_attention_has_bytes": (c_int, ()),
    "pk_attention": (None, (c_void_p, POINTER(AttentionArgs))),
    "pk_latent_attention": (c_int, (c_void_p, POINTER(LatentArgs))),
    "pk_linear": (None, (c_void_p, POINTER(LinearArgs))),
    "pk_linear_sample": (None, (c_void_p, POINTER(LinearArgs), *[c_void_p] * 3)),
    "pk_dense": (None, (c_void_p, POINTER(DenseArgs))),
    "pk_float8": (None, (c_void_p, POINTER(Float8Args))),
    "pk_float8_widen": (None, (c_void_p, *[c_void_p] * 3, *[c_int64] * 3, c_int)),
    "pk_mxfp4": (None, (c_void_p, POINTER(Mxfp4Args))),
    "pk_mxfp4_widen": (None, (c_void_p, *[c_void_p] * 3, *[c_int64] * 2, c_int)),
    "pk_linear_has_matrix": (c_int, ()),
    "pk_linear_bytes": (c_int64, (c_int64, c_int64, c_int)),
    "pk_linear_per_channel_bytes": (c_int64, (c_int64, c_int64)),
    "pk_linear_pack_per_channel": (None, (c_void_p, *[c_void_p] * 3, c_int64, c_int64, c_int)),
    "pk_linear_fits_float16": (c_int, (c_void_p, c_int64, c_int64, c_int)),
    "pk_linear_pack_floats": (c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_linear_pack_gguf": (c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_embed": (c_int, (c_void_p, *[c_void_p] * 3, *[c_int64] * 3)),
    "pk_run": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int)),
    "pk_keep": (None, (c_void_p, *[c_void_p] * 3, c_int64)),
    "pk_load_decodes": (c_int, (POINTER(DecodeArgs), c_void_p, c_int64)),
    "pk_lora": (c_int, (c_void_p, POINTER(LoraArgs))),
    "pk_mask_logits": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_delta_step": (None, (*[c_void_p] * 10, *[c_int64] * 5)),
    "pk_short_conv": (None, (*[c_void_p] * 10, *[c_int64] * 3, c_int)),
    "pk_argmax": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_logsumexp": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_gumbel_argmax": (None, (c_void_p, *[c_void_p] * 4, c_int64, c_int64)),
}


class Library:
    """The functions of one instruction set of a compiled library, under the names in `PROTOTYPES`.

    Those that can be part of a recorded step exist a second time as `<name>_recorded`.
    """

    def __init__(self, path: Path, isa: str | None = None) -> None:
        """`isa`: a set that the library contains; None takes the best one that this CPU runs."""
        self.path = path
        try:
            loaded = ctypes.CDLL(str(path))
            loaded.pk_layouts.restype = loaded.pk_runnable_sets.restype = c_char_p
            _check_layouts(path, loaded.pk_layouts().decode())
            self.runnable: list[str] = loaded.pk_runnable_sets().decode().split()
            """The instruction sets that this CPU runs, best first, whether or not the library contains them."""
            best = next((name for name in self.runnable if hasattr(loaded, f"pk_create_{name}")), "generic")
            self.left_out = self.runnable[: self.runnable.index(best)] if isa is None else []
            """Better sets that this CPU runs, but that the compiler does not know."""
            self.set = isa = isa or best
            for name, (result, arguments) in PROTOTYPES.items():
                function = getattr(loaded, f"{name}_{isa}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
                if hasattr(loaded, f"{name}_recorded_{isa}"):
                    setattr(self, f"{name}_recorded", getattr(loaded, f"{name}_recorded_{isa}"))
        except (OSError, AttributeError) as error:
            raise BuildError(f"the compiled library {path} cannot be loaded ({error}); delete it to rebuild") from error

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # for type checkers: `__init__` sets the functions

    def check_cpu(self) -> None:
        """Raises `BuildError` when this CPU does not have the instructions."""
        if self.set not in self.runnable:
            raise BuildError(f"this CPU does not run {self.set}; it runs {', '.join(self.runnable)}")


def _check_layouts(path: Path, compiled: str) -> None:
    """Refuse a library whose structs are not those of this module."""
    for struct, theirs in zip(STRUCTS, compiled.splitlines(), strict=True):
        fields = " ".join(f"{name}:{getattr(struct, name).offset}" for name, *_ in struct._fields_)
        ours = f"{struct.__name__} {ctypes.sizeof(struct)} {fields}"
        if ours != theirs:
            raise BuildError(f"the compiled library {path} has another layout of structs: {theirs}, expected {ours}")


_native = "native"


def limit_to(isa: str) -> None:
    """From now on the kernels of this instruction set take the place of the best that the CPU runs, as on a CPU without
    the others. For benchmarks; before anything is loaded."""
    global _native
    _native = isa
    library.cache_clear()


@cache
def library(isa: str = "native") -> Library:
    """The loaded library for an instruction set; raises `BuildError` when it cannot be had."""
    isa = _native if isa == "native" else isa
    loaded = Library(build(isa), None if isa == "native" else isa)
    loaded.check_cpu()
    return loaded


class Handle:
    """A thread pool and its scratch memory. Calls on one handle run one at a time."""

    def __init__(self, threads: int, isa: str = "native") -> None:
        self.lib: Any = library(isa)
        self.isa = str(self.lib.pk_isa().decode())
        self.has_matrix = bool(self.lib.pk_linear_has_matrix())
        """Whether linears can run on matrix tiles (AMX)."""
        self.has_per_channel = self.lib.pk_linear_per_channel_bytes(16, 64) > 0
        """Whether linears have a form on a per-channel int8 copy of their weights: on matrix tiles or on vectors."""
        self.has_byte_attention = bool(self.lib.pk_attention_has_bytes())
        """Whether attention multiplies an int8 cache without widening it."""
        self.library_name = f"{self.lib.path.stem}-{self.lib.set}"
        """Stands for the sources and the instruction set."""
        self.threads = threads
        self.memory = Slabs()
        """Where weights lie."""
        pointer = self.lib.pk_create(max(1, threads), _SPIN_US)
        if not pointer:
            raise BuildError(f"could not start {threads} CPU worker threads")
        self.pointer: int = pointer
        self._finalizer = weakref.finalize(self, self.lib.pk_destroy, pointer)

    @contextmanager
    def replaced_by(self, recorder: object) -> Iterator[None]:
        """Calls go to `recorder` instead of the library meanwhile."""
        lib, self.lib = self.lib, recorder
        try:
            yield
        finally:
            self.lib = lib

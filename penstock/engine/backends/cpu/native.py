"""The C side of the CPU kernels, as Python sees it: argument structs, prototypes, handles.

Nothing here knows tensors beyond `data_ptr()`; shapes and dtypes are checked by the callers in `ops` and
`linear`. A `Handle` owns a thread pool; libraries are loaded once per instruction set and stay loaded.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from penstock.engine.backends.cpu.build import BuildError, build
from penstock.engine.backends.host_memory import Slabs

_ABI = 1
_SPIN_US = 50
"""How long an idle worker spins before it sleeps: longer than the gap between two kernels of one step."""


class RopeArgs(ctypes.Structure):
    """Mirror of `RopeArgs` in elementwise.cpp."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("qkv", "cos_sin", "positions", "slots", "k_cache", "v_cache", "k_scales", "v_scales")
        ),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "centre", "stretch")),
        *((name, c_int64) for name in ("tokens", "max_positions", "num_slots")),
        *((name, c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "block_size", "rotary")),
        *((name, c_int32) for name in ("dtype", "cache_dtype", "norm_dtype")),
        ("eps", c_float),
    )


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in attention.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "k_cache", "v_cache", "k_scales", "v_scales")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "rows", "block_tables")),
        *((name, c_int64) for name in ("q_stride", "table_stride")),
        *((name, c_int64) for name in ("k_block_stride", "k_head_stride", "v_block_stride", "v_head_stride")),
        *((name, c_int32) for name in ("sequences", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("block_size", "window", "dtype", "cache_dtype", "fixed")),
        ("scale", c_float),
        ("softcap", c_float),
    )


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in linear.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weights", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth")),
        *((name, c_int32) for name in ("bits", "dtype", "out_dtype", "digits")),
        *((name, c_void_p) for name in ("column_form", "column_shrink")),
        *((name, c_int64) for name in ("column_rows", "block_rows", "matrix_rows", "half_rows")),
        ("gate", c_int32),
    )


class DenseArgs(ctypes.Structure):
    """Mirror of `DenseArgs` in dense.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weights", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth")),
        *((name, c_int32) for name in ("dtype", "out_dtype")),
    )


class DecodeArgs(ctypes.Structure):
    """Mirror of `DecodeArgs` in tape.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "at", "keys")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "rows", "sample_rows", "temperatures")),
        *((name, c_void_p) for name in ("tables", "last_tokens", "seeds", "row_temperatures", "flags")),
        *((name, c_int64) for name in ("width", "block_size", "temperature_stride")),
    )


class Float8Args(ctypes.Structure):
    """Mirror of `Float8Args` in float8.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weights", "scales", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "groups")),
        *((name, c_int32) for name in ("dtype", "out_dtype")),
    )


class LoraStep(ctypes.Structure):
    """Mirror of `LoraStep` in lora.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("order", "tile_slots", "tile_starts", "tile_counts")),
        *((name, c_int32) for name in ("entries", "tiles", "most_rank")),
    )


class LoraArgs(ctypes.Structure):
    """Mirror of `LoraArgs` in lora.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "step", "slots", "ranks", "sizes")),
        *((name, c_int64) for name in ("tokens", "inputs", "outputs", "start")),
        *((name, c_int32) for name in ("parts", "site", "sites", "dtype", "matrix_dtype")),
    )


PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pk_abi": (c_int, ()),
    "pk_isa": (c_char_p, ()),
    "pk_create": (c_void_p, (c_int, c_int)),
    "pk_destroy": (None, (c_void_p,)),
    "pk_widen": (None, (c_void_p, *[c_void_p] * 2, c_int64, c_int64, c_int)),
    "pk_rms_norm": (None, (c_void_p, *[c_void_p] * 3, c_int64, c_int64, c_float, c_int, c_int, c_int)),
    "pk_add_rms_norm": (None, (c_void_p, *[c_void_p] * 5, c_int64, c_int64, c_float, c_int, c_int, c_int)),
    "pk_silu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_gelu_mul": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_rope_and_cache": (c_int, (c_void_p, POINTER(RopeArgs))),
    "pk_attention_has_bytes": (c_int, ()),
    "pk_attention": (None, (c_void_p, POINTER(AttentionArgs))),
    "pk_linear": (None, (c_void_p, POINTER(LinearArgs))),
    "pk_linear_draw": (None, (c_void_p, POINTER(LinearArgs), *[c_void_p] * 3)),
    "pk_dense": (None, (c_void_p, POINTER(DenseArgs))),
    "pk_float8": (None, (c_void_p, POINTER(Float8Args))),
    "pk_float8_widen": (None, (c_void_p, *[c_void_p] * 3, *[c_int64] * 3, c_int)),
    "pk_linear_has_matrix": (c_int, ()),
    "pk_linear_bytes": (c_int64, (c_int64, c_int64, c_int)),
    "pk_linear_column_bytes": (c_int64, (c_int64, c_int64)),
    "pk_linear_columns": (None, (c_void_p, *[c_void_p] * 3, c_int64, c_int64, c_int)),
    "pk_linear_has_half": (c_int, (c_void_p, c_int64, c_int64, c_int)),
    "pk_linear_pack_floats": (c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_linear_pack_gguf": (c_int, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "pk_embed": (c_int, (c_void_p, *[c_void_p] * 3, *[c_int64] * 3)),
    "pk_run": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int)),
    "pk_keep": (None, (c_void_p, *[c_void_p] * 3, c_int64)),
    "pk_load_decodes": (c_int, (POINTER(DecodeArgs), c_void_p, c_int64)),
    "pk_lora": (c_int, (c_void_p, POINTER(LoraArgs))),
    "pk_mask_logits": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_argmax": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_logsumexp": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64)),
    "pk_gumbel_argmax": (None, (c_void_p, *[c_void_p] * 4, c_int64, c_int64)),
}


@cache
def library(isa: str = "native") -> ctypes.CDLL:
    """The loaded library for an instruction set; raises `BuildError` when it cannot be had."""
    path = build(isa)
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled library {path} cannot be loaded ({error}); delete it to rebuild") from error
    if loaded.pk_abi() != _ABI:
        raise BuildError(f"the compiled library {path} is of another version; delete it to rebuild")
    return loaded


class Handle:
    """A thread pool and its scratch memory. Calls on one handle run one at a time."""

    def __init__(self, threads: int, isa: str = "native") -> None:
        self.lib: Any = library(isa)
        self.isa = str(self.lib.pk_isa().decode())
        self.has_matrix = bool(self.lib.pk_linear_has_matrix())
        """Whether linears can run on matrix tiles (AMX)."""
        self.has_byte_attention = bool(self.lib.pk_attention_has_bytes())
        """Whether attention over an int8 cache can, without widening it."""
        self.library_name = Path(self.lib._name).stem
        """Of the compiled file: stands for the instruction set, the processor and the sources."""
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

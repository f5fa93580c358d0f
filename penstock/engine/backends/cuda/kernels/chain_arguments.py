"""The structures that `csrc/chain_links.cuh` has for what a chain is given."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

PLAIN, ALIKE, OF_EACH, OF_SUM = range(4)
"""Of a part; see `Kind` there."""


class LinkArguments(ctypes.Structure):
    _fields_ = (
        ("scale", c_void_p),
        ("shared_scale", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("out", c_void_p),
        ("eps", c_float),
        ("unused", c_int32),
    )


class Part(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("shared", c_void_p),
        ("expert_bytes", c_int64),
        ("outputs", c_int32),
        ("row_bytes", c_int32),
        ("columns", c_int32),
        ("slices", c_int32),
        ("kind", c_int32),
        ("span", c_int32),
        ("reciprocal", c_int32),
        ("visited", c_int32),
        ("shared_bytes", c_int32),
        ("unused", c_int32),
    )


@cache
def arguments_of(links: int, parts: int) -> type[ctypes.Structure]:
    class Arguments(ctypes.Structure):
        _fields_ = (
            ("x", c_void_p),
            ("residual", c_void_p),
            ("counter", c_void_p),
            ("correction", c_void_p),
            ("links", LinkArguments * links),
            ("parts", Part * parts),
        )

    return Arguments

"""Kernels are built while weights are read.

The first layer of a model stands for most or all others, and the kernels depend on shapes and types alone. So they are
built, or found in the cache of an earlier start, on a thread of its own as soon as that layer is there; reading the
other layers leaves the processor idle. What it could not know is built when all layers are there.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Collection

import torch

from penstock.engine.adapters.runtime import AdaptedModel
from penstock.engine.backends.backend import Backend
from penstock.engine.backends.interface import StepLimits
from penstock.engine.models.decoder import Decoder

_SWITCH_S = 0.001
"""How long a thread may keep the interpreter to itself meanwhile: those that read need it for every few megabytes."""

_log = logging.getLogger(__name__)


class KernelBuild:
    """The kernels of one model, for steps within `limits`. A context that is left before they are finished gives them
    up: the model could not be loaded."""

    def __init__(self, backend: Backend, kv_dtype: torch.dtype, limits: StepLimits) -> None:
        self._backend = backend
        self._kv_dtype = kv_dtype
        self._limits = limits
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()
        self._done: Collection[object] = ()
        self._wanted = True

    def __enter__(self) -> KernelBuild:
        return self

    def __exit__(self, *problem: object) -> None:
        self._wanted = False
        self._join()

    def begin(self, decoder: Decoder) -> None:
        """Build those of a decoder that has only some of its layers yet; returns at once."""
        thread = threading.Thread(target=self._build, args=(decoder,), name="kernels")
        thread.start()
        self._thread, self._switch_s = thread, sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)

    def finish(self, decoder: Decoder, adapters: AdaptedModel | None) -> None:
        """Wait for those, and build what the whole decoder needs besides."""
        self._join()
        self._backend.compile(decoder, self._kv_dtype, self._limits, adapters, self._done)

    def _join(self) -> None:
        if self._thread is None:
            return
        try:
            self._thread.join()
        finally:
            self._thread = None
            sys.setswitchinterval(self._switch_s)

    def _build(self, decoder: Decoder) -> None:
        try:
            self._done = self._backend.compile(decoder, self._kv_dtype, self._limits, None, wanted=lambda: self._wanted)
        except Exception:
            _log.warning("kernels could not be built ahead; they are built with the whole model", exc_info=True)

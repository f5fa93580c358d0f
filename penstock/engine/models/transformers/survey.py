"""What a model's attention looks like, found by running a few tokens through it.

Every attention call is noted with its heads, scale, window and cap; nothing is attended to. Masks are asked where they
let a query look: causal, or a sliding window. A call that wants anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import HeadLayout
from penstock.engine.models.transformers.attention import Site, cached_dim
from penstock.errors import CheckpointError

TOKENS = 5
"""Of the pass that is surveyed."""
_FAR = 1 << 18
"""A query at this position shows any window that matters."""
_HONOURED = frozenset({"s_aux", "scaling", "sliding_window", "softcap"})
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Options of a call that change nothing here: there is no dropout, and positions are in queries and keys already."""


class Survey:
    """See `Calls`."""

    def __init__(self, names: dict[Any, str], model_type: str) -> None:
        """`names`: of the model's modules."""
        self.sites: list[Site] = []
        self._names = names
        self._model_type = model_type
        self._windows: list[int | None] = []

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **options: Any
    ) -> Tensor:
        """Stands for a mask of the library's: all its entries say which of the windows seen so far is meant."""
        window = self._window_of(mask_function)
        if window not in self._windows:
            self._windows.append(window)
        shape = (batch_size, 1, q_length, kv_length)
        return torch.full(shape, self._windows.index(window), device=options.get("device", "cpu"), dtype=torch.float32)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        name = self._names.get(module, type(module).__name__)
        _, heads, tokens, key_dim = query.shape
        kv_heads, value_dim = key.shape[1], value.shape[-1]
        if not tokens == key.shape[2] == value.shape[2] == TOKENS or key.shape[-1] != key_dim:
            raise self._refusal(f"{name} attends to something other than the tokens of its sequence")
        if heads % kv_heads or value.shape[1] != kv_heads:
            raise self._refusal(f"{name} has {heads} query, {kv_heads} key and {value.shape[1]} value heads")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise self._refusal(f"{name} is not causal")
        for option, wanted in options.items():
            if option not in _HONOURED | _HARMLESS and wanted is not None and wanted is not True:
                raise self._refusal(f"the attention of {name} has an option {option!r} that is not supported")
        sinks = options.get("s_aux")
        if sinks is not None and tuple(sinks.shape) != (heads,):
            raise self._refusal(f"{name} has attention sinks of the shape {tuple(sinks.shape)}")
        scale = options.get("scaling")
        dim = cached_dim(key_dim, value_dim)
        layout = HeadLayout(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            scale=float(key_dim**-0.5 if scale is None else scale),
            window=self._window(name, mask, options.get("sliding_window")),
            softcap=options.get("softcap"),
        )
        self.sites.append(Site(name, layout, key_dim, value_dim))
        return value.new_zeros(1, tokens, heads, value_dim)

    def _window(self, name: str, mask: Tensor | None, option: int | None) -> int | None:
        """Of one call: what its mask says; without a mask, what its option says."""
        if mask is None:
            return option
        entry = float(mask.flatten()[0])
        if not bool((mask == entry).all()) or entry not in range(len(self._windows)):
            raise self._refusal(f"{name} changes its attention mask")
        window = self._windows[int(entry)]
        if option is not None and window != option and not (window is None and option > _FAR):
            raise self._refusal(f"{name} has a sliding window of {option} tokens, but its mask {window or 'none'}")
        return window

    def _window_of(self, visible: Callable[..., Tensor]) -> int | None:
        """The window of a mask function; None where it is plainly causal."""
        zero = torch.tensor(0)
        far = visible(zero, zero, torch.tensor(_FAR), torch.arange(_FAR + 1))
        seen = int(far.expand(_FAR + 1).sum())
        window = None if seen == _FAR + 1 else seen
        for query in (0, 1, 7, seen - 1, seen, seen + 9, _FAR // 2 + 3, _FAR):
            keys = torch.arange(min(query, _FAR) + 40)
            expected = keys <= query
            if window is not None:
                expected &= keys > query - window
            if not torch.equal(visible(zero, zero, torch.tensor(query), keys).expand(len(keys)), expected):
                raise self._refusal("its attention mask is neither causal nor a sliding window")
        return window

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"a {self._model_type} model cannot be run through transformers: {reason}")

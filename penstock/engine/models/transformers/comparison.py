"""What the library computes of a few tokens by itself, to compare the engine's way with.

A model whose tokens do not come out alike is refused: one that ignores positions, or in which tokens reach each other
by another way than attention. Of the whole model the logits are compared, of a pipeline stage its residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, StateBatch
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.kinds import CacheKind
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.transformers.body import Body, CannotDivide, StageBody
from penstock.engine.models.transformers.hidden import HiddenStates
from penstock.errors import CheckpointError

_COMPARED = 24
"""Tokens, in two chunks."""
_BLOCK = 16
_ASIDE = 3
"""Tokens of another sequence between the chunks."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Of logits, relative to their size: other orders of summation, not another computation."""
_ROUNDED = 0.15
"""The same where linears round what they are applied to."""


def refusal(config: ModelConfig, reason: str) -> CheckpointError:
    return CheckpointError(f"a {config.family} model cannot be run through transformers: {reason}")


class Comparison:
    """See above."""

    @torch.inference_mode()
    def __init__(self, model: Any, body: Body, config: ModelConfig, device: torch.device) -> None:
        """`device`: where the model is now."""
        self._config = config
        count = min(_COMPARED, config.max_positions)
        entry = body.sample(count, device)
        try:
            expected = body.reference(model, count, device)
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, CannotDivide):
            raise
        except Exception as error:
            raise refusal(config, f"the library itself does not run it ({type(error).__name__}: {error})") from error
        self._compared = body.compared if isinstance(body, StageBody) else _all
        self._entry, self._expected = entry, self._compared(expected.float())
        if isinstance(body, StageBody) and body.junction.first and not body.reads_tokens:
            self._check_embedding(body)

    def _check_embedding(self, body: StageBody) -> None:
        """CannotDivide where a pass over embedded tokens, as ranks begin with, is not one over the tokens."""
        try:
            found = self._compared(body(self._entry, use_cache=False).float())
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, CannotDivide):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CannotDivide(f"its layers do not run on embedded tokens ({what})") from error
        if not float((found - self._expected).norm()) <= _ROUNDED * float(self._expected.norm()):
            raise CannotDivide("its layers read the tokens too, beside their embedding")

    @torch.inference_mode()
    def check(
        self,
        hidden: HiddenStates,
        head: Callable[[Tensor], Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounded: bool,
    ) -> None:
        """CheckpointError where the same tokens, in two chunks, give something else. `head`: of the whole model."""
        tokens, entry, expected = len(self._entry), self._entry.to(device), self._expected.to(device)
        kinds: tuple[CacheKind, ...] = tuple(site.cache_kind(_BLOCK, dtype) for site in hidden.sites)
        if hidden.states is not None:
            kinds = (*kinds, hidden.states)
        kv = KVCache(CacheShape(kinds, _BLOCK), -(-tokens // _BLOCK) + 1, device)
        whole = AttentionBatch.of_one(tokens, _BLOCK, device)
        parts = []
        for begin, end in ((0, tokens // 2), (tokens // 2, tokens)):
            if end > begin:
                if begin and hidden.states is not None:
                    hidden(entry[:_ASIDE], _aside(whole), kv)
                states = hidden(entry[begin:end], _chunk(whole, begin, end), kv)
                parts.append((self._compared(states) if head is None else head(states)).float())
        errors = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
        tolerance = _ROUNDED if rounded else _TOLERANCE[dtype]
        # Each chunk by itself: what earlier tokens pass on shows in the second only. In few bits of the median token,
        # since one that is sent to another expert by a rounding may differ.
        exact = tolerance == _TOLERANCE[torch.float32]
        error = max(float(part.max() if exact else part.median()) for part in errors.split(max(tokens // 2, 1)))
        if not error < tolerance:
            what = "the residual stream behind its layers differs" if head is None else "its logits differ"
            raise refusal(self._config, f"{what} from the library's, relatively by {error:.2g}")


def _aside(whole: AttentionBatch) -> AttentionBatch:
    """Tokens of another sequence, of which nothing is kept: a model that keeps states somewhere else goes on from
    theirs."""
    batch = _chunk(whole, 0, _ASIDE)
    assert batch.states is not None
    states = replace(batch.states, writes=torch.zeros_like(batch.states.writes))
    return replace(batch, slots=torch.zeros_like(batch.slots), states=states)


def _all(x: Tensor) -> Tensor:
    return x


def _chunk(whole: AttentionBatch, begin: int, end: int) -> AttentionBatch:
    device = whole.positions.device
    states = StateBatch.of_one(end - begin, device)
    if begin:  # goes on from where the chunk before has left its state
        states = replace(states, reads=torch.ones_like(states.reads))
    return replace(
        whole,
        positions=whole.positions[begin:end],
        slots=whole.slots[begin:end],
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
        context_lens=torch.tensor([end], dtype=torch.int32, device=device),
        max_query=end - begin,
        max_context=end,
        states=states,
    )

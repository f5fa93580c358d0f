"""From logits to tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SamplingOps(Protocol):
    """The noise of a draw is defined by `reference.noise`, so that all backends draw the same."""

    samples_any_dtype: bool
    """Whether `argmax`, `filter_thresholds` and `gumbel_argmax` also read 16-bit logits, not only float32."""

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        """In row `at[i]` of `logits`, set to -inf every token whose bit in `bits[i]` is 0.

        `at` is int64 [n], `bits` int32 [n, ceil(vocab / 32)]: bit t % 32 of word t // 32 stands for token t.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [rows]: index of the largest entry of each row of float32 [rows, vocab]; the first of equals."""
        ...

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """float32 [rows]: the smallest logit / temperature that top-k, top-p and min-p all keep; -inf where none
        filters or the temperature is 0.

        `top_k` is int64 (0: no limit), `top_p` and `min_p` float32, all [rows]. Top-p is taken over what top-k leaves.
        """
        ...

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        """int64 [rows]: a draw from softmax(logits / temperature); temperature 0 means argmax.

        The noise of an entry is a function of the row's key (int64 [rows]) and its index alone; `reference.noise`
        defines it. `temperatures` is float32 [rows]; what lies below `thresholds` cannot be drawn.
        """
        ...

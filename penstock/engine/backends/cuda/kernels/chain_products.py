"""The links of a chain as its kernel has them: one product each, a layer of experts as three or four of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from penstock.engine.backends.cuda.kernels.mxfp4_rows import row_bytes
from penstock.engine.backends.interface import FP8, AnyLink, ClampedSwiglu, ExpertChoice, ExpertLinks, Link


class Role(Enum):
    """What a product is in a layer of experts; see `csrc/chain_links.cuh`."""

    DENSE = ""
    SCORES = "SCORES"
    SHARED = "SHARED"
    EACH = "EACH"
    SUM = "SUM"


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a chain."""

    weight: Tensor
    """[N, K], gated [2 * N, K]; of EACH and SUM with one more axis in front, of all experts."""
    scale: Tensor | None = None
    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: bool = False
    role: Role = Role.DENSE
    choice: ExpertChoice | None = None
    """Of all products of a layer of experts."""
    gate: Tensor | None = None
    """[1, K]: of SCORES and SHARED, what says how much of the shared expert counts."""
    shared: Tensor | None = None
    """Of SUM: the shared expert's [N, its width]."""
    shared_scale: Tensor | None = None
    depth: int = 0
    """Inputs of weights in MXFP4, whose rows do not say it."""
    clamped: ClampedSwiglu | None = None
    """What gates visited experts; None: SiLU."""

    @property
    def inputs(self) -> int:
        """Of one expert."""
        return self.depth if self.fp4 else self.weight.shape[-1]

    @property
    def outputs(self) -> int:
        """Of one expert."""
        rows = self.weight.shape[-2]
        return rows // 2 if self.gated else rows

    @property
    def width(self) -> int:
        return 0 if self.shared is None else self.shared.shape[1]

    @property
    def fp8(self) -> bool:
        return self.weight.dtype == FP8

    @property
    def fp4(self) -> bool:
        return self.weight.dtype == torch.uint8

    @property
    def fits(self) -> bool:
        """Bfloat16 all over, but for weights in e4m3 or MXFP4 with scales, and float32 gains; rows of whole pieces."""
        weights = [one for one in (self.weight, self.shared) if one is not None]
        scales = [self.scale] if self.shared is None else [self.scale, self.shared_scale]
        scaled = (self.fp8 or self.fp4) and all(one is not None and one.dtype == torch.float32 for one in scales)
        plain = self.weight.dtype == torch.bfloat16 and all(one is None for one in scales)
        others = [one for one in (self.bias, self.gate) if one is not None]
        gains = [] if self.norm is None else [self.norm]
        return (
            (scaled or plain)
            and self._are_of_rows(self.weight, self.scale, self.bias)
            and (self.shared is None or self._are_of_rows(self.shared, self.shared_scale))
            and all(one.numel() == self.inputs for one in gains)
            and all(one.dtype == self.weight.dtype and one.shape[-1] % 16 == 0 for one in weights)
            and all(one.dtype == torch.bfloat16 for one in others)
            and all(one.dtype in (torch.bfloat16, torch.float32) for one in gains)
            and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (*weights, *others, *gains))
        )

    @staticmethod
    def _are_of_rows(weight: Tensor, *vectors: Tensor | None) -> bool:
        """Whether each of `vectors` that there is has a number for every row, one behind the other."""
        rows = weight.shape[:-1].numel()
        return all(one is None or (one.numel() == rows and one.is_contiguous()) for one in vectors)


def products_of(links: Sequence[AnyLink]) -> list[Product] | None:
    """None where one of them has no form that the kernel reads, or reads what nobody wrote."""
    experts = sum(isinstance(link, ExpertLinks) for link in links)
    if not links or experts > 1 or not _follow(links):
        return None
    found = [product for link in links for product in _products(link)]
    return found if all(product.fits for product in found) else None


def _products(link: AnyLink) -> list[Product]:
    if isinstance(link, Link):
        return [Product(link.weight, link.scale, link.bias, link.norm, link.eps, link.gated, link.residual)]
    choice, gate = link.choice, link.shared_gate
    scores = Product(
        link.router, bias=link.router_bias, norm=link.norm, eps=link.eps, role=Role.SCORES, choice=choice, gate=gate
    )
    each = Product(
        link.gate_up, link.gate_up_scale, link.gate_up_bias, link.norm, link.eps, gated=True, role=Role.EACH,
        choice=choice, depth=link.norm.shape[0], clamped=link.clamped,
    )  # fmt: skip
    total = Product(
        link.down, link.down_scale, link.down_bias, residual=True, role=Role.SUM, choice=choice,
        shared=link.shared_down, shared_scale=link.shared_down_scale, depth=link.gate_up.shape[1] // 2,
    )  # fmt: skip
    if link.shared_gate_up is None:
        return [scores, each, total]
    shared = Product(
        link.shared_gate_up, link.shared_gate_up_scale, norm=link.norm, eps=link.eps, gated=True,
        role=Role.SHARED, choice=choice, gate=gate,
    )  # fmt: skip
    return [scores, shared, each, total]


def _follow(links: Sequence[AnyLink]) -> bool:
    """Whether each reads what there is: the residual stream, or as many numbers as the link before it wrote."""
    width = next((_inputs(link) for link in links if link.norm is not None), None)
    for index, link in enumerate(links):
        before = links[index - 1] if index else None
        if isinstance(link, ExpertLinks):
            if not _fit_together(link):
                return False
            streams = [link.norm.shape[0]]
        else:
            if link.norm is None and before is not None:
                adds = isinstance(before, ExpertLinks) or before.residual
                if adds or before.outputs != link.inputs:  # type: ignore[union-attr]
                    return False
            streams = [link.inputs] * (link.norm is not None) + [link.outputs] * link.residual
        if width is not None and any(stream != width for stream in streams):
            return False
    return True


def _inputs(link: AnyLink) -> int:
    return link.router.shape[1] if isinstance(link, ExpertLinks) else link.inputs


def _fit_together(link: ExpertLinks) -> bool:
    """Whether all its matrices are of one layer of experts that the kernel has a form for."""
    (experts, rows, inputs), hidden = link.gate_up.shape, link.norm.shape[0]
    choice, correction = link.choice, link.choice.correction
    shared = (link.shared_gate_up, link.shared_down)
    both = [one for one in shared if one is not None]
    packed = link.gate_up.dtype == torch.uint8
    wide, narrow = (row_bytes(hidden), row_bytes(rows // 2)) if packed else (hidden, rows // 2)
    return (
        inputs == wide
        and tuple(link.down.shape) == (experts, hidden, narrow)
        and link.down.dtype == link.gate_up.dtype
        and (not packed or (hidden % 32 == 0 and rows % 64 == 0 and not both and link.choice.top_k <= 16))
        and (not both or link.clamped is None)
        and tuple(link.router.shape) == (experts, hidden)
        and choice.top_k <= min(experts, 31)
        and experts <= 1024
        and choice.groups <= 32
        and experts % choice.groups == 0
        and (choice.groups == 1 or not choice.best_two or experts // choice.groups > 1)
        and (correction is None or (correction.dtype == torch.float32 and correction.is_contiguous()))
        and (correction is None or correction.numel() == experts)
        and (not both or (len(both) == 2 and both[0].shape[1] == both[1].shape[0] == hidden))
        and (not both or both[0].shape[0] == 2 * both[1].shape[1])
        and (link.shared_gate is None or (bool(both) and tuple(link.shared_gate.shape) == (1, hidden)))
    )

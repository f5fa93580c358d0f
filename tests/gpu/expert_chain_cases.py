"""Chains of products with a layer of experts in them for the tests of their kernel: random links, and what they compute
in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels.mxfp4_fragments import fragments, stacked
from penstock.engine.backends.cuda.kernels.mxfp4_rows import row_bytes, rows_of
from penstock.engine.backends.interface import FP8, AnyLink, ClampedSwiglu, ExpertChoice, ExpertLinks, Link
from penstock.engine.loading.mxfp4 import round_mxfp4

BF16 = torch.bfloat16
EPS = 1e-6
TOLERANCE = 8e-3
"""Relative error of results that were rounded to bfloat16 four times on their way."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of the products between two attentions: output, a layer of experts, the next layer's first product."""

    hidden: int
    attended: int
    entry: int
    experts: int
    width: int
    choice: ExpertChoice
    shared: int = 0
    gate: bool = False
    ties: bool = field(default=False)
    """Whether experts have equal scores in pairs."""
    wide: bool = False
    """Whether the gains of norms are float32."""

    @property
    def weights(self) -> int:
        """That one token reads."""
        dense = self.attended + self.experts + self.entry + self.gate
        return self.hidden * (dense + 3 * (self.choice.top_k * self.width + self.shared))


QWEN3_30B = ExpertSizes(2048, 4096, 5120, 128, 768, ExpertChoice(8, True))
DEEPSEEK_LITE = ExpertSizes(2048, 2048, 3648, 64, 1408, ExpertChoice(6, False), shared=2816)
QWEN3_NEXT = ExpertSizes(2048, 4096, 12352, 512, 512, ExpertChoice(10, True), shared=512, gate=True, wide=True)
GPT_OSS = ExpertSizes(2880, 4096, 5120, 32, 2880, ExpertChoice(4, True))
GPT_OSS_GATE = ClampedSwiglu(1.702, 7.0)


def make_expert_chain(
    sizes: ExpertSizes,
    *,
    fp8: bool,
    bias: bool = False,
    device: torch.device,
    keep: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[AnyLink]:
    """`keep` is called on every tensor; `bias`: of the router and the products beside the experts."""
    hidden = sizes.hidden

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        if device.type == "meta":  # sizes alone
            return torch.empty(shape, device=device, dtype=torch.float32)
        return torch.randn(shape, device=device, dtype=torch.float32).mul_(scale)

    def matrix(*shape: int) -> tuple[Tensor, Tensor | None]:
        if device.type == "meta":
            scales = torch.empty(shape[:-1], dtype=torch.float32, device=device) if fp8 else None
            return torch.empty(shape, dtype=FP8 if fp8 else BF16, device=device), scales
        weight = noise(*shape, scale=shape[-1] ** -0.5)
        if not fp8:
            return keep(weight.to(BF16)), None
        scale = weight.abs().amax(-1) / 448
        return keep((weight / scale[..., None]).to(FP8)), keep(scale)

    def vector(size: int, on: bool = True) -> Tensor | None:
        return keep(noise(size).to(BF16)) if on else None

    def gains() -> Tensor:
        found = noise(hidden, scale=0.3)
        return keep((found if device.type == "meta" else 1 + found).to(torch.float32 if sizes.wide else BF16))

    router = noise(sizes.experts, hidden, scale=hidden**-0.5)
    router_bias = noise(sizes.experts) if bias else None
    if sizes.ties:
        router[1::2] = router[: sizes.experts - 1 : 2]
        if router_bias is not None:
            router_bias[1::2] = router_bias[: sizes.experts - 1 : 2]
    gate_up, gate_up_scale = matrix(sizes.experts, 2 * sizes.width, hidden)
    down, down_scale = matrix(sizes.experts, hidden, sizes.width)
    shared: tuple[Tensor | None, ...] = (None,) * 4
    if sizes.shared:
        shared = *matrix(2 * sizes.shared, hidden), *matrix(hidden, sizes.shared)
    output, output_scale = matrix(hidden, sizes.attended)
    entry, entry_scale = matrix(sizes.entry, hidden)
    experts = ExpertLinks(
        sizes.choice, keep(router.to(BF16)), None if router_bias is None else keep(router_bias.to(BF16)),
        gate_up, gate_up_scale, down, down_scale, gains(), EPS, *shared,
        keep(noise(1, hidden, scale=hidden**-0.5).to(BF16)) if sizes.gate else None,
    )  # fmt: skip
    return [
        Link(output, output_scale, vector(hidden, bias), residual=True),
        experts,
        Link(entry, entry_scale, vector(sizes.entry, bias), gains(), EPS),
    ]


def pack(
    links: Sequence[AnyLink], clamped: ClampedSwiglu | None, keep: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[list[AnyLink], list[AnyLink]]:
    """A chain with experts in bfloat16 as one in MXFP4, with biases, and the same in float32 for `expert_chain64`."""
    output, experts, entry = links
    assert isinstance(experts, ExpertLinks)

    def rounded(stack: Tensor, paired: bool) -> tuple[Tensor, Tensor, Tensor]:
        matrices = [round_mxfp4(one.float()) for one in stack]
        rows = rows_of(stacked([fragments(one, paired=paired) for one in matrices]))
        return keep(rows.units), keep(rows.scale), torch.stack([one.dense() for one in matrices])

    up, up_scale, up_wide = rounded(experts.gate_up, True)
    down, down_scale, down_wide = rounded(experts.down, False)
    count, rows = experts.gate_up.shape[:2]
    device = experts.gate_up.device
    shared = {
        "gate_up_bias": keep(torch.randn(count, rows, device=device).to(BF16)),
        "down_bias": keep(torch.randn(count, experts.down.shape[1], device=device).to(BF16)),
        "clamped": clamped,
    }
    packed = replace(experts, gate_up=up, gate_up_scale=up_scale, down=down, down_scale=down_scale, **shared)
    wide = replace(experts, gate_up=up_wide, down=down_wide, **shared)
    return [output, packed, entry], [output, wide, entry]


def pack_shape(links: Sequence[AnyLink], clamped: ClampedSwiglu | None) -> list[AnyLink]:
    """The same without any weights, on the device `meta`."""
    output, experts, entry = links
    assert isinstance(experts, ExpertLinks)
    (count, rows, hidden), meta = experts.gate_up.shape, torch.device("meta")

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    packed = replace(
        experts,
        gate_up=empty(count, rows, row_bytes(hidden), dtype=torch.uint8),
        gate_up_scale=empty(count, rows, dtype=torch.float32),
        down=empty(count, hidden, row_bytes(rows // 2), dtype=torch.uint8),
        down_scale=empty(count, hidden, dtype=torch.float32),
        gate_up_bias=empty(count, rows, dtype=BF16),
        down_bias=empty(count, hidden, dtype=BF16),
        clamped=clamped,
    )
    return [output, packed, entry]


def scores64(link: ExpertLinks, stream: Tensor) -> Tensor:
    """Of a residual stream, not rounded."""
    found = _normed(stream, link) @ link.router.double().T
    return found[0] if link.router_bias is None else found[0] + link.router_bias.double()


def expert_chain64(
    links: Sequence[AnyLink], x: Tensor, residual: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream, the last output, and the scores, without any rounding. Experts are chosen by `scores` all
    the same, float32 [experts]: those of the kernel, which are rounded."""
    out, stream, exact = x.double(), residual.double(), scores.double()
    for link in links:
        if isinstance(link, ExpertLinks):
            exact = scores64(link, stream)
            stream = stream + _experts(link, stream, scores)
            continue
        if link.norm is not None:
            out = _normed(stream, link)
        y = _times(out, link.weight, link.scale)
        if link.bias is not None:
            y = y + link.bias.double()
        if link.residual:
            stream = stream + y
        else:
            out = y
    return stream, out, exact


def _experts(link: ExpertLinks, stream: Tensor, scores: Tensor) -> Tensor:
    x = _normed(stream, link)
    weights, chosen = link.choice(scores.float())
    total = torch.zeros_like(stream)
    for weight, expert in zip(weights.tolist(), chosen.tolist(), strict=True):
        scales = [None if one is None else one[expert] for one in (link.gate_up_scale, link.down_scale)]
        biases = [0.0 if one is None else one[expert].double() for one in (link.gate_up_bias, link.down_bias)]
        inner = link.gated(_times(x, link.gate_up[expert], scales[0]) + biases[0])
        total += weight * (_times(inner, link.down[expert], scales[1]) + biases[1])
    if link.shared_gate_up is not None and link.shared_down is not None:
        gate, up = _times(x, link.shared_gate_up, link.shared_gate_up_scale).chunk(2, dim=-1)
        shared = _times(F.silu(gate) * up, link.shared_down, link.shared_down_scale)
        if link.shared_gate is not None:
            shared = shared * (x @ link.shared_gate.double().T).sigmoid()
        total += shared
    return total


def _normed(stream: Tensor, link: Link | ExpertLinks) -> Tensor:
    assert link.norm is not None
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + link.eps) * link.norm.double()


def _times(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    y = x @ weight.float().double().T
    return y if scale is None else y * scale.double()

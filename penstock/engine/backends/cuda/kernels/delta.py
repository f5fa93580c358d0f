"""Gated delta nets (`Ops.delta_net`): decodes token by token (`delta_decode`), prompts in chunks (`delta_prompt`;
`delta_channels` where every channel has a decay of its own), and the gated norm where neither has applied it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.cuda.kernels.delta_channels import channel_prompts
from penstock.engine.backends.cuda.kernels.delta_conv import keep_inputs
from penstock.engine.backends.cuda.kernels.delta_decode import choose, decode
from penstock.engine.backends.cuda.kernels.delta_layout import LEAST_SIDE, columns, gated_norm, head_shape
from penstock.engine.backends.cuda.kernels.delta_prompt import prompts
from penstock.engine.backends.interface import AttentionBatch, DeltaLayout, DeltaWeights


@triton.jit
def _norm_kernel(
    o_ptr: tl.tensor,
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    vs = tl.arange(0, BLOCK_V)
    mask = vs < V_DIM
    _, _, _, z_col, _, _ = columns(head, K_HEADS, V_HEADS, K_DIM, V_DIM, GROUPED)
    norm = tl.load(norm_ptr + vs, mask=mask, other=0.0)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    at = (token * V_HEADS + head) * V_DIM + vs
    o = tl.load(o_ptr + at, mask=mask, other=0.0)
    z = tl.load(x_ptr + token * x_stride + z_col + vs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, gated_norm(o, z, norm, V_DIM, eps, SIGMOID).to(out_ptr.dtype.element_ty), mask=mask)


def delta_net(
    projected: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    weights: DeltaWeights,
    batch: AttentionBatch,
    conv_cache: Tensor,
    state_cache: Tensor,
    counters: Tensor,
    *,
    processors: int,
    fixed: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`counters`: see `decode`. `fixed`: launch shapes that do not depend on the number of sequences; runs of several
    single tokens may then be written where they were read."""
    states = batch.states
    assert states is not None, "a recurrent layer needs to know where its states are"
    tokens, decodes = projected.shape[0], batch.num_decodes
    out = torch.empty((tokens, layout.v_heads * layout.v_dim), dtype=projected.dtype, device=projected.device)
    mixed = tokens > decodes
    shape = choose(decodes, layout, processors, fixed=fixed)
    # Not every step of many tokens has a counter for each of their heads.
    later = mixed or decodes * layout.v_heads > counters.numel()
    raw = out if shape.parts == 1 and not later else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if decodes:
        decode(projected, gates, layout, weights, batch, states, conv_cache, state_cache, raw, None if later else out,
               counters, shape, pdl=pdl)  # fmt: skip
        if fixed:
            keep_inputs(projected, layout, batch, states, conv_cache, decodes, by_token=True, pdl=pdl)
    if mixed:
        through = channel_prompts if layout.by_channel else prompts
        through(projected, gates, layout, weights, batch, states, conv_cache, state_cache, raw, pdl=pdl)
    if later:
        launch(
            _norm_kernel, (tokens, layout.v_heads), raw, projected, weights.norm, out, projected.stride(0),
            weights.eps, **head_shape(layout), GROUPED=layout.grouped, SIGMOID=layout.sigmoid_gate,
            BLOCK_V=max(LEAST_SIDE, next_power_of_2(layout.v_dim)), num_warps=1, pdl=pdl,
        )  # fmt: skip
    return out

"""Prompt steps of recurrent layers in the padded shapes of CUDA graphs: captured without any token, replayed with
prompts, chunks and decodes, against the plain implementation. Padding changes no state and no other token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import test_triton_delta as delta
import test_triton_mamba as mamba
import test_triton_short_conv as short
import torch
from attention_cases import ops
from gpu_harness import DEVICE, MODE, QUICK, check, check_equal, integers
from state_cases import Run
from torch import Tensor

from penstock.engine.backends.cuda.prompt_graphs import PROMPTS
from penstock.engine.backends.reference.delta import delta_net as plain_delta
from penstock.engine.backends.reference.mamba import mamba as plain_mamba

DECODE = Run(5, 1, 1, (1,), True)
DRAFTS = Run(7, 3, 5, (5, 6, 7), True)
PROMPT = Run(0, 75, 0, (2,), False)
CHUNK = Run(32, 16, 3, (4,), False)
"""It begins behind a state that stays, and ends at the end of a block."""
SHORT = Run(33, 1, 8, (8,), False)
STEPS: tuple[tuple[str, int, int, list[Run]], ...] = (
    ("a prompt", 0, 128, [PROMPT]),
    ("no padding", 0, 75, [PROMPT]),
    ("prompts", 0, 96, [PROMPT, CHUNK, SHORT]),
    ("prompts beside decodes", 8, 128, [DECODE, DRAFTS, PROMPT, CHUNK]),
    ("a chunk and no decode", 16, 32, [CHUNK]),
    ("nothing", 4, 32, []),
)
"""Names, places for decodes and for prompt tokens, and what a step computes."""


def delta_call(case: Any) -> Tensor:
    return ops.delta_net(case.projected, case.gates, case.layout, case.weights, case.batch, case.conv, case.state)


def plain_delta_call(case: Any) -> Tensor:
    return plain_delta(
        case.projected.float(), case.gates.float(), case.layout, case.weights, case.batch, case.conv, case.state
    )


def mamba_call(case: Any) -> Tensor:
    return ops.mamba(case.projected, case.layout, case.weights, case.batch, case.conv, case.state)


def plain_mamba_call(case: Any) -> Tensor:
    return plain_mamba(case.projected.float(), case.layout, case.weights, case.batch, case.conv, case.state)


def in_shape(module: Any, layout: Any, dtype: torch.dtype, decodes: int, tokens: int, runs: list[Any]) -> Any:
    """A step as `arrange` packs it: unused places behind the decodes, sequences without tokens and the padding behind
    the prompts."""
    unused = decodes - sum(run.length for run in runs if run.decodes)
    padding = tokens - sum(run.length for run in runs if not run.decodes)
    packed = [run for run in runs if run.decodes] + [module.Run(0, 1, 0, (0,), True)] * unused
    packed += [run for run in runs if not run.decodes]
    if padding:
        packed.append(module.Run(0, padding, 0, (0,), False))
    case = module.build(layout, packed, dtype)
    batch = case.batch
    for part in (batch.states.first, batch.states.last):
        part[decodes - unused : decodes] = 0
    prompts = sum(not run.decodes for run in runs)
    starts = batch.query_starts.tolist()
    begins, filled = starts[: decodes + prompts], decodes + tokens - padding
    starts = begins + [filled] * (PROMPTS - prompts + 1) + [decodes + tokens]
    contexts = batch.context_lens.tolist()[: decodes + prompts] + [1] * (PROMPTS - prompts) + [padding]
    batch = dataclasses.replace(
        batch, query_starts=integers(starts, torch.int32), context_lens=integers(contexts, torch.int32),
        rows=integers([0] * len(contexts), torch.int32), max_query=tokens,
    )  # fmt: skip
    return dataclasses.replace(case, batch=batch)


def replayed(case: Any, empty: Any, call: Callable[[Any], Tensor]) -> Tensor:
    """What a graph gives that was captured with nothing but padding; its states are `case`'s afterwards."""
    kept = {name: getattr(case, name) for name in ("conv", "state") if hasattr(case, name)}
    empty = dataclasses.replace(empty, weights=case.weights, **kept)
    before = {name: tensor.clone() for name, tensor in kept.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(empty)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call(empty)
    torch.cuda.synchronize()
    for name, tensor in kept.items():
        check_equal(f"{name} without a step", tensor, before[name])
    for name in ("projected", "gates"):
        if hasattr(case, name):
            getattr(empty, name).copy_(getattr(case, name))
    for name in ("positions", "query_starts", "context_lens"):
        getattr(empty.batch, name).copy_(getattr(case.batch, name))
    for name in ("first", "last", "reads", "writes"):
        getattr(empty.batch.states, name).copy_(getattr(case.batch.states, name))
    graph.replay()
    torch.cuda.synchronize()
    return out


def compare_steps(
    module: Any, layout: Any, dtype: torch.dtype, call: Callable[[Any], Tensor], plain: Callable[[Any], Tensor]
) -> None:
    for name, decodes, tokens, runs in STEPS[3:] if QUICK else STEPS:
        runs = [module.Run(*(getattr(run, field.name) for field in dataclasses.fields(run))) for run in runs]
        case = in_shape(module, layout, dtype, decodes, tokens, runs)
        theirs = case.on("cpu")
        if DEVICE.type == "cuda":
            got = replayed(case, in_shape(module, layout, dtype, decodes, tokens, []), call)
        else:
            got = call(case)
        if MODE == "compile":
            continue
        want = plain(theirs)
        real = [*range(sum(run.length for run in runs if run.decodes))]
        real += range(decodes, decodes + sum(run.length for run in runs if not run.decodes))
        limit = module.TOLERANCES[dtype]
        assert not got.isnan().any(), f"{name}: padding is finite"
        if real:
            check(f"{name} {dtype} out", got[real], want[real], limit)
        check(f"{name} {dtype} inputs", case.conv, theirs.conv, 1e-6)
        written = {slot for run in runs for slot in run.writes}
        kept = [slot for slot in range(len(case.conv)) if slot not in written]
        check_equal(f"{name} {dtype} other inputs", case.conv[kept], theirs.conv[kept].to(DEVICE))
        if hasattr(case, "state"):
            check(f"{name} {dtype} states", case.state, theirs.state, limit)
            check_equal(f"{name} {dtype} other states", case.state[kept], theirs.state[kept].to(DEVICE))


def test_delta_nets() -> None:
    compare_steps(delta, delta.SMALL, torch.float32, delta_call, plain_delta_call)
    if not QUICK:
        compare_steps(delta, delta.REAL, torch.bfloat16, delta_call, plain_delta_call)


def test_mamba() -> None:
    compare_steps(mamba, mamba.SMALL, torch.float32, mamba_call, plain_mamba_call)
    if not QUICK:
        compare_steps(mamba, mamba.REAL, torch.bfloat16, mamba_call, plain_mamba_call)


def test_short_convs() -> None:
    compare_steps(short, short.SMALL, torch.float32, short.call, short.plain_call)
    if not QUICK:
        compare_steps(short, short.REAL, torch.bfloat16, short.call, short.plain_call)

"""How long one engine step takes, from what it must read and compute.

A step is a roofline with few factors, each measured (`calibration`): weights are read once and multiplied with every
token; decoding tokens read their context's keys and values, and read and write the states of recurrent layers; prompt
tokens multiply with theirs; the head runs once per sampled token. Reading and multiplying a matrix overlap, but not
perfectly: both together take the root of the sum of their squares, which is the larger one where they differ and 1.4
times as much where they are equal, as GEMMs between 64 and 512 rows do. The rest is fixed time per step, per layer
and per sequence.

Tensor parallelism divides reading and computing and adds two all-reduces per layer. Pipeline stages divide nothing and
add hand-overs: a step goes through all of them. What they gain is that as many steps are in flight as there are stages,
each with its own sequences; that is for those to count who ask for steps (`capacity`, `simulation`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import hypot

from penstock.planning.calibration import Calibration
from penstock.planning.compression import Compression
from penstock.planning.deployment import Deployment
from penstock.planning.numbers import WEIGHT_FORMATS

MOST_VERIFIED = 64
"""Most tokens that a step with draft tokens computes: `EngineConfig.max_verified`."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes."""

    decodes: int = 0
    """Tokens that decode: one per sequence, more with draft tokens."""
    context: int = 0
    """Tokens of context that they read, summed over them."""
    prefill: int = 0
    """Prompt tokens computed."""
    attended: int = 0
    """Positions that those prompt tokens attend to, summed over them."""
    samples: int = 0
    """Tokens sampled: rows through the head."""


def attended(start: int, length: int) -> int:
    """Positions that `length` prompt tokens attend to when `start` tokens are before them."""
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that attend to the same number of positions."""

    kv_bytes: float
    """Keys and values of one token over these layers, as one device reads them."""
    flops: float
    """Of a prompt token for every position it attends to, over these layers and all devices."""
    length: int | None = None
    """Positions; None: all."""


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """What a step must read and compute, on all devices together unless said."""

    layers: int
    hidden: int
    dense_params: float
    """Of the layers' matrices that every token passes."""
    dense_bytes: float
    head_params: float
    head_bytes: float
    windows: tuple[Window, ...]
    experts: int = 0
    """Of each layer of experts."""
    experts_per_token: int = 0
    expert_params: float = 0.0
    """Of one expert, over all layers of experts."""
    expert_bytes: float = 0.0
    expert_layers: int = 0
    state_bytes: float = 0.0
    """States of one sequence over all recurrent layers, as one device reads and writes them."""


class StepTime:
    """Seconds of a step on one replica of a deployment. Model and device are folded into a few coefficients, so that a
    simulator can ask millions of times."""

    __slots__ = (
        "_compute", "_draft", "_expert_read", "_expert_read_few", "_experts", "_few", "_fixed", "_head_compute",
        "_head_read", "_latency", "_launch", "_miss", "_prompt", "_read", "_read_few", "_sequence", "_speculation",
        "_state", "_token", "_verify", "_windows",
    )  # fmt: skip

    def __init__(self, deployment: Deployment, calibration: Calibration) -> None:
        counts, device, form = counts_of(deployment), deployment.device, deployment.weights
        shards = deployment.tensor_parallel
        factors = calibration.factors(form)
        head = calibration.factors(WEIGHT_FORMATS["bf16"]) if form.head_bytes >= 2 else factors
        bandwidth = device.bandwidth * shards
        dense_flops = device.flops_in("bf16") * shards
        compute = device.flops_in(form.compute) * shards * factors.compute
        self._few = calibration.few_tokens
        self._read_few = counts.dense_bytes / (bandwidth * factors.read_few)
        self._read = counts.dense_bytes / (bandwidth * factors.read)
        self._compute = 2 * (counts.dense_params + counts.experts_per_token * counts.expert_params) / compute
        self._experts = counts.experts
        self._miss = 1 - counts.experts_per_token / counts.experts if counts.experts else 1.0
        self._expert_read_few = counts.expert_bytes / (bandwidth * factors.read_few)
        self._expert_read = counts.expert_bytes / (bandwidth * factors.read)
        self._head_read = counts.head_bytes / (bandwidth * head.read_few)
        self._head_compute = 2 * counts.head_params / (dense_flops * head.compute)
        self._windows = tuple(
            (
                window.kv_bytes / (device.bandwidth * calibration.kv_read),
                window.flops / (dense_flops * calibration.attention),
                window.length,
            )
            for window in counts.windows
        )
        self._fixed = (
            calibration.step_s + counts.layers * calibration.layer_s + counts.expert_layers * calibration.expert_layer_s
        )
        self._token = self._latency = 0.0
        self._share(deployment, counts, calibration)
        self._prompt = calibration.prompt_step_s
        self._state = 2 * counts.state_bytes / (device.bandwidth * calibration.kv_read)
        self._sequence = calibration.sequence_s + self._state
        self._verify = calibration.verify_s
        self._launch = counts.layers * calibration.launch_layer_s if deployment.devices > 1 else 0.0
        self._speculation = deployment.speculation
        self._draft = None
        if (draft := deployment.draft) is not None:
            self._draft = StepTime(replace(draft, weight_dtype="auto"), calibration)

    def _share(self, deployment: Deployment, counts: ModelCounts, calibration: Calibration) -> None:
        """What devices send each other: two ring all-reduces per layer between shards, the residual stream from stage
        to stage, and from the last one back to the first."""
        device, shards, stages = deployment.device, deployment.tensor_parallel, deployment.pipeline_parallel
        row = 2 * counts.hidden
        if shards > 1:
            link = device.link if shards <= device.devices_per_node else device.network
            self._token += 2 * counts.layers * row * 2 * (shards - 1) / shards / (link.bandwidth * calibration.link)
            self._latency += 2 * counts.layers * link.latency_s
        if stages > 1:
            link = device.link if deployment.nodes == 1 else device.network
            self._token += stages * row / (link.bandwidth * calibration.link)
            self._latency += stages * link.latency_s
        self._fixed += self._latency

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        return self.of(work.decodes, work.context, work.prefill, work.attended, work.samples)

    def of(self, decodes: float, context: float, prefill: float, attended: float, samples: float) -> float:
        """`seconds` of a `StepWork` with these numbers, which may be means."""
        device = self._linears(decodes + prefill, samples)
        for kv_read, flops, length in self._windows:
            if length is None:
                device += context * kv_read + attended * flops
            else:
                device += min(context, decodes * length) * kv_read + min(attended, prefill * length) * flops
        if prefill:
            device += self._prompt
        return device if device > self._launch else self._launch

    def decode_run(self, decodes: int, context: int, steps: int) -> float:
        """Of `steps` decode steps in a row by the same sequences, whose context grows by a token each."""
        base = self._linears(decodes, decodes)
        launched = self._launched_steps(base, decodes, context, steps)
        total = launched * self._launch
        context += launched * decodes
        steps -= launched
        total += steps * base
        for kv_read, _, length in self._windows:
            growing = steps if length is None else max(0, min(steps, length - context // decodes))
            total += (growing * context + decodes * growing * (growing - 1) / 2) * kv_read
            if length is not None:
                total += (steps - growing) * decodes * length * kv_read
        return total

    def verify(self, sequences: float, context: float, depth: int) -> float:
        """Of a step that drafts and verifies `depth` tokens for each sequence; every one of them reads the context."""
        rows = sequences * (1 + depth)
        drafting = 0.0 if self._draft is None else depth * self._draft.of(sequences, context, 0, 0, sequences)
        return drafting + self._verify + self.of(rows, context * (1 + depth), 0, 0, rows)

    def token_s(self, sequences: float, context: float) -> float:
        """Mean time between two tokens of each of these sequences. With speculation, as many draft tokens are verified
        as pay and none if none do: the engine measures that and does the same."""
        best = self.of(sequences, context, 0, 0, sequences)
        speculation = self._speculation
        if speculation is None:
            return best
        for depth in range(1, speculation.depth + 1):
            if sequences * (1 + depth) > MOST_VERIFIED:
                break
            gained = replace(speculation, depth=depth).tokens_per_step
            best = min(best, self.verify(sequences, context, depth) / gained)
        return best

    def shares(self, work: StepWork) -> dict[str, float]:
        """Where the time of a step goes, in seconds: `bandwidth` (reading weights, keys, values, states), `compute`,
        `links` and `overhead`. Where reading and computing overlap, the time is divided by their squares."""
        tokens, samples = work.decodes + work.prefill, work.samples
        read, compute = self._matrix_read(tokens), tokens * self._compute
        head_read, head_compute = (self._head_read, samples * self._head_compute) if samples else (0.0, 0.0)
        bandwidth = read * read / hypot(read, compute) + (
            head_read**2 / hypot(head_read, head_compute) if samples else 0
        )
        matrices = hypot(read, compute) + hypot(head_read, head_compute)
        context, prompts = samples * self._state, 0.0
        for kv_read, flops, length in self._windows:
            context += (work.context if length is None else min(work.context, work.decodes * length)) * kv_read
            prompts += (work.attended if length is None else min(work.attended, work.prefill * length)) * flops
        links = tokens * self._token + self._latency
        return {
            "bandwidth": bandwidth + context,
            "compute": matrices - bandwidth + prompts,
            "links": links,
            "overhead": self.seconds(work) - matrices - context - prompts - links,
        }

    def _matrix_read(self, tokens: float) -> float:
        few = tokens <= self._few
        read = self._read_few if few else self._read
        if self._experts:
            visited = self._experts * (1 - self._miss**tokens)
            read += visited * (self._expert_read_few if few else self._expert_read)
        return read

    def _linears(self, tokens: float, samples: float) -> float:
        """All that does not depend on the context."""
        seconds = self._fixed + hypot(self._matrix_read(tokens), tokens * self._compute) + tokens * self._token
        if samples:
            seconds += hypot(self._head_read, samples * self._head_compute) + samples * self._sequence
        return seconds

    def _launched_steps(self, base: float, decodes: int, context: int, steps: int) -> int:
        """How many of these steps are shorter on the device than launching them takes; those are the first."""
        if base >= self._launch:
            return 0
        low, high = 0, steps
        while low < high:
            middle = (low + high) // 2
            if self.of(decodes, context + middle * decodes, 0, 0, decodes) > self._launch:
                high = middle
            else:
                low = middle + 1
        return low


def counts_of(deployment: Deployment) -> ModelCounts:
    """Counted from the shape; embeddings are left out, since a step reads a few rows of them."""
    shape, form = deployment.shape, deployment.weights
    matrices = shape.matrix_parameters
    routers = sum(shape.layer(index).router for index in range(shape.layers))
    moe = shape.moe
    return ModelCounts(
        layers=shape.layers,
        hidden=shape.hidden,
        dense_params=matrices,
        dense_bytes=(matrices - routers) * form.matrix_bytes + routers * form.dense_bytes,
        head_params=shape.head_parameters,
        head_bytes=shape.head_parameters * form.head_bytes,
        windows=_windows(deployment),
        experts=0 if moe is None else moe.experts,
        experts_per_token=0 if moe is None else moe.top_k,
        expert_params=shape.expert_parameters,
        expert_bytes=shape.expert_parameters * form.further,
        expert_layers=0 if moe is None else moe.count,
        state_bytes=shape.state_bytes / deployment.tensor_parallel,
    )


def _windows(deployment: Deployment) -> tuple[Window, ...]:
    """Layers by window. Latent attention multiplies with every head's keys and values, and caches the latent once."""
    shape, mla = deployment.shape, deployment.shape.mla
    if shape.compression is not None:
        return _entry_windows(shape.compression, deployment.kv_bytes)
    if shape.layer_heads or shape.query_heads:
        found: Counter[tuple[int | None, int, int]] = Counter()
        for layer, window in enumerate(shape.windows):
            heads = shape.heads_in(layer)
            width = 2 * max(1, heads.kv_heads // deployment.tensor_parallel) * heads.head_dim
            found[window, width, shape.queries_in(layer) * heads.head_dim] += 1
        return tuple(
            Window(count * width * deployment.kv_bytes, count * 4 * queries, length)
            for (length, width, queries), count in found.items()
        )
    if mla is None:
        elements = float(2 * deployment.kv_heads_per_device * shape.head_dim)
        flops = 4 * shape.heads * shape.head_dim
    else:
        elements = sum(mla.at(layer).cached for layer in range(shape.layers)) / shape.layers
        flops = 2 * shape.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    layers = Counter(shape.attention_windows)
    return tuple(
        Window(count * elements * deployment.kv_bytes, count * flops, length) for length, count in layers.items()
    )


def _entry_windows(compression: Compression, kv_bytes: float) -> tuple[Window, ...]:
    """Of entries, by token of a context; the windows themselves are states, which are counted as such."""
    found = []
    for (rate, chosen), count in Counter(zip(compression.rates, compression.chosen, strict=True)).items():
        if rate:
            part = count / rate
            read, flops = part * compression.dim * kv_bytes, 4 * part * compression.heads * compression.dim
            found.append(Window(read, flops, compression.most * rate if chosen else None))
        if chosen:
            flops = 2 * part * compression.index_heads * compression.index_dim
            found.append(Window(2 * part * compression.index_dim, flops, None))
    return tuple(found)

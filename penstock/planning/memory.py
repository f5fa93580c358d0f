"""Memory of a deployment: weights, what the runtime takes, what is left for the KV cache, and how many sequences fit.

The rules are the engine's own (`engine.startup.memory`, `engine.parallel`): the cache is sized last, from a share of
what is free; the device of the fullest pipeline stage decides. Figures are per device unless they say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.parallel.layout import Place, Span, layer_span
from penstock.planning.deployment import Deployment
from penstock.planning.graphs import graph_bytes
from penstock.planning.numbers import kv_element_bytes

GIB = 1 << 30
CONTEXTS = tuple(1024 << power for power in range(8))
"""Context lengths of the concurrency table: 1k to 128k tokens."""
SHARE_OF_FREE = {"gpu": 0.92, "cpu": 0.15}
SHARE_OF_REST = {"gpu": 0.92, "cpu": 1.0}
"""What the KV cache takes of free memory, and of a model's `memory_share`: `CudaMemory` and `HostMemory`."""
RUNTIME_BYTES = {"gpu": int(0.6 * GIB), "cpu": int(1.0 * GIB)}
"""The CUDA context, loaded kernels and libraries; on a CPU the system, Python and torch."""
COLLECTIVE_BYTES = int(0.4 * GIB)
"""Buffers of the collectives' library on each of several GPUs."""
KEPT_STATES, SHARE_OF_STATES = 4, 0.25
"""States of recurrent layers that are kept for later prompts: so many for each sequence, in at most this share of what
the states of running ones leave (`engine.startup.memory`)."""
_LOGIT_ROWS = 256
"""Rows that the engine's largest measured step samples."""
GATHERED_BYTES, _GATHERED_DIM, _GATHERED_GROUP = 256 << 20, 128, 128
"""What Hopper's kernel for long prompts gathers of a cache at a time; the head size that it is for, and how many query
heads may share a KV head (`engine.backends.cuda.kernels.gathered_prefix`, `hopper_prefill`)."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A figure that a plan rests on, and where it is from."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one replica. Bytes are per device, of the pipeline stage that leaves the least for the cache."""

    deployment: Deployment
    capacity: int
    weights: int
    runtime: int
    """Context, libraries, buffers of collectives."""
    activations: int
    """Of the largest step, with what long contexts take beside it."""
    kv_room: int
    """For the KV cache and states; negative where not even the weights fit."""
    kv_bytes_per_token: float
    """On this device."""
    adapters: int
    """The slots of LoRA adapters."""
    blocks: int
    """KV blocks that fit, at most as many as all running sequences can use."""
    states: int = 0
    """Of recurrent layers, for running sequences and for later prompts: a part of `kv_room`."""

    @property
    def reserve(self) -> int:
        """What the cache leaves free: CUDA graphs, the sampler, fragmentation."""
        taken = self.weights + self.adapters + self.runtime + self.activations + self.kv_room
        return max(0, self.capacity - taken)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.blocks * self.deployment.block_size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can run: what one with the whole cache holds, or the context window."""
        wanted = self.deployment.context_len
        return wanted if self._held(wanted) <= self.blocks else min(wanted, self.kv_tokens)

    @property
    def fits(self) -> bool:
        """Whether the engine would start, with the context that was asked for."""
        asked = self.deployment.max_model_len
        return self.blocks > 0 and (asked is None or asked <= self.longest)

    def concurrency(self, context: int) -> int:
        """Sequences of `context` tokens each that the cache holds at once, the shared prefix held once. `most_running`
        is another limit."""
        if context > self.longest:
            return 0
        shared = self._shared_blocks(context)
        return (self.blocks - shared) // (self._held(context) - shared)

    def concurrency_table(self) -> dict[int, int]:
        """By context length, up to the longest that runs."""
        lengths = [length for length in CONTEXTS if length < self.longest]
        return {length: self.concurrency(length) for length in (*lengths, self.longest)} if self.blocks else {}

    def without_sharing(self, context: int) -> int:
        """Sequences that the cache would hold if none shared a prefix."""
        return 0 if context > self.longest else self.blocks // self._held(context)

    @property
    def host_tokens(self) -> int:
        """Tokens of blocks that the host tier keeps for later prompts."""
        per_block = round(self.kv_bytes_per_token * self.deployment.block_size)
        memory = self.deployment.host_memory
        if self.deployment.shape.recurrent_layers:
            memory //= 2  # the other half is for states
        return memory // per_block * self.deployment.block_size if per_block else 0

    def host_sequences(self, context: int) -> int:
        """Idle conversations of `context` tokens that the host tier adds to those in the cache."""
        size = self.deployment.block_size
        return self.host_tokens // (-(-context // size) * size)

    def _held(self, tokens: int) -> int:
        """Most blocks of one sequence at the same time. Where every layer has a window, blocks that have left it are
        released (`engine.kv.allocator`)."""
        size, window = self.deployment.block_size, self.deployment.shape.window
        blocks = -(-tokens // size)
        return blocks if window is None else min(blocks, -(-(window + self.deployment.step_tokens) // size) + 2)

    def _shared_blocks(self, context: int) -> int:
        """Full blocks of the shared prefix; one that is longer than a sequence is cut, and the last token is always
        computed. Sequences with windows release their beginning, so there is nothing to share later."""
        if self.deployment.shape.window is not None:
            return 0
        return min(self.deployment.shared_prefix, context - 1) // self.deployment.block_size

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        deployment = self.deployment
        kind, weights = deployment.device.kind, deployment.weights
        share = SHARE_OF_FREE[kind]
        found = [
            Assumption(
                "weights", f"{weights.name}, {8 * weights.matrix_bytes:.3g} bits each", _weights_source(deployment)
            ),
            Assumption("runtime", _gib(self.runtime), "estimate: context, kernels and libraries of a process"),
            Assumption("KV element", f"{8 * deployment.kv_bytes:.3g} bits ({deployment.kv_format})", "engine.kv.kinds"),
        ]
        if self.states:
            each = state_bytes(deployment, 0) / 2**20
            what = f"{_gib(self.states)} of the cache, {each:.1f} MiB each"
            found.append(Assumption("states of recurrent layers", what, "engine.startup.memory: running and kept ones"))
        if kind == "gpu":
            what = f"{_gib(self.activations)} for steps of {deployment.step_tokens} tokens"
            found.append(Assumption("activations", what, "tensors alive in one layer; the engine measures it at start"))
        if gathered := gathered_bytes(deployment):
            what = f"{_gib(gathered)} of the activations"
            found.append(Assumption("keys of long prompts, gathered", what, "engine.backends.cuda.long_prompts"))
        if deployment.kv_memory is None:
            of = "the model's share" if deployment.memory_share is not None else "what is free"
            share = SHARE_OF_REST[kind] if deployment.memory_share is not None else share
            graphs = graph_bytes(deployment)
            but = f", less where captured steps take more than the rest ({_gib(graphs)})" if graphs else ""
            found.append(Assumption("KV cache", f"{share:.0%} of {of}{but}", "engine.startup.memory"))
        shape = deployment.shape
        if shape.window is None and any(shape.windows):
            bounded = shape.context_elements(deployment.context_len) / (shape.kv_elements * deployment.context_len)
            found.append(Assumption(
                "sliding windows",
                f"blocks span all layers, so none is released; alone the windows would need {bounded:.0%} at "
                f"{deployment.context_len:,} tokens",
                "engine.kv.allocator",
            ))  # fmt: skip
        if shape.tied_embeddings:
            found.append(Assumption("tied embeddings", "held twice, as embedding and as head", "engine.models.build"))
        return tuple(found)

    @property
    def problem(self) -> str | None:
        """Why the engine would not start; None where it fits. `remedy` says what would do."""
        if self.fits:
            return None
        deployment = self.deployment
        name = deployment.device.name
        if self.blocks > 0:
            return (
                f"one sequence of {deployment.context_len:,} tokens does not fit: {deployment.label} holds "
                f"{self.kv_tokens:,} tokens of {deployment.shape.name}"
            )
        if self.states > self.kv_room > 0:
            return (
                f"{deployment.shape.name} does not fit: states of {deployment.most_running:,} sequences take "
                f"{_gb(self.states)} of each {name}, which has {_gb(self.kv_room)} left; lower max_running"
            )
        needed = self.weights + self.adapters + self.runtime + self.activations
        return (
            f"{deployment.shape.name} does not fit: {deployment.weights.name} weights take {_gb(self.weights)} of each "
            f"{name} (with runtime and activations {_gb(needed)}), which has {_gb(self.capacity)}"
        )


def memory_plan(deployment: Deployment) -> MemoryPlan:
    """The fullest stage decides: all have the same number of blocks."""
    stages = [_stage(deployment, stage) for stage in range(deployment.pipeline_parallel)]
    return min(stages, key=lambda plan: (plan.blocks, plan.kv_room))


def device_weights(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of weights on each device of a stage: layers are split by heads and width, norms and routers are copied.
    Each device of the first stage also has the whole embedding and a part of the head."""
    shape, tensor, form = deployment.shape, deployment.tensor_parallel, deployment.weights
    first, last = _span(deployment, stage)
    copies = deployment.kv_heads_per_device * tensor / shape.kv_heads
    total = 0.0
    for part, count in shape.layer_groups(first, last):
        split = part.query_output + part.key_value * copies + part.feed_forward
        matrices = (split / tensor + part.latent) * form.matrix_bytes
        experts = part.experts / tensor * form.further
        total += count * (matrices + experts + (part.router + part.small) * form.dense_bytes)
    if shape.kept_layers:
        total = total * shape.kept_layers / shape.layers
    if stage == 0:
        rows = -(-shape.vocab // tensor)
        total += shape.embedding_parameters * form.dense_bytes + rows * shape.hidden * form.head_bytes
    return round(total + shape.hidden * form.dense_bytes)


def kv_block_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of one block on each device of a stage."""
    first, last = _span(deployment, stage)
    shape = deployment.shape
    if shape.compression is not None:
        sizes = deployment.block_size, deployment.kv_bytes, deployment.weights.dense_bytes
        return shape.compression.block_bytes(first, last, *sizes)
    # With latent attention every shard has the whole latent.
    elements = shape.kv_elements_in(first, last, deployment.tensor_parallel)
    keys = round(shape.index_keys(first, last, deployment.block_size) * deployment.weights.dense_bytes)
    if shape.gated_streams is not None:
        attending, dense = shape.attended_in(first, last), deployment.weights.dense_bytes
        keys += shape.gated_streams.block_bytes(attending, deployment.block_size, dense)
    if shape.mla is not None and shape.mla.unrotated:  # vectors of two widths, each with a scale
        kept, form = shape.mla.kept_in(first, last), deployment.kv_format
        return round(sum(width * kv_element_bytes(form, width) for width in kept) * deployment.block_size) + keys
    return round(elements * deployment.block_size * deployment.kv_bytes) + keys


def _stage(deployment: Deployment, stage: int) -> MemoryPlan:
    kind, capacity = deployment.device.kind, deployment.device.memory_bytes
    weights = device_weights(deployment, stage)
    block = kv_block_bytes(deployment, stage)
    per_block = block
    draft = deployment.draft if stage == 0 else None
    if draft is not None:
        weights += device_weights(draft)
        per_block += kv_block_bytes(draft)
    runtime = RUNTIME_BYTES[kind] + (COLLECTIVE_BYTES if deployment.devices > 1 else 0)
    activations = activation_bytes(deployment) + gathered_bytes(deployment) if kind == "gpu" else 0
    adapters = adapter_bytes(deployment, stage) + adapter_row_bytes(deployment, stage)
    adapters += adapter_vector_bytes(deployment, stage) + adapter_block_bytes(deployment, stage)
    adapters += adapter_token_bytes(deployment, stage)
    free = capacity - runtime - weights - adapters - activations
    graphs = graph_bytes(deployment)
    room = free if free < 0 else _beside_graphs(free, SHARE_OF_FREE[kind], graphs)
    if deployment.kv_memory is not None:
        room = min(deployment.kv_memory, free)
    elif deployment.memory_share is not None:
        rest = int(capacity * deployment.memory_share) - runtime - weights - adapters - activations
        room = min(_beside_graphs(rest, SHARE_OF_REST[kind], graphs), free)
    useful = deployment.most_running * -(-deployment.context_len // deployment.block_size)
    states = _state_room(deployment, stage, room)
    fitting = (room - states) // per_block if per_block else useful  # stages without attention have no blocks
    blocks = max(0, min(fitting, useful)) if room > states else 0
    per_token = block / deployment.block_size
    return MemoryPlan(deployment, capacity, weights, runtime, activations, room, per_token, adapters, blocks, states)


def _beside_graphs(room: int, share: float, graphs: int) -> int:
    """A share of what is left, or less: captured steps have what they take of it, at most a quarter."""
    return min(int(room * share), room - min(graphs, room // 4))


def state_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of one sequence's states on each device of a stage: recurrent layers are split by heads; windows, entries
    and what is known of the last tokens are those of all heads."""
    first, last = _span(deployment, stage)
    element, shards = int(deployment.weights.dense_bytes), deployment.tensor_parallel
    return deployment.shape.state_bytes_in(first, last, element, shards)


def _state_room(deployment: Deployment, stage: int, room: int) -> int:
    """Bytes of the states that the engine makes room for: one for each sequence, one more, and kept ones."""
    each, running = state_bytes(deployment, stage), deployment.most_running
    if not each:
        return 0
    taken = each * (running + 1)
    return taken + each * max(0, min(KEPT_STATES * running, int((room - taken) * SHARE_OF_STATES) // each))


def adapter_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of the adapter slots on each device of a stage. Where a linear is split by outputs its A is whole on every
    device, where it is split by inputs its B is (`engine.adapters.layout`): of a rank, little gets smaller. Without
    room for experts one by one (`adapter_experts`)."""
    shape, tensor = deployment.shape, deployment.tensor_parallel
    first, last = _span(deployment, stage)
    units = sum(sum(_adapted_attention(deployment, index)) for index in range(first, last))
    units += sum(_adapted_rest(deployment, index) for index in range(first, last))
    if shape.kept_layers:
        units = units * shape.kept_layers // shape.layers
    if not first:  # embedding and head
        units += shape.vocab + 2 * shape.hidden + -(-shape.vocab // tensor)
    elements = deployment.adapter_slots * deployment.adapter_rank * units
    return elements * (2 if deployment.device.kind == "gpu" else 4)


def adapter_row_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of the rows of embedding and head that adapters may replace, on each device of a stage: a GPU of the first
    one has room for them in every slot, and says for every token where its row is (`engine.adapters.rows`)."""
    if stage or deployment.device.kind != "gpu":
        return 0
    row = 2 * deployment.shape.hidden + 8
    # Virtual tokens have rows of their own, unless their keys and values are stored.
    rows = max(deployment.adapter_rows, 0 if deployment.adapter_prefixes else deployment.adapter_tokens)
    return deployment.adapter_slots * (2 * rows * row + 4 * deployment.shape.vocab)


def adapter_vector_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of what adapters do to single outputs and norms, on each device of a stage: where some adapter has such, a
    GPU has a scale and a shift for every output in every slot, and gains for the norms of every layer
    (`engine.backends.cuda.slot_tables`)."""
    if deployment.device.kind != "gpu" or not deployment.adapter_vectors:
        return 0
    shape, tensor = deployment.shape, deployment.tensor_parallel
    first, last = _span(deployment, stage)
    columns = sum(_adapted_attention(deployment, index)[1] for index in range(first, last))
    columns += sum(_altered_rest(deployment, index) for index in range(first, last))
    gains = ((4 if shape.sandwich_norms else 2) * (last - first) + 1) * shape.hidden
    if shape.kept_layers:  # whose norms have no gains
        columns, gains = columns * shape.kept_layers // shape.layers, 0
    if not first:  # embedding and head
        columns += shape.hidden + -(-shape.vocab // tensor)
    return deployment.adapter_slots * 4 * (2 * columns + gains)


def adapter_block_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of the blocks by which adapters turn the inputs of linears (`engine.adapters.inputs`), in float32: a row of
    a block for every input of query, key, value, output, gate, up and down. Of experts and what is not attention of
    this kind there are none."""
    shape, size = deployment.shape, deployment.adapter_blocks
    if not size or shape.mla is not None:
        return 0
    first, last = _span(deployment, stage)
    tensor, inputs = deployment.tensor_parallel, 0
    for layer in range(first, last):
        inputs += (3 + shape.output_gate) * shape.hidden + shape.queries_in(layer) * shape.head_dim // tensor
        if shape.moe is None or not shape.moe.layers[layer]:
            inputs += 2 * shape.hidden + shape.ffn // tensor
    if shape.kept_layers:
        inputs = inputs * shape.kept_layers // shape.layers
    return deployment.adapter_slots * 4 * size * inputs


def adapter_token_bytes(deployment: Deployment, stage: int = 0) -> int:
    """Bytes of the virtual tokens of all adapters in slots, on each device of a stage: their blocks in the KV cache,
    which the requests of an adapter share, and the keys and values that prefixes have beside their slots
    (`engine.adapters.prefixes`)."""
    tokens = deployment.adapter_tokens
    total = -(-tokens // deployment.block_size) * kv_block_bytes(deployment, stage)
    if deployment.adapter_prefixes and deployment.device.kind == "gpu":
        width = 2 * deployment.kv_heads_per_device * deployment.shape.head_dim
        total += 2 * tokens * width * deployment.shape.attended_in(*_span(deployment, stage))
    return deployment.adapter_slots * total


def _adapted_attention(deployment: Deployment, layer: int) -> tuple[int, int]:
    """Of a rank and a layer: inputs and outputs of attention's linears. Most recurrent layers have room for adapters of
    these beside their own."""
    shape, hidden = deployment.shape, deployment.shape.hidden
    heads, delta, mla = shape.queries_in(layer) // deployment.tensor_parallel, shape.delta, shape.mla
    if delta is not None and delta.by_channel and delta.layers[layer]:
        return 0, 0
    if mla is not None:
        indexed, routed = bool(mla.indexed) and mla.indexed[layer], shape.moe is not None and shape.moe.layers[layer]
        return mla.at(layer).adapted(hidden, heads, shape.output_gate, indexed, routed)
    queries, keys = heads * shape.head_dim, deployment.kv_heads_per_device * shape.head_dim
    gates, sparse = shape.gates_of(heads, shape.head_dim), shape.sparse_blocks
    inputs, outputs = (3 + shape.output_gate) * hidden + queries, queries + gates + 2 * keys + hidden
    if sparse is not None and sparse.layers[layer]:
        more, made = sparse.adapted(hidden, deployment.tensor_parallel)
        inputs, outputs = inputs + more, outputs + made
    return inputs, outputs


def _altered_rest(deployment: Deployment, layer: int) -> int:
    """Outputs of a layer: of its feed-forward, or router and shared expert, and of its delta net."""
    shape, tensor = deployment.shape, deployment.tensor_parallel
    moe, delta, total = shape.moe, shape.delta, 0
    if delta is not None and delta.layers[layer]:
        values = delta.v_heads * delta.v_dim
        total += (delta.channels + values + 2 * delta.v_heads) // tensor + shape.hidden
        if delta.by_channel:  # rates alone, decays and output gates twice
            total += (values - delta.v_heads) // tensor + 2 * delta.k_dim
    if moe is None or not moe.layers[layer]:
        return total + 2 * (shape.ffn // tensor) + shape.hidden
    total += moe.experts + (1 if moe.shared_gate else 0) + (moe.latent + shape.hidden if moe.latent else 0)
    return total + (2 * (moe.shared_ffn // tensor) + shape.hidden if moe.shared_ffn else 0)


def _adapted_rest(deployment: Deployment, layer: int) -> int:
    """Of a rank and a layer: its feed-forward, or router and shared expert, and its delta net."""
    shape, tensor = deployment.shape, deployment.tensor_parallel
    hidden, moe, delta, total = shape.hidden, shape.moe, shape.delta, 0

    def gated(ffn: int) -> int:
        return 3 * hidden + 3 * (ffn // tensor)

    if delta is not None and delta.layers[layer]:
        values, parts = delta.v_heads * delta.v_dim, 3 if delta.by_channel else 1 if delta.grouped else 2
        total += 2 * parts * hidden + (delta.channels + values + 2 * delta.v_heads) // tensor  # projections, gates
        if delta.by_channel:  # rates alone, decays and output gates twice
            total += (values - delta.v_heads) // tensor + 4 * delta.k_dim
        total += values // tensor + hidden
    if moe is None or not moe.layers[layer]:
        return total + gated(shape.ffn)
    total += hidden + moe.experts + (2 * (hidden + moe.latent) if moe.latent else 0)
    total += gated(moe.shared_ffn) if moe.shared_ffn else 0
    return total + (hidden + 1 if moe.shared_gate else 0)


def activation_bytes(deployment: Deployment) -> int:
    """What the largest step of one device needs beside weights and cache: the tensors of a layer that are alive at the
    same time, for as many tokens as the budget allows."""
    shape, tensor = deployment.shape, deployment.tensor_parallel
    size = deployment.weights.dense_bytes
    heads = shape.heads // tensor
    stream = 2 * shape.hidden
    if shape.mla is None:
        attention = (2 * heads + 2 * deployment.kv_heads_per_device) * shape.head_dim
    else:
        attention = heads * (2 * (shape.mla.nope_dim + shape.mla.rope_dim) + 2 * shape.mla.value_dim)
    widths = [attention, 3 * shape.ffn // tensor]
    if shape.moe is not None:
        # Tokens are gathered once per expert they visit, and their results stay until they are added up.
        widths.append(shape.moe.top_k * (3 * shape.moe.ffn // tensor + 2 * shape.hidden))
        widths.append(3 * shape.moe.shared_ffn // tensor)
    logits = _LOGIT_ROWS * shape.vocab * 4
    return round(deployment.step_tokens * (stream + max(widths)) * size) + logits


def gathered_bytes(deployment: Deployment) -> int:
    """What long prompts take beside that: keys and values in 16 bits, copied from the cache's blocks for a kernel that
    reads them in one piece. The engine leaves it free whatever its contexts; twice where quantized ones are, since
    captured steps have memory of their own."""
    shape = deployment.shape
    gathers = (
        deployment.device.arch == "hopper"
        and deployment.kv_format != "fp32"
        and shape.mla is None
        and not shape.sinks
        and shape.head_dim == _GATHERED_DIM
        and min(shape.query_heads or (shape.heads,)) <= _GATHERED_GROUP * shape.kv_heads
    )
    quantized = deployment.kv_format in ("fp8", "int8")
    return GATHERED_BYTES * (1 + quantized) if gathers else 0


def _span(deployment: Deployment, stage: int) -> Span:
    tensor, pipeline = deployment.tensor_parallel, deployment.pipeline_parallel
    shape, place = deployment.shape, Place(stage * tensor, tensor, pipeline)
    return layer_span(shape.layers, place, () if shape.mla is None else shape.mla.starts)


def _weights_source(deployment: Deployment) -> str:
    if deployment.weight_dtype == "auto":
        stored = deployment.shape.stored is not None
        return "as the checkpoint stores them" if stored else "dense, as the device computes"
    return "engine.quantization: scales included"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"

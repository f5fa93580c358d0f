"""A deployment: one replica of a model on some devices, with the engine's settings. What plans are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from penstock.engine.parallel.layout import mixer_widths, named_heads, named_width
from penstock.errors import ConfigError
from penstock.planning.catalogue import Device, PriceKind
from penstock.planning.numbers import (
    CPU_FORMATS,
    KV_DTYPES,
    WEIGHT_DTYPES,
    WEIGHT_FORMATS,
    KVDType,
    WeightDType,
    WeightFormat,
    kv_element_bytes,
)
from penstock.planning.shape import ModelShape

BLOCK_SIZE = 16
"""Tokens of a KV block: the engine's default."""
_MOST_RUNNING = {"cpu": 64, "gpu": 256}
_TOKEN_BUDGET = {"cpu": 512, "gpu": 8448}
_GAP_S = {"cpu": 0.5, "gpu": 0.03}
_GAP_YIELDS_S = {"cpu": 2.0, "gpu": 0.25}
_PROMPT_TILE = {"cpu": 32, "gpu": 128}
"""Defaults of the engine's backends."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft tokens that one step verifies."""

    form: Literal["ngram", "draft"]
    acceptance: float
    """Chance that a draft token is accepted, given that those before it were."""
    depth: int = 6
    draft: ModelShape | None = None
    """The draft model, for `draft`."""

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance: {self.acceptance:g} is not a probability; give a number from 0 to 1")
        if self.depth < 1:
            raise ConfigError(f"speculation depth: {self.depth} must be 1 or more")
        if (self.form == "draft") != (self.draft is not None):
            raise ConfigError("speculation: `draft` needs a draft model, and `ngram` has none")

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of one verified step: the accepted ones and the one sampled after them."""
        if self.acceptance == 1:
            return self.depth + 1
        return (1 - self.acceptance ** (self.depth + 1)) / (1 - self.acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One replica. A combination that the engine would refuse is a ConfigError when it is made."""

    shape: ModelShape
    device: Device
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    weight_dtype: WeightDType = "auto"
    kv_dtype: KVDType = "auto"
    max_model_len: int | None = None
    """Context window; the model's own when not set."""
    max_running: int | None = None
    """Most sequences in one step; the engine's default for the device when not set."""
    token_budget: int | None = None
    """Most tokens computed in one step; likewise."""
    block_size: int = BLOCK_SIZE
    memory_share: float | None = None
    """Part of a device's memory for weights and KV cache; see `EngineConfig.memory_share`."""
    kv_memory: int | None = None
    """Bytes of each device for the KV cache; what is left when not set."""
    host_memory: int = 0
    """Bytes per device for blocks that leave the KV cache."""
    shared_prefix: int = 0
    """Tokens at the beginning of all prompts that are the same (a system prompt): held once."""
    speculation: Speculation | None = None
    adapter_slots: int = 0
    """LoRA adapters in device memory at the same time."""
    adapter_rank: int = 16
    """Largest rank of an adapter: memory is reserved for it."""
    adapter_rows: int = 64
    """Rows of the embedding, and of the head, that an adapter may replace; the same."""
    adapter_vectors: bool = False
    """Whether memory is reserved for what adapters do to single outputs and norms."""
    adapter_blocks: int = 0
    """Size of the blocks by which each adapter turns the inputs of every linear (OFT); 0: none does."""
    adapter_tokens: int = 0
    """Virtual tokens that each adapter puts before prompts (prompt tuning, prefix tuning); 0: none does."""
    adapter_prefixes: bool = False
    """Whether adapters have keys and values for these tokens (prefix tuning, cartridges)."""

    def __post_init__(self) -> None:
        for name, least in (
            ("tensor_parallel", 1), ("pipeline_parallel", 1), ("max_model_len", 1), ("max_running", 1),
            ("token_budget", 1), ("block_size", 1), ("kv_memory", 1), ("host_memory", 0), ("shared_prefix", 0),
            ("adapter_slots", 0), ("adapter_rank", 1), ("adapter_rows", 0), ("adapter_blocks", 0),
            ("adapter_tokens", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}: {value} must be {least} or more")
        if self.weight_dtype not in WEIGHT_DTYPES:
            raise ConfigError(f"weight_dtype: {self.weight_dtype!r} must be one of {', '.join(WEIGHT_DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype: {self.kv_dtype!r} must be one of {', '.join(KV_DTYPES)}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share: {self.memory_share:g} must be above 0 and at most 1")
        if self.max_model_len is not None and self.max_model_len > self.shape.max_positions:
            raise ConfigError(
                f"max_model_len: {self.max_model_len} is more than the {self.shape.max_positions} positions of "
                f"{self.shape.name}"
            )
        for name in ("shared_prefix", "adapter_tokens"):
            tokens = getattr(self, name)
            if tokens >= self.context_len:
                raise ConfigError(f"{name}: {tokens} tokens do not fit a context of {self.context_len} tokens")
        if self.adapter_prefixes and self.shape.mla is not None:
            raise ConfigError(f"adapter_prefixes: {self.shape.name} has latent attention, which takes no prefixes")
        if self.device.kind == "cpu" and self.devices > 1:
            raise ConfigError(
                f"{self.device.name}: tensor_parallel and pipeline_parallel are for GPUs; run replicas instead"
            )
        _check_layout(self.shape, self.tensor_parallel, self.pipeline_parallel)
        if self.shape.served:
            self._check_served()

    def _check_served(self) -> None:
        """What the engine refuses, or nobody would want, for a model of several devices."""
        if self.tensor_parallel > self.device.devices_per_node:
            raise ConfigError(
                f"tensor_parallel: {self.tensor_parallel} is more than the {self.device.devices_per_node} devices of "
                f"one machine with {self.device.name}; between machines use pipeline_parallel"
            )
        if (
            self.device.kind == "gpu"
            and "fp8" not in self.device.flops
            and "fp8" in (self.weights.compute, self.kv_dtype)
        ):
            raise ConfigError(f"{self.device.name} has no FP8 units; use int8 or int4 weights and a bf16 or int8 cache")
        if self.weights.compute == "fp4":
            raise ConfigError("the engine has no FP4 weights; use int4, fp8 or bf16")

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def nodes(self) -> int:
        """Machines that hold the devices; a pipeline stage is never spread over two of them."""
        stages_per_node = self.device.devices_per_node // self.tensor_parallel
        if not stages_per_node:
            return -(-self.devices // self.device.devices_per_node)
        return -(-self.pipeline_parallel // stages_per_node)

    @property
    def activation_dtype(self) -> str:
        """Of activations and of what is held dense: bfloat16 where the hardware has it."""
        return "bf16" if "bf16" in self.device.flops else "fp32"

    @property
    def weights(self) -> WeightFormat:
        """How the matrices are held."""
        dense = WEIGHT_FORMATS[self.activation_dtype]
        if self.weight_dtype == "auto":
            held = self.shape.stored or dense
        else:
            held = (CPU_FORMATS if self.device.kind == "cpu" else WEIGHT_FORMATS)[self.weight_dtype]
        if held.dense_bytes < dense.dense_bytes:
            head = max(held.head_bytes, dense.head_bytes) if held.head_bytes >= 2 else held.head_bytes
            held = replace(held, dense_bytes=dense.dense_bytes, head_bytes=head)
        return held

    @property
    def kv_format(self) -> str:
        """The cache's number format: that of activations unless said otherwise, or int8 on x86 CPUs: on those with
        matrix tiles where these multiply it as it is, on others always (`CpuBackend`)."""
        if self.kv_dtype != "auto":
            return self.kv_dtype
        shape, tiles = self.shape, self.device.arch == "x86" and "bf16" in self.device.flops
        if self.device.arch == "x86" and not tiles:
            return "int8" if shape.mla is None and self.activation_dtype == "fp32" else self.activation_dtype
        grouped = shape.mla is None and shape.head_dim % 64 == 0 and shape.heads <= 8 * shape.kv_heads
        return "int8" if tiles and grouped and self.block_size % 16 == 0 else self.activation_dtype

    @property
    def kv_bytes(self) -> float:
        """Of one element of the cache, scales included."""
        heads_of = self.shape.head_dim if self.shape.mla is None else self.shape.mla.cached
        return kv_element_bytes(self.kv_format, heads_of)

    @property
    def context_len(self) -> int:
        return self.max_model_len or self.shape.max_positions

    @property
    def most_running(self) -> int:
        return self.max_running or _MOST_RUNNING[self.device.kind]

    @property
    def step_tokens(self) -> int:
        """The token budget."""
        return self.token_budget or _TOKEN_BUDGET[self.device.kind]

    @property
    def gap_s(self) -> float:
        """The gap between tokens that streams keep where no target is set."""
        return _GAP_S[self.device.kind]

    @property
    def gap_yields_s(self) -> float:
        """Prompts that wait, and take so long together, go before that."""
        return _GAP_YIELDS_S[self.device.kind]

    @property
    def prompt_tile(self) -> int:
        """Prompts that are cut short for a gap are cut to a multiple of so many tokens."""
        return _PROMPT_TILE[self.device.kind]

    @property
    def kv_heads_per_device(self) -> int:
        """With more shards than KV heads each shard has one, and several shards have the same."""
        return max(1, self.shape.kv_heads // self.tensor_parallel)

    @property
    def draft(self) -> Deployment | None:
        """The draft model, spread over the devices of the first stage: as many of them as split it evenly."""
        shape = None if self.speculation is None else self.speculation.draft
        if shape is None:
            return None
        tensor = max(size for size in possible_tensor_parallel(shape) if size <= self.tensor_parallel)
        return replace(
            self,
            shape=shape,
            tensor_parallel=tensor,
            pipeline_parallel=1,
            speculation=None,
            max_model_len=None,
            shared_prefix=0,
            adapter_slots=0,
            adapter_tokens=0,
            adapter_prefixes=False,
        )

    @property
    def label(self) -> str:
        """`h100 x8 (TP 8), fp8 weights, bf16 KV`."""
        grid = [f"TP {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        grid += [f"PP {self.pipeline_parallel}"] if self.pipeline_parallel > 1 else []
        layout = f" ({', '.join(grid)})" if grid else ""
        return f"{self.device.name} x{self.devices}{layout}, {self.weights.name} weights, {self.kv_format} KV"

    def price_per_hour(self, kind: PriceKind = "on_demand") -> float | None:
        """US dollars for all devices of the replica."""
        price = self.device.prices.of(kind)
        return None if price is None else price * self.devices


def _widths(shape: ModelShape) -> list[tuple[str, int]]:
    """What shards must divide beside heads."""
    moe, widths = shape.moe, [("a feed-forward width", shape.ffn)]
    if moe is not None:
        # Without a dense layer nothing has the dense width.
        dense = [] if all(moe.layers) else widths
        widths = [*dense, ("an expert width", moe.ffn), ("a shared expert's width", moe.shared_ffn)]
    return widths + mixer_widths(
        key_heads=0 if shape.delta is None else shape.delta.k_heads,
        mamba_heads=0 if shape.mamba is None else shape.mamba.heads,
        channels=0 if shape.short_conv is None else shape.short_conv.channels,
        output_groups=0 if shape.compression is None else shape.compression.output_groups,
    )


def splits(shape: ModelShape, tensor: int) -> bool:
    """Whether shards can have equal parts of every layer, as the engine cuts them (`engine.parallel.layout`)."""
    kv_fits = shape.mla is not None or shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0
    if shape.mamba is not None:
        shared = (shape.mamba.groups, *filter(None, [shape.mamba.norm_groups]))
        kv_fits = kv_fits and all(size % tensor == 0 or tensor % size == 0 for size in shared)
    if shape.sparse_blocks is not None:
        choosing = shape.sparse_blocks.heads
        kv_fits = kv_fits and (choosing % tensor == 0 or tensor % choosing == 0)
    even = (shape.heads, *shape.query_heads, *(width for _, width in _widths(shape)))
    return kv_fits and all(width % tensor == 0 for width in even)


def possible_tensor_parallel(shape: ModelShape) -> list[int]:
    """The sizes that a model allows."""
    return [size for size in range(1, shape.heads + 1) if splits(shape, size)]


def _check_layout(shape: ModelShape, tensor: int, pipeline: int) -> None:
    if not splits(shape, tensor):
        possible = ", ".join(map(str, possible_tensor_parallel(shape)))
        choosing = 0 if shape.sparse_blocks is None else shape.sparse_blocks.heads
        heads = named_heads((shape.heads, *shape.query_heads), shape.kv_heads, choosing)
        raise ConfigError(
            f"tensor_parallel: {tensor} cannot split {heads}{named_width(_widths(shape), tensor)} evenly; "
            f"{shape.name} allows {possible}"
        )
    if pipeline > shape.layers:
        raise ConfigError(f"pipeline_parallel: {pipeline} is more than the {shape.layers} layers of {shape.name}")
    if shape.mla is not None and shape.mla.starts and pipeline > sum(shape.mla.starts):
        with_one = "an indexer" if shape.delta is None else "an indexer or a delta net"
        raise ConfigError(
            f"pipeline_parallel: {pipeline} is more than the {sum(shape.mla.starts)} layers of {shape.name} with "
            f"{with_one} with which stages may begin"
        )

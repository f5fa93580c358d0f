"""Settings of a model that this server runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from penstock.config.autoscale import AutoscaleConfig
from penstock.config.fields import setting
from penstock.config.placement import PlacementConfig
from penstock.config.pools import PoolConfig, PoolRuleConfig
from penstock.config.resources import ResourcesConfig
from penstock.config.sampling import SamplingConfig
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import (
    SAVE_S,
    ActivationForm,
    AttentionForm,
    DType,
    EngineConfig,
    KVDType,
    Role,
    SpeculationForm,
    WeightForm,
)

DEFAULT_MODEL = "smollm2-135m"
SAVE_MARGIN_S = 3.0
"""What an engine may take beyond the time for saving its blocks."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: where it comes from and how its engine runs."""

    source: str = setting(
        DEFAULT_MODEL,
        doc="What to serve: a known name, pypi:PACKAGE==VERSION, hf:ORG/NAME[@REVISION], a folder or a .gguf file.",
    )
    name: str = setting("", doc="Name for clients; empty: derived from the source.")
    aliases: tuple[str, ...] = setting((), doc="Other names for clients.", example="[default]")
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels for data rules; external is false unless given here.", example="{region: eu}"
    )
    device: str = setting("auto", doc="auto, cpu, cuda or cuda:N.")
    dtype: DType = setting("auto", doc="Data type of activations, KV cache and dense weights.")  # noqa: RUF009
    weights: WeightForm = setting(  # noqa: RUF009
        "auto",
        doc="dense; int8 or int4 per group; fp8. auto keeps quantized checkpoints as stored where that is faster.",
    )
    activations: ActivationForm = setting(  # noqa: RUF009
        "auto", doc="Quantization of activations for int8 and int4 weights: int8 (fastest), or int16 on CPU."
    )
    max_model_len: int | None = setting(
        None, doc="Context window in tokens; when not set, the checkpoint's own.", least=1, example="2048"
    )
    max_running: int | None = setting(
        None, doc="Maximum sequences per step; when not set, 64 on CPU and 256 on CUDA.", least=1, example="64"
    )
    max_waiting: int = setting(
        4096, doc="Maximum of requests waiting in the engine; further ones are refused.", least=1
    )
    token_budget: int | None = setting(
        None, doc="Maximum tokens per step; when not set, 512 on CPU and 8448 on CUDA.", least=1, example="512"
    )
    target_gap_ms: float | None = setting(
        None, doc="Gap between tokens that streams keep while prompts are computed: a step takes only as many "
        "prompt tokens as fit; when not set, 30 on CUDA and 500 on CPU while few prompts wait. Requests may ask with "
        "x-slo-tpot-ms.",
        least=1, example="30",
    )  # fmt: skip
    block_size: int = setting(16, doc="Tokens per block of the KV cache.", least=1, most=1024)
    kv_memory: int | None = setting(
        None, doc="Memory for the KV cache; when not set, taken from free memory.", least=1, size=True, example="2GiB"
    )
    num_blocks: int | None = setting(
        None, doc="Exact number of KV blocks; overrides kv_memory.", least=1, example="4096"
    )
    kv_dtype: KVDType = setting(  # noqa: RUF009
        "auto",
        doc="KV cache format: full (dtype), or half the size: int8 (a scale per token and head), fp8. "
        "auto: int8 on CPUs with AMX and on x86 CPUs without bfloat16, full elsewhere.",
    )
    fp8_attention: bool = setting(
        False, doc="With kv_dtype: fp8, chunks of 512 prompt tokens and more attend in FP8 too; their attention is "
        "12 to 21% faster and less exact. On H100, H200 and the like, for models with heads of 128."
    )  # fmt: skip
    replicas: int = setting(
        1, doc="Engine processes that serve this model, each with its own weights.", least=1, most=256
    )
    autoscale: AutoscaleConfig | None = setting(  # noqa: RUF009
        None, doc="Change the number of replicas with the load; replicas is then the number at the start.",
        example="{min: 1, max: 4}",
    )  # fmt: skip
    machine_labels: tuple[str, ...] = setting(
        (), doc="In a fleet: labels that a machine must have to run it (fleet.labels of the machine).",
        example="[h200]",
    )  # fmt: skip
    replica_devices: tuple[str, ...] = setting(
        (), doc="Devices of the replicas, in turn; empty: all on device.", example="[cuda:0, cuda:1]"
    )
    replica_roles: tuple[Role, ...] = setting(
        (), doc="Roles of the replicas, in turn: prefill computes long prompts for decode; empty: both.",
        example="[prefill, decode]",
    )  # fmt: skip
    replica_grids: tuple[str, ...] = setting(
        (), doc="Devices of the replicas, in turn, as tensor_parallel x pipeline_parallel; empty: all have the same.",
        example="[4x1, 1x2]",
    )  # fmt: skip
    pools: tuple[PoolConfig, ...] = setting(
        (), doc="Named pools of replicas, in place of replicas: each with its number and what differs in its engines.",
        example="[{name: interactive, replicas: 2}, {name: batch, max_running: 64}]",
    )  # fmt: skip
    pool_rules: tuple[PoolRuleConfig, ...] = setting(
        (), doc="Which requests go to which pool; the first rule that matches counts, others go to the first pool.",
        example="[{pool: batch, classes: [batch], spill: [interactive]}]",
    )  # fmt: skip
    handover_tokens: int = setting(
        512, doc="Minimum of uncached prompt tokens for which a decode replica uses a prefill replica.", least=1
    )
    handover_wait_s: float = setting(
        10.0, doc="Seconds a decode replica waits for a prefill replica that completes no step.", least=0.1
    )
    memory_share: float | None = setting(
        None, doc="Share of the device's memory for weights and KV cache; at most 1 in total per device.",
        least=0.01, most=1, example="0.5",
    )  # fmt: skip
    time_slice: str = setting(
        "", doc="Time-slice group: its models share memory, one is awake at a time, requests wake the others.",
        example="gpu0",
    )  # fmt: skip
    tensor_parallel: int = setting(1, doc="Devices that split every layer; memory settings are per device.", least=1)
    pipeline_parallel: int = setting(
        1, doc="Pipeline stages, each with some of the layers; times tensor_parallel devices in all.", least=1
    )
    resources: ResourcesConfig | None = setting(  # noqa: RUF009
        None, doc="What a replica reserves on a cluster.", example="{cpus: 8, gpus: 1, memory: 32GiB}"
    )
    placement: PlacementConfig | None = setting(  # noqa: RUF009
        None, doc="Ranks on other machines: which, and where they join.",
        example="{machines: [local, host-b], listen: tcp://127.0.0.1:7001}",
    )  # fmt: skip
    devices: tuple[str, ...] = setting(
        (), doc="Device of each rank; several may share one. Empty: consecutive ones from device on.",
        example="[cuda:0, cuda:0]",
    )  # fmt: skip
    expert_parallel: bool = setting(
        False, doc="Place experts whole on the tensor_parallel devices instead of cutting each of them."
    )
    attention_parallel: AttentionForm = setting(  # noqa: RUF009
        "tensor", doc="With expert_parallel: devices share the heads (tensor), or have sequences of their own (data)."
    )
    expert_copies: int = setting(
        0, doc="With expert_parallel: experts on each device beyond its part, copies of the most visited.", least=0
    )
    expert_rebalance_s: float = setting(
        60.0,
        doc="With expert_parallel: seconds between looks at the load of experts, which may move; 0: never.",
        least=0,
    )
    rank_restarts: int = setting(
        0, doc="Times that a lost rank is started again alone; 0: the whole engine restarts. CPU ranks only.", least=0
    )
    host_memory: int = setting(
        0, doc="Host memory for offloaded KV blocks; 0: none.",
        least=0, size=True,
    )  # fmt: skip
    host_idle_s: float = setting(
        30.0, doc="Seconds after which an unused KV block is offloaded to host_memory ahead of its eviction.", least=0
    )
    disk_memory: int = setting(
        0, doc="Files for KV blocks and states that leave host_memory, per device; 0: none.", least=0, size=True,
    )  # fmt: skip
    disk_path: str = setting("", doc="Folder of these files, on a fast disk.", example="/var/cache/penstock")
    disk_persistent: bool = setting(
        False, doc="Keep these files, so that a restarted engine finds its prefixes again. What tenants said then "
        "stays on disk, readable by this user only and not encrypted.",
    )  # fmt: skip
    prefix_cache: bool = setting(True, doc="Reuse the KV cache of prompts with a common prefix.")
    state_interval: int = setting(
        1024, doc="Of models with recurrent layers: tokens between two states that are kept for later prompts, a "
        "multiple of block_size.", least=1,
    )  # fmt: skip
    kept_states: int | None = setting(
        None, doc="Maximum of such states; when not set, four per sequence, in at most a quarter of the KV cache's "
        "memory.", least=1, example="256",
    )  # fmt: skip
    deterministic: bool = setting(
        False, doc="Batch-invariant: the same bits for a request in any batch; slower, above all for prompts."
    )
    speculation: SpeculationForm = setting(  # noqa: RUF009
        "off", doc="Speculative decoding where it is faster: ngram (from the text itself), draft or eagle3 (need "
        "draft_model), mtp (a layer of the checkpoint), or auto (the first of these that there is, else ngram)."
    )  # fmt: skip
    speculation_depth: int = setting(6, doc="Maximum draft tokens per sequence and step.", least=1, most=32)
    draft_model: str | None = setting(
        None, doc="Source of a smaller model with the same vocabulary, for speculation: draft, or of an EAGLE-3 head.",
        example="smollm2-135m",
    )  # fmt: skip
    draft_tensor_parallel: int | None = setting(
        None, doc="Devices that split the draft model; when not set, as many of tensor_parallel as can.",
        least=1, example="1",
    )  # fmt: skip
    threads: int | None = setting(
        None, doc="CPU threads; when not set, all cores that this process may use.", least=1, example="8"
    )
    watchdog_s: float = setting(
        60.0, doc="Seconds with work but without a finished step after which the engine is restarted.", least=1
    )
    stream_interval_s: float | None = setting(
        None, doc="Minimum seconds between token messages at 8 or more requests (first and last tokens excepted); when "
        "not set, 0.04 on CPU, where sending competes with computing, 0 (every step) on GPUs.", least=0, example="0",
    )  # fmt: skip
    adapters: tuple[AdapterSpec, ...] = setting(
        (),
        doc="LoRA adapters that clients can name as the model: name, source (folder, hf:ORG/NAME or "
        "s3://BUCKET/PREFIX), pinned: true to load it at start and never evict it, and owner: the tenant that alone "
        "may use it.",
        example="[{name: support, source: ./adapters/support, pinned: false, owner: acme}]",
    )
    adapter_slots: int | None = setting(
        None,
        doc="Adapters in device memory; when not set, 20 if adapters are listed, else 0 (adapters off).",
        least=0,
        example="20",
    )
    adapter_host_slots: int = setting(100, doc="Adapters in host memory.", least=1)
    adapter_rank: int | None = setting(
        None, doc="Maximum rank of an adapter; device memory is reserved for it. When not set, that of the listed "
        "adapters, and at least 16.", least=1, most=512, example="64",
    )  # fmt: skip
    adapter_experts: bool | None = setting(
        None, doc="Whether adapters may change the experts of a layer, one by one, and kv_b_proj of latent attention; "
        "device memory is reserved for that. When not set, they may if a listed adapter in a local folder does, and "
        "always on CPU.", example="true",
    )  # fmt: skip
    adapter_rows: int | None = setting(
        None, doc="Rows of embedding and head that an adapter may replace (modules_to_save, trainable_token_indices); "
        "device memory is reserved for them in every slot. When not set, those of the listed adapters in local "
        "folders, the virtual tokens of the others, and at least 64; on CPU any number.", least=0, example="128256",
    )  # fmt: skip
    adapter_vectors: bool | None = setting(
        None, doc="Whether a GPU reserves memory in every slot for what adapters do to single outputs of linears and "
        "to norms (DoRA, biases, IA3, norms); without, their steps are slower. When not set: whether a listed adapter "
        "does that.", example="true",
    )  # fmt: skip
    adapter_memory: int | None = setting(
        None, doc="Memory of each GPU that is left free for what adapters have beside their slots, such as the blocks "
        "of OFT and prefixes. When not set, what the listed adapters in local folders, and the prefixes of others, "
        "need.", least=0, size=True,
        example="512MiB",
    )  # fmt: skip
    adapter_tokens: int | None = setting(
        None, doc="Tokens that an adapter may add to the model's vocabulary, or put before prompts (prompt tuning). "
        "When not set, those of the listed adapters in local folders, and the virtual tokens of the others.",
        least=0, most=65536, example="16",
    )  # fmt: skip

    trust_remote_code: tuple[str, ...] = setting(
        (), doc="Checkpoints whose own modelling code may run, by name: this folder or repository. Needs "
        "penstock[transformers].", example="[org/name]",
    )  # fmt: skip
    fallback: tuple[str, ...] = setting(
        (), doc="Models or remotes that answer when no replica of this model can, in order.", example="[small, api]"
    )
    overflow_at: int | None = setting(
        None, doc="Requests in flight per replica from which new ones go to fallback first.", least=1, example="32"
    )
    tool_format: Literal[
        "auto", "hermes", "smollm2", "llama3", "mistral", "granite", "phi4", "pythonic", "glm45", "cohere", "command_r",
        "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "qwen3_coder", "seed_oss",
        "minimax_m2", "lfm2", "hunyuan", "nemotron", "olmo3", "functools", "xlam", "glm4", "solar_open",
        "gemma4",
    ] = setting("auto", doc="How the model writes function calls; auto reads it from the chat template.")  # fmt: skip
    reasoning: Literal[
        "auto", "off", "think", "deepseek_r1", "granite", "granite33", "hunyuan", "mistral", "seed_oss", "kimi",
        "cohere", "solar_open", "gemma4", "gpt_oss",
    ] = setting(
        "auto", doc="How the model marks its thoughts, which are told from its answers; auto reads it from the chat "
        "template, off leaves them in the text.",
    )  # fmt: skip
    thinking_budget: int | None = setting(
        None, doc="Tokens after which a thought is closed and the answer begins, for requests that do not say; when "
        "not set, any number.", least=0, example="4096",
    )  # fmt: skip
    sampling: SamplingConfig | None = setting(  # noqa: RUF009
        None, doc="Sampling values of requests that give none; when not set, those that the checkpoint's makers "
        "recommend.", example="{temperature: 0.7, top_p: 0.9}",
    )  # fmt: skip
    downgrade_to: str = setting(
        "", doc="A smaller model for best_effort tiers while the queue of this one is long.",
        example="smollm2-135m",
    )  # fmt: skip
    input_price: float = setting(0.0, doc="Price per million prompt tokens, for estimates.", least=0)
    output_price: float = setting(0.0, doc="Price per million completion tokens, for estimates.", least=0)
    cost_per_hour: float = setting(
        0.0, doc="Hardware cost of one engine in dollars per hour, for cost metrics.", least=0
    )

    def engine_config(self, path: str) -> EngineConfig:
        """Settings of the engine; `path` is the resolved source."""
        made = {"model", "role", "machines", "adapters_elsewhere"}
        names = {field.name for field in dataclasses.fields(EngineConfig)} - made
        machines: tuple[str, ...] = ()
        if self.placement is not None:
            machines = self.placement.ranks(self.tensor_parallel, self.pipeline_parallel)
        return EngineConfig(model=path, machines=machines, **{name: getattr(self, name) for name in names})

    @property
    def save_s(self) -> float:
        """How long its engines may take to save what outlives them, when they end."""
        return SAVE_S + SAVE_MARGIN_S if self.disk_persistent else 0.0

    @property
    def first_replicas(self) -> int:
        """How many replicas are started with the server. With autoscale at least one, so that a model that cannot start
        is noticed at once, and its cold start is known."""
        if self.pools:
            return sum(pool.first_replicas for pool in self.pools)
        if self.autoscale is None:
            return self.replicas
        return min(max(self.replicas, self.autoscale.min), self.autoscale.max)

    @property
    def replica_count(self) -> int:
        """How many replicas it has, in all its pools."""
        return sum(pool.replicas for pool in self.pools) if self.pools else self.replicas

    def pool_of(self, replica: int) -> str:
        """The pool of replica number `replica`: those that are started with the server are numbered through the pools.
        Empty: there are none."""
        for pool in self.pools:
            if replica < pool.first_replicas:
                return pool.name
            replica -= pool.first_replicas
        return self.pools[-1].name if self.pools else ""

    def in_pool(self, name: str) -> ModelConfig:
        """The model with the settings of one of its pools."""
        for pool in self.pools:
            if pool.name == name:
                roles, grids, devices = pool.replica_roles, pool.replica_grids, pool.replica_devices
                return dataclasses.replace(
                    self,
                    replica_roles=roles,
                    replica_grids=grids,
                    replica_devices=devices,
                    **pool.own,  # type: ignore[arg-type]
                )
        return self

    def place_in_pool(self, replica: int) -> int:
        """The number of replica number `replica` within its pool."""
        for pool in self.pools:
            if replica < pool.first_replicas:
                break
            replica -= pool.first_replicas
        return replica

    def grid(self, replica: int) -> tuple[int, int]:
        """Tensor and pipeline parallelism of replica number `replica`."""
        if not self.replica_grids:
            return self.tensor_parallel, self.pipeline_parallel
        tensor, _, pipeline = self.replica_grids[replica % len(self.replica_grids)].partition("x")
        return int(tensor), int(pipeline)

    def role(self, replica: int) -> Role:
        """The role of replica number `replica`."""
        return self.replica_roles[replica % len(self.replica_roles)] if self.replica_roles else "both"

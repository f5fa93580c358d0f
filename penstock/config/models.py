"""Settings of a model that engines of this server run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import ActivationForm, DType, EngineConfig, KVDType, Role, SpeculationForm, WeightForm

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: where it comes from and how its engine runs."""

    source: str = setting(
        DEFAULT_MODEL,
        doc="What to serve: a known name, pypi:PACKAGE==VERSION, hf:ORG/NAME[@REVISION], a folder or a .gguf file.",
    )
    name: str = setting("", doc="What clients call it; made from the source when empty.")
    aliases: tuple[str, ...] = setting((), doc="Other names that clients may use for it.", example="[default]")
    device: str = setting("auto", doc="auto, cpu, cuda or cuda:N.")
    dtype: DType = setting("auto", doc="Type of activations, KV cache and dense weights.")  # noqa: RUF009
    weights: WeightForm = setting(  # noqa: RUF009
        "auto",
        doc="dense; int8 or int4 groups; fp8. auto keeps few-bit checkpoints as stored where it pays.",
    )
    activations: ActivationForm = setting(  # noqa: RUF009
        "auto", doc="Rounding of what int8 and int4 weights are applied to: int8 (fastest), or int16 on CPU."
    )
    max_model_len: int | None = setting(
        None, doc="Context window in tokens; the checkpoint's own when not set.", least=1, example="2048"
    )
    max_running: int | None = setting(
        None, doc="Most sequences in one step; 64 on CPU and 256 on CUDA when not set.", least=1, example="64"
    )
    max_waiting: int = setting(4096, doc="Requests that may wait in the engine; more are refused.", least=1)
    token_budget: int | None = setting(
        None, doc="Most tokens computed in one step; 512 on CPU, 8192 on CUDA when not set.", least=1, example="512"
    )
    block_size: int = setting(16, doc="Tokens in one block of the KV cache.", least=1, most=1024)
    kv_memory: int | None = setting(
        None, doc="Memory for the KV cache; taken from what is free when not set.", least=1, size=True, example="2GiB"
    )
    num_blocks: int | None = setting(
        None, doc="Exact number of KV blocks; overrides kv_memory.", least=1, example="4096"
    )
    kv_dtype: KVDType = setting(  # noqa: RUF009
        "auto",
        doc="KV cache: full (numbers of dtype), or half of bfloat16: int8 (scale per token and head), fp8. "
        "auto: int8 on CPUs with AMX, full elsewhere.",
    )
    replicas: int = setting(1, doc="Engine processes that serve this model, each with weights of its own.", least=1)
    replica_devices: tuple[str, ...] = setting(
        (), doc="Devices of the replicas, in turn; all on device when empty.", example="[cuda:0, cuda:1]"
    )
    replica_roles: tuple[Role, ...] = setting(
        (), doc="What the replicas do, in turn: prefill computes long prompts for those that decode; both when empty.",
        example="[prefill, decode]",
    )  # fmt: skip
    handover_tokens: int = setting(
        512, doc="Prompt tokens to compute from which on a decode replica has a prefill replica do it.", least=1
    )
    handover_wait_s: float = setting(
        10.0, doc="A prefill replica that completes no step for this long is not waited for any longer.", least=0.1
    )
    memory_share: float | None = setting(
        None, doc="Part of the device's memory for weights and KV cache; those of one device sum to at most 1.",
        least=0.01, most=1, example="0.5",
    )  # fmt: skip
    time_slice: str = setting(
        "", doc="Models with the same word here share memory by turns: one is awake, requests wake the others.",
        example="gpu0",
    )  # fmt: skip
    tensor_parallel: int = setting(
        1, doc="Devices that share the work of every layer; memory settings are per device.", least=1
    )
    pipeline_parallel: int = setting(
        1, doc="Groups of devices that have some of the layers each; times tensor_parallel in all.", least=1
    )
    host_memory: int = setting(
        0, doc="Host memory for KV blocks that leave the cache and may come back; 0 for none.",
        least=0, size=True,
    )  # fmt: skip
    host_idle_s: float = setting(
        30.0, doc="Seconds after which an unused KV block is copied to host_memory ahead of its eviction.", least=0
    )
    prefix_cache: bool = setting(True, doc="Reuse the KV cache of prompts that begin alike.")
    deterministic: bool = setting(
        False, doc="The same bits for a request whatever else runs beside it; slower, above all for prompts."
    )
    speculation: SpeculationForm = setting(  # noqa: RUF009
        "off", doc="Guess tokens ahead where it pays: ngram (from the text itself) or draft (needs draft_model)."
    )
    speculation_depth: int = setting(6, doc="Most guessed tokens per sequence and step.", least=1, most=32)
    draft_model: str | None = setting(
        None, doc="Source of a smaller model with the same vocabulary, for speculation: draft.", example="smollm2-135m"
    )
    threads: int | None = setting(None, doc="CPU threads; all cores when not set.", least=1, example="8")
    watchdog_s: float = setting(
        60.0, doc="An engine with work that finishes no step for this long is restarted.", least=1
    )
    stream_interval_s: float | None = setting(
        None, doc="With 8 requests and more, tokens go out this often at most, but for first and last ones: 0.04 on "
        "CPU, where delivering takes from what computes, 0 (every step) on GPUs when not set.", least=0, example="0",
    )  # fmt: skip
    adapters: tuple[AdapterSpec, ...] = setting(
        (),
        doc="LoRA adapters that clients may name as a model: a name, a source (folder, hf:ORG/NAME or "
        "s3://BUCKET/PREFIX), and pinned: true for one that is read at start and never evicted.",
        example="[{name: support, source: ./adapters/support, pinned: false}]",
    )
    adapter_slots: int | None = setting(
        None,
        doc="Adapters in device memory at once: 20 when adapters are listed, else 0 (adapters off) when not set.",
        least=0,
        example="20",
    )
    adapter_host_slots: int = setting(100, doc="Adapters in host memory at once.", least=1)
    adapter_rank: int = setting(
        16, doc="Largest rank of an adapter; device memory is reserved for it.", least=1, most=512
    )

    fallback: tuple[str, ...] = setting(
        (), doc="Models or remotes that answer when no replica of this one can, in this order.", example="[small, api]"
    )
    overflow_at: int | None = setting(
        None, doc="Requests in flight per replica from which on new ones go to fallback first.", least=1, example="32"
    )
    tool_format: Literal["auto", "hermes", "smollm2", "llama3", "mistral"] = setting(
        "auto", doc="How the model writes function calls; auto reads it from the chat template."
    )
    downgrade_to: str = setting(
        "", doc="A smaller model that answers tiers with best_effort while too many wait for this one.",
        example="smollm2-135m",
    )  # fmt: skip
    input_price: float = setting(0.0, doc="Price of a million prompt tokens, for estimates.", least=0)
    output_price: float = setting(0.0, doc="Price of a million completion tokens, for estimates.", least=0)
    cost_per_hour: float = setting(
        0.0, doc="Dollars that an engine's hardware costs per hour, for metrics of cost.", least=0
    )

    def engine_config(self, path: str) -> EngineConfig:
        """Settings for the engine of this model, whose source was resolved to `path`."""
        names = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "role"}
        return EngineConfig(model=path, **{name: getattr(self, name) for name in names})

    def role(self, replica: int) -> Role:
        """Of the replica with this number."""
        return self.replica_roles[replica % len(self.replica_roles)] if self.replica_roles else "both"

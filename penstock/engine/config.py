"""Engine settings: one frozen dataclass, no environment, no globals."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.engine.adapters.spec import AdapterSpec

WeightForm = Literal["auto", "dense", "int8", "int4", "fp8"]
ActivationForm = Literal["auto", "int8", "int16"]
KVDType = Literal["auto", "full", "int8", "fp8"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
SpeculationForm = Literal["off", "ngram", "draft", "eagle3", "mtp", "auto"]
AttentionForm = Literal["tensor", "data"]
Role = Literal["both", "prefill", "decode"]
SAVE_S = 10.0
"""Most time for saving KV blocks when an engine ends, with `disk_persistent`."""
LONG_CHUNK = 512
"""Tokens of a prompt in one step from which attention on CUDA gathers keys, and `fp8_attention` does something."""
LOCAL = "local"
"""The machine of rank 0, in a placement."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know besides the checkpoint itself."""

    model: str
    """Path of a checkpoint folder or GGUF file (sources are resolved before the engine starts)."""
    name: str = ""
    """What clients call the model; the path's last part by default."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: DType = "auto"
    """Of activations, the KV cache and dense weights. `auto`: bfloat16 where the hardware has it, else float32."""
    weights: WeightForm = "auto"
    """`dense`: as numbers of `dtype`. `int8`, `int4`: integers in groups with a scale each, as stored or rounded when
    loaded. `fp8`: e4m3, as stored or rounded when loaded, with a scale per output. `auto`: a few-bit checkpoint stays
    as it is stored (a GGUF file on CPUs with bfloat16 instructions is widened, which is faster there); all else is
    dense."""
    activations: ActivationForm = "auto"
    """How linears on `int8` and `int4` weights round what they are applied to. On CPU per row and block of 32, to one
    int8 digit or to two (about 16 bits); `auto`: see `BlockQuantizer`. On CUDA `auto` does not round, and
    `int8` rounds per token for weights that are `int8` with a scale per output."""
    max_model_len: int | None = None
    """Context window; the checkpoint's own when not set."""
    max_running: int | None = None
    """Most sequences in one step; 64 on CPU and 256 on CUDA when not set."""
    token_budget: int | None = None
    """Most tokens computed in one step; 512 on CPU and 8448 on CUDA when not set."""
    target_gap_ms: float | None = None
    """The gap between tokens that running streams keep while prompts are computed: a step with streams computes only as
    many prompt tokens as fit into it, as measured; see `pace`. Not set: the default of the device, which yields."""
    block_size: int = 16
    kv_memory: int | None = None
    """Bytes for the KV cache; measured from what is free when not set."""
    memory_share: float | None = None
    """Part of the device's whole memory that weights and KV cache may take; `kv_memory` goes before it."""
    num_blocks: int | None = None
    """Exact number of KV blocks; overrides `kv_memory`."""
    kv_dtype: KVDType = "auto"
    """`full`: the cache holds numbers of `dtype`. `int8`: one byte, with a scale per token and head. `fp8`: one byte,
    with a scale per head from the checkpoint, or none. `auto`: `int8` on CPUs whose matrix tiles multiply it as it is,
    which takes about half of attention's time away, and on x86 CPUs without bfloat16; `full` elsewhere."""
    fp8_attention: bool = False
    """Attention of long prompts multiplies an `fp8` cache in FP8, queries and probabilities too: faster and less exact.
    Of GPUs with kernels for it, heads of 128, and chunks of `LONG_CHUNK` tokens."""
    host_memory: int = 0
    """Bytes of host memory for blocks that leave the KV cache; they return when a prompt begins with them. 0: none."""
    host_idle_s: float = 30.0
    """Blocks unused for this long are copied to the host before their place is needed."""
    disk_memory: int = 0
    """Bytes of files for blocks and states that leave host memory; they return when a prompt begins with them. 0:
    none."""
    disk_path: str = ""
    """Folder of these files, on a fast disk."""
    disk_persistent: bool = False
    """Whether what is in these files outlives the engine: the next one with the same weights and settings goes on with
    it. What tenants said then stays on disk; see `kv.kept_folder`."""
    prefix_cache: bool = True
    state_interval: int = 1024
    """Of models with recurrent layers: a state is kept for later prompts every so many tokens, a multiple of the block
    size, and at the end of prompts; see `kv.states`."""
    kept_states: int | None = None
    """Most states kept at the same time. Not set: four per sequence, in at most a quarter of the cache's memory."""
    deterministic: bool = False
    """Batch-invariant: a request's tokens and log-probabilities are bit-identical whatever else runs; slower."""
    speculation: SpeculationForm = "off"
    """Verify several draft tokens in one step, where that is measured to pay. `ngram`: draft tokens from the text
    itself. `draft`: from `draft_model`. `eagle3`: from a head that reads the model's hidden states, `draft_model` too.
    `mtp`: from the layer that the checkpoint has for this. `auto`: the first of these that there is, else `ngram`. What
    is generated stays the same."""
    speculation_depth: int = 6
    """Most draft tokens per sequence and step."""
    draft_model: str | None = None
    """Path of a smaller checkpoint with the same vocabulary, for `speculation: draft`, or of an EAGLE-3 head."""
    draft_tensor_parallel: int | None = None
    """Devices that share the work of the draft model, the first ones of the first stage; as many of `tensor_parallel`
    as split it evenly when not set."""
    tensor_parallel: int = 1
    """Devices that share the work of every layer. Memory settings are per device."""
    pipeline_parallel: int = 1
    """Groups of devices that have some of the layers each; `tensor_parallel * pipeline_parallel` devices in all."""
    devices: tuple[str, ...] = ()
    """The device of each rank, in their order; several may share one. Empty: rank r has the r-th, beginning at
    `device`."""
    expert_parallel: bool = False
    """Experts are placed whole on the `tensor_parallel` devices of a stage instead of being cut by width."""
    attention_parallel: AttentionForm = "tensor"
    """With `expert_parallel`. `tensor`: the devices of a stage share the heads. `data`: each has all heads, and
    sequences of its own with their KV cache; tokens go to the devices of their experts and back."""
    expert_copies: int = 0
    """With `expert_parallel`: experts that each device holds beyond its part, copies of those with the most tokens."""
    expert_rebalance_s: float = 60.0
    """With `expert_parallel`: how often experts may move to even out the load of the devices; 0: never."""
    machines: tuple[str, ...] = ()
    """The machine of each rank, `local` being that of rank 0; empty when all are."""
    rank_restarts: int = 0
    """How often a rank that is lost is started again alone, while the others keep their weights and running sequences
    are computed again; 0: the engine as a whole is lost. On CPU, on one machine."""
    max_waiting: int = 4096
    """Requests beyond this are refused at once instead of queueing without bound."""
    threads: int | None = None
    """CPU threads; all cores when not set."""
    watchdog_s: float = 60.0
    """An engine with work that completes no step for this long is declared stuck and exits."""
    trust_remote_code: tuple[str, ...] = ()
    """Checkpoints whose own modelling code may run: folders, or repositories that they were fetched from."""
    adapters: tuple[AdapterSpec, ...] = ()
    """LoRA adapters that requests may name; more can be loaded while the engine runs."""
    adapter_slots: int | None = None
    """Adapters in device memory at the same time: 20 when `adapters` are listed, otherwise 0, which turns adapters off
    altogether. Set it to allow loading at run time."""
    adapter_host_slots: int = 100
    """Adapters in host memory at the same time."""
    adapter_rank: int | None = None
    """Largest rank of an adapter; device memory is reserved for it. Not set: that of the `adapters` that are folders on
    this machine, and at least 16."""
    adapter_experts: bool | None = None
    """Whether device memory is reserved for adapters of experts, which are large. Not set: whether one of the
    `adapters` that are folders on this machine changes experts. On CPU nothing is reserved, and they are always taken
    unless this is false."""
    adapter_rows: int | None = None
    """Rows of embedding and head that an adapter may replace, each; device memory is reserved for them in every slot.
    Not set: those of the `adapters` that are folders on this machine, and at least 64; on CPU, where nothing is
    reserved, any number."""
    adapter_vectors: bool | None = None
    """Whether device memory is reserved in every slot for what adapters do to single outputs of linears and to norms
    (DoRA, biases, IA3, norms). Not set: whether one of the `adapters` that are folders on this machine does that.
    Without it such adapters lie in what is left free, and their steps are not captured. On CPU nothing is reserved."""
    adapter_memory: int | None = None
    """Bytes of a device that are left free for what adapters have beside their slots: blocks that turn inputs (OFT),
    prefixes, and vectors and norms where nothing is reserved for these. Not set: what the `adapters` that are folders
    on this machine need of it. On CPU it means nothing."""
    adapter_tokens: int | None = None
    """Tokens that an adapter may have behind the model's vocabulary. Not set: those of the `adapters` that are folders
    on this machine, and the virtual ones of the others (`adapters_elsewhere`)."""
    adapters_elsewhere: tuple[tuple[int, int], ...] = ()
    """Of each of the `adapters` that is fetched when it is needed, as far as its configuration is known: how many
    virtual tokens it has, and for how many of them keys and values."""

    role: Role = "both"
    """`prefill`: other engines may take the KV blocks that this one computes. `decode`: it may take theirs."""

    def max_verified(self, max_running: int) -> int:
        """Most decoded tokens in a step that verifies draft tokens; 0 without speculation."""
        if self.speculation == "off":
            return 0
        # Few sequences can have many draft tokens each; beyond that, more than one step's worth of rows never pays.
        return max(max_running, min(max_running * (1 + self.speculation_depth), 64))

    def machine(self, rank: int) -> str:
        """Where a rank runs."""
        return self.machines[rank] if self.machines else LOCAL

    @property
    def disk_folder(self) -> Path:
        """`disk_path` as the user means it: `~` is the home folder."""
        return Path(os.path.expanduser(self.disk_path))

    @property
    def spans_machines(self) -> bool:
        return len(set(self.machines)) > 1

    @property
    def ranks(self) -> int:
        """Devices, and processes, of this engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_device(self) -> int:
        """Most ranks that share a device by the settings."""
        places = list(zip(self.machines or itertools.repeat(""), self.devices, strict=False))
        return max((places.count(place) for place in places), default=1)

"""What a family of models is: one descriptor, from which everything else about it follows.

A descriptor says how the keys of a `config.json` become a `ModelConfig`, what the tensors of a checkpoint are called,
and how a GGUF file of the family differs from that. The defaults are Llama's, so a family is a few lines. Tensor shapes
of random checkpoints, GGUF tensor names, tensor-parallel cuts and quantization all read the descriptor. Nothing here
needs torch: the gateway reads GGUF headers through it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from penstock.engine.loading.keys import KeyRules
from penstock.engine.models.attention_config import (
    BlockIndexConfig,
    CompressionConfig,
    LatentConfig,
    QueryGrowth,
    SparseBlockConfig,
)
from penstock.engine.models.families.config_keys import decoder_rules, with_defaults
from penstock.engine.models.families.tensor_names import LLAMA_NAMES, TensorNames
from penstock.engine.models.model_config import CyclesConfig, LayerPart, NgramConfig, StreamsConfig, TokenInputs
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.recurrence_config import DeltaConfig, MambaConfig, ShortConvConfig
from penstock.engine.models.rope import RopeConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.backends.interface import Activation
    from penstock.engine.models.architecture import Architecture

HFConfig = Mapping[str, Any]
"""The keys of a `config.json`."""
NEXTN_KEY = "nextn_predict_layers"
"""Of GGUF files: how many of their layers are for multi-token prediction, behind the others."""
WINDOW_PATTERN = "attention.sliding_window_pattern"
"""Of GGUF files: which layers have a window."""
AXES = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
"""Keys of GGUF files whose model also takes images: how frequencies are shared out between the axes of positions, which
are all the same for text, and to how many layers something of an image is added."""
MOST_LAYERS = 10_000
"""More than any model has; a damaged file must not fill memory with layers."""
SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new")
"""Names that the reference has for an activation function."""
Windows = tuple[int | None, ...]
"""The sliding window of each layer; None where a layer sees everything."""


class ConfigFields(TypedDict, total=False):
    """Fields of `ModelConfig` that a family may set; the others follow from keys that all families have."""

    activation: Activation
    attention_scale: float
    chunked: bool
    clip_qkv: float | None
    layer_norms: bool
    norm_bias: bool
    own_norms: bool
    interleaved_rope: bool
    learned_frequencies: bool
    parallel: bool
    qk_layer_norm: bool
    unrotated: tuple[bool, ...]
    attention_sinks: bool
    window_sinks: bool
    attention_softcap: float | None
    bounds: tuple[float, ...]
    compression: CompressionConfig
    delta: DeltaConfig
    ffn_sizes: tuple[int, ...]
    key_sources: tuple[int, ...]
    keys_as_values: bool
    layer_heads: tuple[tuple[int, int], ...]
    query_heads: tuple[int, ...]
    normed_values: bool
    value_dim: int
    value_scale: float
    token_inputs: TokenInputs | None
    embedding_scale: float
    virtual_scale: float | None
    ffn_size: int
    head_bias: bool
    head_dim: int
    latent: LatentConfig
    layer_ropes: tuple[RopeConfig, ...]
    out_norm_scale: float
    output_gate: bool
    gates_by_head: bool
    softplus_gates: bool
    normed_outputs: bool
    normed_embedding: bool
    out_norm_eps: float | None
    residual_temperature: float | None
    gated_attention: bool
    local_rope: RopeConfig
    logit_scale: float
    logit_softcap: float | None
    mamba: MambaConfig
    mlp_bias: bool
    mlp_scales: tuple[float, float]
    mtp_like: int | None
    mtp_before_norm: bool
    max_positions: int
    moe: MoeConfig | None
    num_heads: int
    num_kv_heads: int
    num_layers: int
    only: tuple[LayerPart, ...]
    output_bias: bool
    qk_norm: bool
    query_growth: QueryGrowth | None
    plain_qk_norm: bool
    unweighted_qk_norm: bool
    qkv_bias: bool
    rms_eps: float
    rotated_qk_norm: bool
    rope: RopeConfig
    biased_qk_norm: bool
    row_norms: bool
    short_conv: ShortConvConfig
    streams: StreamsConfig
    block_index: BlockIndexConfig
    sparse_blocks: SparseBlockConfig
    ngrams: NgramConfig
    cycles: CyclesConfig
    tied_embeddings: bool
    windows: Windows


def is_array(value: Any) -> bool:
    """Whether a file's metadata has several numbers here. NumPy is not imported for the question: processes that only
    read configurations start without it."""
    return getattr(value, "ndim", 0) > 0


@dataclass(frozen=True, slots=True)
class GGUFKeys:
    """The metadata of a GGUF file, by keys without the architecture that they begin with."""

    architecture: str
    metadata: Mapping[str, Any]

    def __call__(self, name: str, default: Any = None) -> Any:
        """Some writers give one number per layer; it must be the same in all of them."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if not is_array(value):
            return value
        unique = set(value.tolist())
        if len(unique) != 1:
            raise CheckpointError(f"{self.architecture}.{name} differs between layers, which is not supported")
        return unique.pop()

    def number(self, name: str, default: float) -> float:
        """A finite number; its shortest decimal."""
        value = self(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise CheckpointError(f"GGUF key {self.architecture}.{name} must be a number, found {value!r:.80}")
        return short_decimal(value)

    def whole(self, name: str, default: int) -> int:
        """An integer, not negative."""
        value = self(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"GGUF key {self.architecture}.{name} must be an integer from 0 to {(1 << 31) - 1}, found {value!r:.80}"
            )
        return value

    def each(self, name: str, layers: int) -> tuple[int, ...]:
        """Integers, one for each layer, where the file has so many or one for all."""
        value = self.metadata.get(f"{self.architecture}.{name}", 0)
        if not is_array(value):
            return (self.whole(name, 0),) * layers
        numbers = tuple(value.tolist())
        wrong = any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 31 for one in numbers)
        if len(numbers) != layers or wrong:
            raise CheckpointError(
                f"GGUF key {self.architecture}.{name} must have an integer for each of {layers} layers"
            )
        return numbers

    def flags(self, name: str, layers: int) -> tuple[bool, ...] | None:
        """True or false for each layer; None where the file has no such key."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        if value is None:
            return None
        if not is_array(value) or len(value) != layers or {*value.tolist()} - {False, True}:
            raise CheckpointError(
                f"GGUF key {self.architecture}.{name} must say true or false for each of {layers} layers"
            )
        return tuple(bool(one) for one in value.tolist())


def drafting_layers(keys: GGUFKeys, config: HFConfig) -> dict[str, int]:
    """How many layers a model has, and how many for multi-token prediction, which files count with the others."""
    layers, further = config["num_hidden_layers"], keys.whole(NEXTN_KEY, 0)
    if further >= layers:
        raise CheckpointError(f"{NEXTN_KEY} is {further} of {layers} layers; the file is damaged")
    return {"num_hidden_layers": layers - further, "num_nextn_predict_layers": further}


def local_layers(keys: GGUFKeys, config: HFConfig) -> tuple[bool, ...]:
    """Whether each layer of a file has a window, where a file must say so."""
    local = keys.flags(WINDOW_PATTERN, config["num_hidden_layers"])
    if not config["sliding_window"] or local is None:
        missing = WINDOW_PATTERN if config["sliding_window"] else "attention.sliding_window"
        raise CheckpointError(f"{keys.architecture}.{missing} is missing or 0; the file is damaged")
    return local


def short_decimal(value: float) -> float:
    """The decimal that was rounded to float32 when a GGUF file was written (1e-5, not 9.9999997e-06)."""
    return float(f"{value:.7g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """How GGUF files of a family differ from its safetensors checkpoints."""

    architectures: tuple[str, ...]
    """Values of `general.architecture`."""
    applies: Callable[[GGUFKeys], bool] | None = None
    """For families that share an architecture: whether a file is of this one. None: it is where no other applies."""
    interleaved_rope: bool = False
    """Whether the rows of query and key matrices are in interleaved rotary order."""
    own_head_sizes: bool = False
    """Whether `config` reads what heads are made of; `head_dim` is then the size of their rotated part."""
    whole_head_rotated: bool = True
    """Whether `rope.dimension_count` is the size of a head, for files that leave that out."""
    config: Callable[[GGUFKeys, HFConfig], Mapping[str, Any]] | None = None
    """Further `config.json` keys, given those that all families have."""
    reads: frozenset[str] = frozenset()
    """The keys that `config` reads, and that other families may have only at values that say nothing."""
    epsilon: str = "attention.layer_norm_rms_epsilon"
    """The key of the epsilon of all norms."""
    other_epsilon: str = ""
    """The key that files may have instead."""
    delta_nets: Literal["", "grouped", "tiled", "by_channel"] = ""
    """Order of the value heads of gated delta nets, where a family has them: those of a key head together, or in tiled
    order; or delta nets with a decay for every channel. See `loading.gguf_delta`."""
    mamba: bool = False
    """Whether there are Mamba-2 layers; see `loading.gguf_mamba`. Numbers of KV heads and widths of feed-forwards may
    then differ between layers, and are 0 in those that have none."""
    short_conv: bool = False
    """Whether there are short convolutions. Numbers of KV heads may then differ between layers, as with `mamba`."""
    attention: bool = True
    """Whether there is attention, and a feed-forward beside it."""
    layer_sizes: bool = False
    """Whether numbers of KV heads and widths of feed-forwards may differ between layers without either of them."""
    window_heads: bool = False
    """Whether layers with a window have heads of their own size, which `config` reads (`attention.key_length_swa`)."""
    query_heads: bool = False
    """Whether numbers of query heads may differ between layers."""
    value_heads: bool = False
    """Whether heads of values have a size of their own, which `config` reads (`attention.value_length`)."""
    fused_rows: Callable[[HFConfig, int], tuple[int, ...]] | None = None
    """For files that may have queries, keys and values of a layer in one matrix, where checkpoints have three: how many
    rows each of them has."""
    window_rotated: bool = False
    """Whether layers with a window rotate a share of each head of their own, which `config` reads
    (`rope.dimension_count_swa`)."""
    window_rope: bool = False
    """Whether layers with a window have a rotary base of their own, which `config` reads (`rope.freq_base_swa`)."""
    final_norm: str = "output_norm"
    """The name of the norm behind the last layer."""
    windowed: bool = True
    """Whether `attention.sliding_window` is honoured; where not, a file must not have one within its context."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Further layer tensors, by their names below `blk.N.` and `layers.N.`: those that `TensorNames` does not have. A
    name with a suffix (`.weight`) stands for that tensor alone, and gives its whole name."""
    top: Mapping[str, str] = field(default_factory=dict)
    """Further tensors that belong to no layer: GGUF names to those below `TensorNames.prefix`."""
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Whole keys of a file (without its architecture) with a number for each layer, which are tensors of checkpoints:
    their names below `layers.N.`, and shapes."""
    unread: Callable[[HFConfig, int], Collection[str]] | None = None
    """Tensors of a layer, without suffix, that files carry and that neither llama.cpp nor the model reads."""


def llama_fields(raw: HFConfig) -> ConfigFields:
    """Optional biases."""
    bias = flag(raw, "attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": flag(raw, "mlp_bias")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The descriptor."""

    model_type: str
    """In `config.json`."""
    class_name: str
    """Of the reference implementation, for the key `architectures`."""
    fields: Callable[[HFConfig], ConfigFields] = llama_fields
    """What a `config.json` says beyond the keys that all families have. It is given those that the reference would see,
    with the reference's defaults for those left out."""
    translate: Callable[[HFConfig], dict[str, Any]] = dict
    """From its keys, with the defaults, to those of other families, where files say the same in another way."""
    reads: frozenset[str] = frozenset({"attention_bias", "mlp_bias"})
    """The keys that `fields` uses beyond those of all families (`config_keys.READ`)."""
    limits: Mapping[str, Collection[Any]] = field(default_factory=lambda: {"hidden_act": SILU})
    """Keys of which only some values can be honoured."""
    hidden_act: str = "silu"
    norm_offset: float = 0.0
    """Added to norm weights when they are read: Gemma stores them minus one (GGUF files do not)."""
    final_norm_offset: float | None = None
    """The same of the norm behind the last layer; None: as of all others."""
    names: TensorNames = LLAMA_NAMES
    gguf: GGUFFormat
    reference: str = ""
    """The `model_type` whose class the reference reads such files with, where it is another."""
    own_name: Callable[[str], str] | None = None
    """What a tensor is called here, for checkpoints that name it otherwise than `names`."""
    architecture: Callable[[], Architecture] | None = None
    """Layers and forward pass, imported when a model is built; None: those of `models.llama`."""
    drafting: Callable[[], Architecture] | None = None
    """The same of a layer for multi-token prediction with a single residual stream, where the decoder has several."""

    @property
    def activation(self) -> Activation:
        return "gelu_tanh" if self.hidden_act.startswith("gelu") else "silu"

    @property
    def rules(self) -> KeyRules:
        return decoder_rules(self.model_type, self.reads, self.limits, self.reference or self.model_type)

    def checked(self, raw: HFConfig) -> dict[str, Any]:
        """The keys to read, with defaults; CheckpointError for one whose value cannot be honoured."""
        self.rules.check(raw)
        return self.translate(with_defaults(self.reference or self.model_type, raw, self.reads))


def integer(raw: HFConfig, key: str, default: int | None = None) -> int:
    """A positive integer of the configuration."""
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise CheckpointError(f"config key {key!r} must be a positive integer below 2**31, found {value!r:.80}")
    return value


def count(raw: HFConfig, key: str) -> int:
    """An integer of the configuration, not negative."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise CheckpointError(f"config key {key!r} must be an integer, not negative, found {value!r:.80}")
    return value


def number(raw: HFConfig, key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config key {key!r} must be a number, found {value!r:.80}")
    return float(value)


def flag(raw: HFConfig, key: str) -> bool:
    """False where the reference does not have the key."""
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config key {key!r} must be true or false, found {value!r:.80}")
    return value


def mapping(raw: HFConfig, key: str) -> HFConfig:
    """Keys one level down; none where there is nothing."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config key {key!r} must be an object, found {value!r:.80}")
    return value


def layer_count(raw: HFConfig) -> int:
    layers = integer(raw, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config key 'num_hidden_layers' is {layers}; at most {MOST_LAYERS} are supported")
    return layers


def window_of(raw: HFConfig) -> int | None:
    """`sliding_window`: a number of tokens, or none. The reference cannot cache a window of one."""
    if raw.get("sliding_window") is None:
        return None
    window = integer(raw, "sliding_window")
    if window == 1:
        raise CheckpointError("sliding_window is 1; a window of one token is not supported")
    return window


def windows_by_type(raw: HFConfig, window: int | None, local: str = "sliding_attention") -> Windows | None:
    """From `layer_types`, where it is given."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple):
        raise CheckpointError(f"layer_types must be a list, found {kinds!r:.80}")
    known: dict[str, int | None] = {"full_attention": None, "attention": None, local: window}
    unknown = {str(kind) for kind in kinds} - known.keys()
    if unknown or len(kinds) != layer_count(raw):
        raise CheckpointError(
            f"layer_types must name one of {', '.join(known)} for each of {layer_count(raw)} layers, "
            f"found {kinds!r:.80}"
        )
    if window is None and local in kinds:
        raise CheckpointError(f"layer_types has {local}, but there is no {local.removesuffix('_attention')} window")
    return tuple(known[kind] for kind in kinds)


def alternating_windows(raw: HFConfig, period: int) -> Windows:
    """From `layer_types`, or: every n-th layer sees everything, the others `sliding_window`."""
    window = window_of(raw)
    spaced = tuple(None if (index + 1) % period == 0 else window for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or spaced

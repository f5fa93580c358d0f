"""The leaf of the backend boundary: `Ops`, the operations of a decoder, and what host and device exchange.

There are three backends: `reference` (plain PyTorch, the definition the others are tested against), `cpu` (a native
library) and `cuda` (Triton kernels, CUDA graphs). `select` picks one. The rest of the engine never imports a backend
and never asks which one it runs on; it uses this module, the interface `Backend` (`backend`), and `select`.

Layout, the same everywhere:

* Tokens of all sequences in a step are packed along one axis of length T, sequence after sequence.
* Sequences with a single new token (decodes) come first: rows `0..num_decodes` of the batch.
* The KV cache of a layer is `k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim]`.
* Cached numbers may be scaled: `KVScales` says how.
* The slot of a token is `block * block_size + offset`; block 0 is reserved: padding is written there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.backends.activation import Activation as Activation
from penstock.engine.backends.activation import ClampedSwiglu as ClampedSwiglu

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
OverRanks = Callable[[Tensor], Tensor]
"""The mean over all ranks, of which each calls it with a tensor of the same shape."""
KVScales = tuple[Tensor, Tensor]
"""What cached keys and cached values are multiplied by when read. FP8 cache: float32 [kv_heads] each. Int8 cache:
`SCALE_DTYPE` [num_blocks, kv_heads, block_size] each, written with the tokens: their largest magnitude / 127."""
FP8 = torch.float8_e4m3fn
INT8 = torch.int8
SCALE_DTYPE = torch.bfloat16
"""Any magnitude in two bytes. Its eight bits cost nothing: numbers are divided by the scale as it was rounded."""
INT8_MAX = 127.0
FP8_MAX = 448.0


class KeySmoothing(NamedTuple):
    """How a layer's keys are smoothed before quantization: the cache holds (key - centre) / scale, and queries are
    multiplied by `scale`.

    All scores of a query change by the same constant, which softmax cancels, and quantization loses less: some channels
    of the keys are nearly constant over tokens, some are far larger than the others. Float32 [kv_heads, head_dim] each.
    With `softcap` or sinks the scores themselves matter, so there the centre must be zero.
    """

    centre: Tensor
    scale: Tensor


@dataclass(slots=True)
class HostBatch:
    """A step's inputs before they went to the device: int64 arrays, for a recorded step, and for ranks that run the
    same step elsewhere."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints
    context_lens: Ints
    rows: Ints
    tables: npt.NDArray[np.int32]
    """All block tables."""
    block_size: int
    states: Ints | None = None
    """[4, T]: the fields of `StateBatch`; None where no layer keeps states."""


class StepShare(Protocol):
    """A shard's part of a step; see `parallel.data`."""

    def take(self, token_ids: Tensor) -> Tensor:
        """Its tokens, of all of the step."""
        ...

    def collect(self, hidden: Tensor, shards: Any) -> Tensor:
        """On the first shard: the hidden states of all tokens of the step, in its order. All shards call it."""
        ...


class Followers(Protocol):
    """The other ranks of an engine: they capture the steps that rank 0 captures and replay them when it does.

    `kind` and `shape` say which step it is; all ranks understand them alike (see the backend that captures).
    """

    def capture(self, kind: int, shape: Sequence[int]) -> None:
        """Have them capture a step now. This rank does the same next: its collectives wait for theirs."""
        ...

    def replay(self, kind: int, shape: Sequence[int], inputs: npt.NDArray[np.uint8], host: HostBatch) -> None:
        """Have them run a captured step. `inputs`: its packed inputs; of `host` the block tables, contexts and rows."""
        ...


@dataclass(slots=True)
class StateBatch:
    """Which states the recurrent layers of a step read and write: int32 [T] each.

    A run is what a step computes of one sequence: a decoded token, with draft tokens behind it, or a chunk of a prompt.
    States lie in slots. Slot 0 stands for none: a run that reads it starts empty, a token that writes it keeps nothing.
    A slot that one run writes is read by no other run of the step.
    """

    first: Tensor
    """Packed index of the first token of each token's run. Padding belongs to the first run and writes nothing."""
    last: Tensor
    """Packed index of the last one."""
    reads: Tensor
    """The slot that holds the state before each token's run."""
    writes: Tensor
    """The slot that keeps the state behind each token."""

    @classmethod
    def of_one(cls, tokens: int, device: torch.device) -> StateBatch:
        """One run from an empty state; its last state goes to slot 1."""
        nowhere = torch.zeros(tokens, dtype=torch.int32, device=device)
        last, writes = torch.full_like(nowhere, tokens - 1), nowhere.clone()
        writes[-1] = 1
        return cls(nowhere, last, nowhere, writes)


@dataclass(slots=True)
class AttentionBatch:
    """Where each packed token stands and which cache blocks its sequence owns. Tensors are on the device."""

    positions: Tensor
    """int64 [T]: position of each token in its sequence."""
    slots: Tensor
    """int64 [T]: cache slot that receives each token's key and value."""
    query_starts: Tensor
    """int32 [S + 1]: packed index of each sequence's first new token."""
    context_lens: Tensor
    """int32 [S]: keys visible to each sequence's last new token, itself included."""
    rows: Tensor
    """int32 [S]: each sequence's row in `block_tables`."""
    block_tables: Tensor
    """int32 [max_rows, max_blocks]: the cache blocks of every row."""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one new token."""
    max_query: int
    """Upper bound of new tokens in one sequence (host value, so that kernels can be launched without a sync)."""
    max_context: int
    """Upper bound of `context_lens` (host value)."""
    host: HostBatch | None = None
    """Only in an engine of several ranks."""
    states: StateBatch | None = None
    """Only for models with recurrent layers."""
    share: StepShare | None = None
    """Where these are the tokens of one shard only, and others have other tokens of the step."""

    @classmethod
    def of_one(cls, tokens: int, block_size: int, device: torch.device) -> AttentionBatch:
        """One sequence from its start, in the blocks from 1 on."""
        positions = torch.arange(tokens, device=device)
        return cls(
            positions=positions,
            slots=positions + block_size,
            query_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            rows=torch.zeros(1, dtype=torch.int32, device=device),
            block_tables=torch.arange(1, -(-tokens // block_size) + 1, dtype=torch.int32, device=device).unsqueeze(0),
            num_decodes=0,
            max_query=tokens,
            max_context=tokens,
            states=StateBatch.of_one(tokens, device),
        )


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a fused query-key-value row splits into heads, and what is done to each head."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` before it. None: everything before it."""
    chunked: bool = False
    """Positions are cut into chunks of `window` instead: a token sees those of its chunk up to itself."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the softmax. None: they stay."""
    interleaved: bool = False
    """Rotation pairs dimension 2i with 2i + 1, instead of i with i + rotary / 2."""
    centred_norms: bool = False
    """The norms of queries and keys are LayerNorms with weights of their own for every head: [heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """How the projections of a gated delta net split into heads. A key head serves `v_heads / k_heads` value heads."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    """Width of the causal convolution over queries, keys and values."""
    grouped: bool
    """Whether a row of projections is ordered by key head, each with its query, key, values and output gates, and the
    row of gates likewise with the update rates and decays of its value heads; else all queries come first, then all
    keys, values and output gates."""

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def width(self) -> int:
        """Of a row of projections: those, and the output gates."""
        return self.channels + self.v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a gated delta net has beside its projections, all float32."""

    conv: Tensor
    """[channels, conv]: the last column belongs to the token itself."""
    decay: Tensor
    """[v_heads]: -exp(A)."""
    decay_bias: Tensor
    """[v_heads]."""
    norm: Tensor
    """[v_dim]."""
    eps: float


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """How queries split into heads where all heads share one latent key per token (MLA).

    A query head is `plain` dimensions and `rotary` rotated ones. What is cached of a token is its latent, of which
    every head's plain key and value are linear functions, and one rotated key for all heads.
    """

    heads: int
    latent: int
    plain: int
    rotary: int
    value: int
    scale: float
    interleaved: bool
    """Whether rotation pairs neighbouring dimensions; else dimension i with i + rotary / 2. What is rotated lies in
    halves in either case."""

    @property
    def query(self) -> int:
        """Dimensions of a query head."""
        return self.plain + self.rotary

    @property
    def cached(self) -> int:
        """Numbers that are cached of a token."""
        return self.latent + self.rotary


class LatentWeights(NamedTuple):
    """What stands between a token's projections and its attention."""

    norm: Tensor
    """Of latents: [latent]."""
    eps: float
    up: Tensor
    """[heads, plain + value, latent]: the rows that make a latent into a head's plain key, then into its value."""


class ActivationOps(Protocol):
    """What stands between the linears of a layer. The results go into linears only, so a backend may hand over
    activations in another form (FP8 with scales) that its linears understand; hence `Any`."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Any:
        """Normalize the last axis of `x` [T, hidden] in float32 and scale by `weight`; a new tensor, of `dtype` (None:
        that of `x`) where it is a plain one. Without `weight`, `x` as it is (layers without a norm before them)."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Any:
        """`residual += x` in place, then `rms_norm(residual, weight)` in the dtype of `x`; a new tensor (may reuse
        `x`).

        With `x_weight`, what is added is `rms_norm(x, x_weight)`.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Any:
        """[T, 2 * ffn] to [T, ffn]: silu of the first half times the second half."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Any:
        """As `silu_mul`, with gelu in its tanh form."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Any:
        """As `silu_mul`, with the gate `ClampedSwiglu`."""
        ...


class Ops(ActivationOps, Protocol):
    """Device operations of a decoder. All may write into their inputs where the text says so."""

    wide_stream: bool
    """Whether the residual stream is kept in float32 whatever the activations are: it is added to twice a layer, and
    every addition in 16 bits would round away a part of what the layers before it said."""
    samples_any_dtype: bool
    """Whether `argmax`, `filter_thresholds` and `gumbel_argmax` also read 16-bit logits, not only float32."""
    batch_invariant: bool
    """Whether a sequence's results may not depend on what else is in the step; set for deterministic mode."""

    def widen(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] in float32; a new tensor."""
        ...

    def store_rows(self, x: Tensor, table: Tensor, at: Tensor | None = None) -> None:
        """Write the rows of `x` [T, n] to rows `at` (int64 [T]) of `table` [rows, n], or to its first; in its dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Tensor: ...

    def centre(self, residual: Tensor, *added: Tensor) -> None:
        """Add one or two tensors, or nothing, to the residual stream, and subtract the mean of every row, in place. An
        RMS norm behind it is a LayerNorm."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor: ...

    def norm_rows(
        self, qkv: Tensor, layout: HeadLayout, q_norm: Tensor, k_norm: Tensor, eps: float, over_ranks: OverRanks | None
    ) -> Tensor:
        """The queries of each token RMS-normalized together, and its keys, in place; `qkv` as in `rope_and_cache`.

        `q_norm` is [heads * head_dim], `k_norm` [kv_heads * head_dim]. `over_ranks`: where other ranks have the other
        heads; takes mean squares float32 [T, 2] of this rank's queries and keys to those of all.
        """
        ...

    def rope_and_cache(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: KVScales | None = None,
        key_smoothing: KeySmoothing | None = None,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, return the queries [T, heads, head_dim].

        `qkv` is [T, (heads + 2 * kv_heads) * head_dim] and may be overwritten. `cos_sin` is float32
        [max_positions, rotary]: cosines in the first half of a row, sines in the second; rotation pairs
        dimension i with i + rotary / 2, and leaves those from `rotary` on as they are. With `q_norm`/`k_norm`
        each head is RMS-normalized first. `layout` may ask for other pairs and for LayerNorms. An FP8 cache stores
        keys and values divided by `kv_scales` and clamped to its range; an int8 cache stores them rounded, and
        writes `kv_scales`. `key_smoothing` is applied after the rotation, before keys are stored and queries returned.
        """
        ...

    def attention(
        self,
        q: Tensor,
        layout: HeadLayout,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: KVScales | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the new tokens over their sequences' cached keys: [T, heads * head_dim].

        `sinks`, float32 [heads]: a score of each head that takes part in its softmax and stands for no key.
        """
        ...

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor,
        layout: LatentLayout,
        weights: LatentWeights,
        cos_sin: Tensor,
        batch: AttentionBatch,
        cache: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over cached latents: [T, heads * value].

        `q` is [T, heads * (plain + rotary)], `kv` [T, latent + rotary]; their rows may lie apart. Latents are
        normalized, queries and keys rotated by `cos_sin` (see `rope_and_cache`), the new tokens stored in `cache`
        [num_blocks, block_size, latent + rotary]. `scales`: of an FP8 cache float32 [1], of an int8 cache
        `SCALE_DTYPE` [num_blocks, block_size], written with the tokens.
        """
        ...

    def split_gate(self, qkv: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
        """Of gated attention: rows of query and gate of each head in turn, then keys and values, as rows without the
        gates, as `rope_and_cache` takes them, and the gates [T, heads * head_dim]."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x` times sigmoid of `gate`; may overwrite `x`."""
        ...

    def delta_net(
        self,
        projected: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        weights: DeltaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        """A gated delta net between its projections: [T, v_heads * v_dim].

        `projected` is [T, layout.width], `gates` [T, 2 * v_heads]: an update rate b and a decay a for each value head.
        Queries, keys and values pass a causal convolution and silu. Queries and keys are scaled to length one, queries
        then by 1 / sqrt(k_dim). The state S [k_dim, v_dim] of a value head becomes

            S = exp(g) S,  S = S + k (sigmoid(b) (v - S^T k))^T    with g = decay * softplus(a + decay_bias)

        and gives S^T q, which is RMS-normalized, scaled by `norm` and multiplied by silu of the output gate.

        `batch.states` says where states lie: `state_cache` float32 [slots, v_heads, k_dim, v_dim] and `conv_cache`
        [slots, conv, channels], the inputs of the convolution at the last positions, a token's at position % conv.
        """
        ...

    def mask_logits(self, logits: Tensor, at: Tensor, bits: Tensor) -> None:
        """In row `at[i]` of `logits`, set to -inf every token whose bit in `bits[i]` is 0.

        `at` is int64 [n], `bits` int32 [n, ceil(vocab / 32)]: bit t % 32 of word t // 32 stands for token t.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [rows]: index of the largest entry of each row of float32 [rows, vocab]; the first of equals."""
        ...

    def filter_thresholds(
        self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        """float32 [rows]: the smallest logit / temperature that top-k, top-p and min-p all keep; -inf where none
        filters or the temperature is 0.

        `top_k` is int64 (0: no limit), `top_p` and `min_p` float32, all [rows]. Top-p is taken over what top-k leaves.
        """
        ...

    def gumbel_argmax(
        self, logits: Tensor, temperatures: Tensor, keys: Tensor, thresholds: Tensor | None = None
    ) -> Tensor:
        """int64 [rows]: a draw from softmax(logits / temperature); temperature 0 means argmax.

        The noise of an entry is a function of the row's key (int64 [rows]) and its index alone; `reference.noise`
        defines it. `temperatures` is float32 [rows]; what lies below `thresholds` cannot be drawn.
        """
        ...


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name` in configurations."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


class Staging(Protocol):
    """Brings small host arrays to the device without waiting."""

    def upload(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Device tensors with the content and dtype of `arrays` (1-D, C-contiguous)."""
        ...


class CopyEvent(Protocol):
    """The end of a copy, or another point in what a device was given to do."""

    def synchronize(self) -> object:
        """Block until the device has come to it."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later point; the device has come to both."""
        ...


class DeviceAccess(Protocol):
    """The part of a backend that moves data between host and device."""

    device: torch.device
    in_host_memory: bool
    """Whether the device computes in host memory: arrays and tensors may be the same memory."""
    bounds_are_compiled: bool
    """Whether kernels are compiled for a bound of the context length, so that all steps must use the same one."""

    @abstractmethod
    def staging(self) -> Staging:
        """Upload buffers for one place that uploads a few times per step."""
        ...

    @abstractmethod
    def mark(self) -> CopyEvent | None:
        """The point that follows what was launched so far; None where everything launched is done."""
        ...

    @abstractmethod
    def to_host(self, *tensors: Tensor) -> tuple[list[Tensor], CopyEvent | None]:
        """Queue copies to the host behind what was launched, and the event that ends them; None: they are there."""
        ...


class DeviceMemory(Protocol):
    """The memory of one device."""

    share_of_free: float
    """Of what is free: how much a KV cache takes when no size is configured."""
    share_of_rest: float
    """The same of what this model's configured share of the device has left."""
    shared_by_ranks: bool
    """Whether all ranks of an engine take their memory from this device."""

    def available(self) -> int:
        """Bytes that can still be taken."""
        ...

    def total(self) -> int:
        """Bytes of the whole device."""
        ...

    def used(self) -> int:
        """Bytes that this process has taken."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that `run` needs on top of what is there; 0 where the device is not measured."""
        ...

    def trim(self, *, workspaces: bool = False) -> None:
        """Give memory that is cached but unused back to the device; with `workspaces` also what libraries keep, to
        which nothing captured may refer any more."""
        ...


class TimedStep(Protocol):
    """A recorded step that can time its kernels."""

    timed: bool

    def seconds(self) -> dict[str, tuple[int, float]]:
        """Calls in one pass, and seconds spent since this was last asked, by kernel."""
        ...


class NativeLibrary(Protocol):
    """A native library whose calls can be intercepted, for profiling."""

    lib: Any

    def replaced_by(self, other: Any) -> AbstractContextManager[None]:
        """Inside, calls go to `other`."""
        ...


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """Sizes of an engine whose configuration does not say."""

    max_running: int
    token_budget: int
    encoder_token_budget: int
    gap_s: float | None = None
    """The gap between tokens that running streams keep while few prompts wait; None: no bound."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps an engine takes."""

    max_rows: int
    budget: int
    max_context: int
    block_size: int

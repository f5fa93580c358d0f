"""What goes into the engine and what comes out: token ids, sampling parameters, step outputs, load.

Plain dataclasses of plain values, so that they cross a process boundary unchanged (`penstock.protocol` encodes
them) and can be imported without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.adapters.spec import AdapterLoad
from penstock.engine.config import Role

FinishReason = Literal["stop", "complete", "length", "abort", "timeout", "error"]
"""`stop`: a stop token was sampled (it is the last token delivered). `complete`: the grammar
allows nothing more (the last token delivered belongs to the text). `length`: `max_tokens` or the context
window is full. `abort`: the caller cancelled. `timeout`: the deadline passed. `error`: see `Delta.error`."""


EngineState = Literal["awake", "drowsy", "sleeping", "waking"]
"""`drowsy`: takes nothing new, finishes what it runs, then sleeps. Asleep it holds neither weights nor cache."""

QUEUE_FULL = "the engine's queue is full"
"""How `Delta.error` begins when a request was refused only because too many wait: worth trying again."""

WAITED = f"{QUEUE_FULL} for longer than this request may wait"
"""How `Delta.error` begins when `Request.patience_s` was over before the request was begun. Gateways that do not know
it see that too many wait."""

PROMPT_TOO_SLOW = f"{WAITED}, as its prompt alone takes"
"""How `Delta.error` begins when the prompt of a request with a `patience_s` takes longer than what is left of it. The
estimate follows."""

TOKENS_UNKNOWN = "the request has unknown tokens"
"""How `Delta.error` begins when a prompt or a parameter has a token that the model, or its adapter, does not have."""
TOO_LONG = "prompt is too long"
"""How `Delta.error` begins when a prompt does not fit into the context window. Agents look for these words."""
GRAMMAR_REFUSED = "the grammar cannot be used"
"""How `Delta.error` begins when the request's own grammar is the cause."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The thought that an answer begins with: how it is recognised, and how it is closed when it takes too long.

    A grammar begins behind it. See `grammar.thought`.
    """

    end: tuple[tuple[int, ...], ...]
    """Sequences of tokens, each of which ends it."""
    begin: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, each of which begins it; none: the prompt has begun it. An answer that begins with none of
    them has no thought."""
    opening: tuple[int, ...] = ()
    """Tokens that every answer begins with; the thought follows them."""
    after: tuple[int, ...] = ()
    """Tokens that every end is followed by."""
    close: tuple[int, ...] = ()
    """Tokens that end it when `budget` is used up."""
    budget: int | None = None
    """Tokens that it may have; None: any number."""
    within: bool = False
    """The grammar describes the thought too: it begins with it, not behind it."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that it names."""
        sequences = (*self.end, *self.begin, self.opening, self.after, self.close)
        return tuple(token for sequence in sequences for token in sequence)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one request. Ranges are checked by the gateway; the engine trusts them."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    """Always set by the caller. The same seed gives the same noise whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends generation, end-of-text ids included (leave those out to ignore them)."""
    logprobs: int | None = None
    """None: none. 0: of the chosen token. k: also the k most likely tokens."""
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be generated; empty: any. End-of-text ids are tokens like others."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be generated."""
    grammar: str = ""
    """What may be generated, in the language of the engine's grammar compiler; empty for anything."""
    thought: Thought | None = None
    """The thought before the answer, where it has a budget or a grammar follows it; None: it needs no attention."""
    watermark: bytes = field(default=b"", repr=False)
    """The key of the watermark; empty: none. It has no effect at temperature 0."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def ruled(self) -> bool:
        """Whether single tokens are allowed or forbidden."""
        return bool(self.allowed_token_ids or self.bad_words)

    @property
    def penalized(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Handover:
    """An engine that can compute a prompt for another, and when to use it."""

    endpoint: str
    public_key: str = ""
    """Of that engine, when its endpoint is encrypted."""
    least_tokens: int = 512
    """Fewer tokens than this are computed where they are needed."""
    wait_s: float = 10.0
    """If it completes no step for so long, the rest is computed where it is needed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` choices are `n` requests; the prefix cache shares their prompt."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Smaller goes first; the largest is preempted first."""
    timeout_s: float | None = None
    """Time allowed from arrival in the engine to the last token."""
    target_gap_s: float | None = None
    """The gap between its tokens that prompts of others may not exceed, as far as the engine can tell; None: the
    engine's own target."""
    owner: str = ""
    """Whose request it is, usually a tenant: owners take turns where requests wait for their grammars."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    speculation: bool = True
    """False: no draft tokens for this request, even where the engine speculates. The text is the same."""
    adapter: str = ""
    """Name of the adapter to run with; empty for the base model."""
    produced: list[int] = field(default_factory=list)
    """Tokens that another engine has generated for this request already. Generation goes on behind them: limits,
    penalties and the grammar count them as output, and they are not delivered again."""
    pools: tuple[str, ...] = ()
    """Pools of engines that may run it, the best first; empty: any. For routers, like `regions`; engines ignore it."""
    regions: tuple[str, ...] = ()
    """Regions in which it may run; empty: any."""
    affinity: str = ""
    """Requests with the same value should run on the same engine; for routers, engines ignore it."""
    patient: bool = True
    """False: without a token yet, it does not wait for an engine that is away, because another can answer; for routers
    too."""
    patience_s: float | None = None
    """Seconds that it may wait before it is begun: in the queue of an engine, which then refuses it unless it can begin
    at once and says when it begins (`Engine.on_begun`), and for an engine that is away or stuck, which is for routers.
    An engine also refuses it when the measured steps say that the first token cannot come within them. None: as long
    as others."""
    resumable_by: str = ""
    """Who may come back for its tokens, which are kept for a while; empty: nobody. For the host process."""
    handover: Handover | None = None
    """The engine that computes the prompt, if not this one; for the host process, which then fetches the blocks."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the most likely alternatives at its position."""

    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    rank: int = 0
    """How many tokens are as likely or likelier, itself included; of prompt tokens only, else 0."""


@dataclass(slots=True)
class Delta:
    """What one step added to one request. The last one carries `finish_reason`."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set when `finish_reason` is `error`: what went wrong, for the caller."""
    logprobs: list[TokenLogprob] | None = None
    """One per token, when asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On the first delta, when asked for: one per prompt token; None for the first."""
    cached_tokens: int | None = None
    """On the first delta: how many prompt tokens came from the prefix cache."""
    queue_s: float | None = None
    """On the first delta: time from arrival to first being scheduled."""
    prefill_s: float | None = None
    """On the first delta: time from first being scheduled to the first token."""
    decode_s: float | None = None
    """On the last delta: time from the first token to the last."""

    def extend(self, newer: Delta) -> None:
        """Append what came later. Only the first delta of a request carries the prompt's fields."""
        self.tokens.extend(newer.tokens)
        if newer.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = newer.logprobs
            else:
                self.logprobs.extend(newer.logprobs)
        if newer.finish_reason is not None:
            self.finish_reason = newer.finish_reason
            self.decode_s = newer.decode_s
            self.error = newer.error


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """One GPU of an engine, as its driver sees it: what other programs use of it counts too."""

    index: int
    """Which of the engine's GPUs, from 0."""
    memory_used: int
    memory_total: int
    busy: float
    """Share of the last moments in which something ran on it, 0 to 1."""


@dataclass(slots=True)
class HandoverLoad:
    """KV blocks sent to and received from other engines, by an engine whose role is not `both`."""

    waiting: int = 0
    """Requests whose blocks are on their way here; they count as waiting in the engine too."""
    handovers: int = 0
    """Prompts that another engine computed for this one, and those that it failed to compute."""
    fallbacks: int = 0
    seconds: float = 0.0
    """From asking to the last block, over all handovers."""
    blocks_in: int = 0
    bytes_in: int = 0
    blocks_out: int = 0
    bytes_out: int = 0


@dataclass(slots=True)
class EngineLoad:
    """A snapshot of the engine, sent with every step. Counters only grow while the engine lives."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    """Blocks held by running sequences."""
    cached_blocks: int = 0
    """Free blocks that still hold a reusable prefix."""
    total_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    host_blocks: int = 0
    """Blocks in host memory, and how many fit."""
    total_host_blocks: int = 0
    offloaded_blocks: int = 0
    """Blocks copied to the host, and back."""
    restored_blocks: int = 0
    host_hit_tokens: int = 0
    """Prompt tokens that came back from the host; they count in `prefix_hit_tokens` too."""
    disk_blocks: int = 0
    """Blocks on disk, and how many fit."""
    total_disk_blocks: int = 0
    disk_written_blocks: int = 0
    """Blocks copied from the host to disk, and back."""
    disk_read_blocks: int = 0
    drafts: int = 0
    """Times that draft tokens of a sequence were verified (speculation)."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    adapters: AdapterLoad | None = None
    """None when the engine has no adapter slots."""
    devices: list[DeviceLoad] | None = None
    """None on CPU."""
    handover: HandoverLoad | None = None
    """None when the engine's role is `both`."""
    step_tokens: int = 0
    """Tokens computed by all steps together: of prompts, decodes and drafts."""
    expert_imbalance: float = 0.0
    """Of experts over ranks: what the most loaded device carries over the mean of all, in the worst layer; 0: none."""
    moved_experts: int = 0
    """Experts that came to another device because of that."""
    disk_states: int = 0
    """States of recurrent layers on disk, and how many fit."""
    total_disk_states: int = 0
    disk_written_states: int = 0
    """States copied from the host to disk, and back."""
    disk_read_states: int = 0
    disk_failures: int = 0
    """Blocks and states that could not be written to disk or read from it."""
    disk_hit_tokens: int = 0
    """Prompt tokens that were read from disk; they count in `host_hit_tokens` too."""
    disk_restored_blocks: int = 0
    """Blocks and states on disk that were found there when the engine started."""
    disk_restored_states: int = 0
    restoring: int = 0
    """Requests that wait for blocks from host memory or from disk."""
    host_restores: int = 0
    """Times that a request has waited for blocks from host memory, while others ran, and seconds of that."""
    host_restore_s: float = 0.0
    disk_restores: int = 0
    """The same for blocks from disk."""
    disk_restore_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of a step with the running sequences and no prompts, as measured; 0: none was."""


@dataclass(slots=True)
class StepOutput:
    """Everything one engine step produced."""

    deltas: list[Delta]
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's description of itself once it is ready."""

    model: str
    instance: str
    """Differs after every restart, so that a client can tell that its requests are gone."""
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_running: int
    device: str
    dtype: str
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase of starting."""
    ranks: int = 1
    """Devices that the model is spread over."""
    dimensions: int = 0
    """Length of an encoder's vectors; 0 for a model that generates."""
    scores: bool = False
    """Whether an encoder scores pairs of texts (a cross-encoder)."""
    role: Role = "both"
    kv_format: str = ""
    """Engines with the same value can use each other's KV blocks; empty: this one exchanges none."""
    product: str = ""
    """What the driver calls the device, such as "NVIDIA H200"; empty: a CPU, or not known."""
    weight_bytes: int = 0
    """Memory of the matrices that steps read, on one device; 0: not known."""
    kv_bytes: int = 0
    """Memory of the KV cache on one device."""
    runs_through: str = ""
    """The library whose modelling code runs the layers (`transformers`), where no family describes the model; empty:
    the engine's own."""

"""The messages between a gateway and an engine: tagged structs around the engine's own dataclasses.

The exchange, over one ZeroMQ pair (the engine binds ROUTER, each gateway connects DEALER with an identity
of its own):

    gateway                               engine
    Hello            ──────────────────►            at once, and again every HELLO_S (it is idempotent)
                     ◄──────────────────  Ready     once per registration
    Submit, Abort    ──────────────────►
                     ◄──────────────────  Begun     before the step that begins to compute the prompt of a request
                                                    that may not wait long; for others it is not sent
                     ◄──────────────────  Step      one per engine step that concerns this gateway;
                                                    empty (a heartbeat) every HEARTBEAT_S otherwise
    LoadAdapter, UnloadAdapter, PinAdapter ─────►
                     ◄──────────────────  AdapterResult   one per operation, when it is done
                     ◄──────────────────  Adapters  after `Ready` and when they change
    Encode           ──────────────────►            to an encoder engine, in place of Submit
                     ◄──────────────────  Encoded   what a step of it finished for this gateway
    Sleep, Wake      ──────────────────►
                     ◄──────────────────  State     to every gateway, whenever it changes
                     ◄──────────────────  Leaving   to every gateway, when it begins to drain
    Count            ──────────────────►
                     ◄──────────────────  Counted   at once, from memory
    Claim            ──────────────────►            a client came back whose gateway had died
                     ◄──────────────────  Claimed   at once, from memory
    Erase            ──────────────────►
                     ◄──────────────────  Erased    when it is done, which may take minutes
    Pull             ──────────────────►            from another engine, which is a client like a gateway
                     ◄──────────────────  Block     one per block asked for, with its bytes in further frames
    Placed           ──────────────────►            what was sent here, for the other gateways
                     ◄──────────────────  Placed     what the others sent here; after `Ready`, what is remembered
    Goodbye          ──────────────────►            the engine aborts the requests of this gateway

The two sides may be of neighbouring releases: `protocol.versions` says how they agree on a version.

Invariant: `Ready` means "I hold no request of yours". A gateway that receives one while requests are in
flight knows that they are lost (the engine restarted, or gave this gateway up because it did not read). That
is why `Hello` is repeated: an engine that does not know the sender answers with `Ready`, one that does stays
silent. A `Submit` from a sender that is not registered is refused with a final `Delta`, so nothing queued in
a socket across a restart is ever run without a receiver.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.encoder.request import EncodeRequest, Encoding
from penstock.engine.request import EngineInfo, EngineLoad, EngineState, FinishReason, Request, StepOutput, TokenLogprob
from penstock.protocol.versions import PROTOCOL_VERSION

HELLO_S = 1.0
"""How often a gateway repeats `Hello`."""
HEARTBEAT_S = 0.5
"""How often an idle engine sends an empty `Step`. Several missing ones mean that it is stuck or gone."""
TALLY_KEEP_S = 900.0
"""How long an engine remembers what it produced for finished requests, for `Count`."""
RESUME_S = 10.0
"""How long an engine keeps the tokens of a resumable request that has ended, or whose client or gateway is gone. Until
then its charge stays open: a stream that goes on is charged once, as a whole."""

DRAINING = "draining"
ASLEEP = "asleep"
NOT_REGISTERED = "not_registered"
RESUMED_ELSEWHERE = "resumed_elsewhere"
"""First word of `Delta.error` when the server itself refuses; a colon and the explanation follow."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A gateway presents itself."""

    gateway: str
    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run this request. Its deltas come back in `Step`s to the gateway that sent it."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop this request, in prefill too. Its last delta says so, and holds the tokens produced meanwhile. Unknown ids
    are ignored."""

    request_id: str
    resumable: bool = False
    """Its client may come back for the rest: the tokens are kept, see `RESUME_S`."""


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode these texts. The answer comes back in an `Encoded`, a refusal in a `Step`."""

    request: EncodeRequest


class Placement(msgspec.Struct, frozen=True):
    """A request that was sent to an engine, as far as it decides where its likes should go."""

    names: bytes = b""
    """Names of the prompt's first full blocks, end to end (`engine.kv.block_hash`)."""
    tenant: str = ""
    session: str = ""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """What gateways sent to this engine. Each tells the engine, and the engine tells the others: so all of them choose
    the replica that has a prefix or a session, also when they did not send it there themselves."""

    placements: list[Placement]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The gateway leaves; its running requests are aborted."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Accept nothing new, finish running requests, then exit."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit now; running requests are lost."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Finish running requests, then free the memory of weights and cache until `Wake`."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Load weights and cache again, and accept requests."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read an adapter and serve it under its name; one that has the name already is replaced."""

    operation: str
    spec: AdapterSpec


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter; requests that run with it finish."""

    operation: str
    name: str


class PinAdapter(msgspec.Struct, frozen=True, tag="pin_adapter"):
    """Whether an adapter may be evicted."""

    operation: str
    name: str
    pinned: bool


class Count(msgspec.Struct, frozen=True, tag="count"):
    """Asks how many tokens were produced for these charges (see `charge_of`)."""

    question: str
    charges: list[str]


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Asks for the tokens of a resumable request of this charge. If it still runs, for a client whose connection broke
    unnoticed, it is taken from its gateway. `request`: the same request again; only its id and seed may differ."""

    question: str
    charge: str
    request: Request


class Erase(msgspec.Struct, frozen=True, tag="erase"):
    """Drop what the requests of an owner have left in the KV caches, and overwrite it where it lies on disk. `owner`:
    the part of their salts before the first NUL, usually a tenant."""

    question: str
    owner: str


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Send these KV blocks, in this order, each as soon as it is computed. `request_id`: the sender's own request that
    computes them; once that has ended, blocks that are missing will not come."""

    request_id: str
    names: list[bytes]


AdapterOperation: TypeAlias = LoadAdapter | UnloadAdapter | PinAdapter
ToEngine: TypeAlias = (
    Hello
    | Submit
    | Abort
    | Encode
    | Count
    | Claim
    | Erase
    | Pull
    | Placed
    | Goodbye
    | Drain
    | Shutdown
    | Sleep
    | Wake
    | AdapterOperation
)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to the first `Hello`: what this engine is. It holds no request of the receiver."""

    info: EngineInfo
    version: int = PROTOCOL_VERSION
    state: EngineState = "awake"


class State(msgspec.Struct, frozen=True, tag="state"):
    """The engine fell asleep, woke, or tried to; `info` describes it as it is now."""

    state: EngineState
    info: EngineInfo
    problem: str = ""
    """Why it did not reach the state it was told to."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What a step produced for the receiver, with the engine's load. Without deltas it is a heartbeat."""

    output: StepOutput


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The engine begins to compute the prompts of these requests, which have a `patience_s`. Their gateway measures it
    too, and refuses them when it is over, unless it has been told that they have begun."""

    request_ids: list[str]


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """Finished requests of the receiver, with the engine's load."""

    encodings: list[Encoding]
    load: EngineLoad


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The engine drains: it finishes its requests and accepts nothing new."""


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine is leaving; every request of the receiver is lost."""

    reason: str


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """Every adapter of the engine."""

    statuses: list[AdapterStatus]


class AdapterResult(msgspec.Struct, frozen=True, tag="adapter_result"):
    """The result of an operation: the adapter as it is now (none when it was unloaded), or the error."""

    operation: str
    status: AdapterStatus | None = None
    error: str = ""


class Produced(msgspec.Struct):
    """What an engine produced for one request; `finish_reason` is None while it runs."""

    request_id: str
    tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    resumable: bool = False
    """It has ended, and its client may still come back for the rest."""


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """Every request of the charges asked for that this engine runs or remembers."""

    question: str
    entries: list[Produced]


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """The tokens of a claimed request, under whose id and seed it can go on. Not `found`: there is none that this
    claim fits. `running`: it is being stopped; ask again."""

    question: str
    found: bool = False
    running: bool = False
    request_id: str = ""
    seed: int = 0
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    """How it had ended; None: it was broken off."""


class Erased(msgspec.Struct, frozen=True, tag="erased"):
    """What was erased: blocks, and states of recurrent layers. `failed`: of those on disk, how many could not be
    overwritten. `error`: why nothing was erased."""

    question: str
    blocks: int = 0
    failed: int = 0
    error: str = ""


class Block(msgspec.Struct, frozen=True, tag="block"):
    """A block that was asked for: its bytes are in the frames behind this one. Not `found`: it will not come."""

    request_id: str
    name: bytes
    found: bool = True


FromEngine: TypeAlias = (
    Ready
    | State
    | Step
    | Begun
    | Encoded
    | Leaving
    | Stopped
    | Adapters
    | AdapterResult
    | Counted
    | Claimed
    | Erased
    | Block
    | Placed
)


def charge_of(request_id: str) -> str:
    """The charge that a request belongs to: its id begins with the charge's own, up to a colon."""
    return request_id.partition(":")[0]

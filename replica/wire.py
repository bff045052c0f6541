"""Every message that crosses the process boundary between gateway and replica.

One WebSocket per pair; each binary message is one msgpack-encoded struct of the two unions at
the end. A connection opens with a `Hello` from the replica; from then on every change of the
replica's state arrives in `Frame`s, in order and numbered without a gap. There is no other way to
catch up: who misses one reconnects. This file knows no socket, no engine and no text.
"""

from enum import Enum

import msgspec

WIRE_VERSION = 1
"""Raised with every incompatible change; both sides refuse a partner of another version."""

HEARTBEAT_S = 0.05
"""The longest silence of a healthy replica, in seconds."""

TOP_LOGPROBS_MAX = 20
"""The most alternatives per token a request may ask for (OpenAI's own limit)."""


class FinishReason(Enum):
    """Why a request ended, as the engine saw it; stop strings are the gateway's to find."""

    STOP = "stop"
    """The model produced an end-of-generation token, which is not part of the output."""
    LENGTH = "length"
    """`tokens_max` or the end of the context was reached."""
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """This replica takes nothing more; another one may."""
    FAILED = "failed"
    """The engine could not go on; `Finished.error` says why."""


class EnginePhase(Enum):
    """What the engine's thread is doing, told by every heartbeat."""

    LOADING = "loading"
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    DEAD = "dead"


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of everything that is sent; the class's name is its tag."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's next tokens are drawn.

    The random stream is counter-based: the draw for the token at index `i` of the completion
    depends on `seed` and `i` alone, so a request continued elsewhere draws what it would have
    drawn.
    """

    seed: int
    """0 .. 2**64 - 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token the completion already holds."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the completion."""
    repeat_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or completion."""
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """None: not wanted; k: the chosen token's, and those of the k likeliest."""


class Generate(Message, frozen=True):
    """Produce tokens after `token_ids`.

    A request that moves from another replica brings its completion so far behind its prompt;
    `prompt_tokens` says where the prompt ends, `tokens_max` counts the whole completion.
    """

    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    tokens_max: int
    sampling: Sampling
    ignore_eos: bool = False
    """Never draw an end-of-generation token."""


class Cancel(Message, frozen=True):
    """Nobody waits for this request any more. Harmless when it has already finished."""

    request_id: str


class Drain(Message, frozen=True):
    """Finish what runs, accept nothing more, then exit."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of one drawn token, before temperature and truncation."""

    logprob: float
    top: list[tuple[int, float]]
    """(token id, logprob), likeliest first."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token where the request asked for them."""
    cached_tokens: int | None = None
    """With the first tokens only: as in `Finished`, for who stops listening before that."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The last word on a request. Every accepted request gets exactly one."""

    request_id: str
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, taken from the KV cache and not computed."""
    completion_tokens: int
    error: str | None = None


class Stored(msgspec.Struct, frozen=True, tag=True):
    """These prefix blocks (see `replica.blocks`) can now be continued on this replica."""

    blocks: list[int]


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """These prefix blocks are gone from this replica."""

    blocks: list[int]


KvEvent = Stored | Evicted


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the replica is after a step."""

    running: int
    waiting: int
    kv_used_tokens: int


class Facts(msgspec.Struct, frozen=True):
    """What does not change while the replica lives."""

    replica_id: str
    node: int
    pid: int
    cpus: list[int]
    threads: int
    model_fingerprint: str
    context_tokens: int
    """Per sequence, prompt and completion together."""
    parallel: int
    """Sequences at once."""
    block_tokens: int
    memory_local_ratio: float | None
    """Share of this process's large memory on its own nodes; None where it cannot be read."""
    degraded: str | None = None
    """Why the placement is weaker than planned, in a sentence; None when it is as planned."""
    refusal: str | None = None
    """Why this replica must not serve, in a sentence; None when it may."""


class Hello(Message, frozen=True):
    """Opens every connection: the complete state that later frames change."""

    version: int
    epoch: int
    """Differs for every start of the replica process."""
    facts: Facts
    blocks: list[int]
    load: Load


class Frame(Message, frozen=True, omit_defaults=True):
    """What one engine step changed. `seq` counts up by one from 1 after each `Hello`."""

    seq: int
    load: Load
    outputs: list[Output] = []
    finished: list[Finished] = []
    events: list[KvEvent] = []
    rows: int = 0
    """Tokens computed in this step."""
    step_s: float = 0.0
    cached_tokens: dict[str, int] = {}
    """Prompt tokens that this step's newcomers need not compute, by where they come from."""


class Heartbeat(Message, frozen=True):
    """Sent at least every `HEARTBEAT_S`, so that silence means something."""

    phase: EnginePhase
    step_ends_in_s: float
    """Until the running step is expected to end; negative when it is late; 0 when idle."""


Down = Generate | Cancel | Drain
Up = Hello | Frame | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode

"""An encoder engine: take waiting texts, compute them in one pass, answer the requests that are complete.

It has the interface of the other engine (`submit`, `abort`, `step`, `has_work`, `info`, `load_snapshot`), so the same
server, watchdog and supervisor run it. Each step ends with its results on the host: nothing is in flight between steps.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.interface import torch_dtype
from penstock.engine.backends.select import pick_backend, pick_device, plain_backend
from penstock.engine.encoder.config import EncoderEngineConfig, read_shape
from penstock.engine.encoder.model import Encoder, MakeProduct, Packed, Product, build_encoder, dense
from penstock.engine.encoder.queue import Item, Job, TextQueue
from penstock.engine.encoder.request import EncodeOutput, EncodeRequest, Encoding
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.request import QUEUE_FULL, Delta, EngineInfo, EngineLoad, Request
from penstock.engine.startup.part import Phases, Progress
from penstock.errors import ConfigError
from penstock.machine import usable_cores

NOT_AN_ENCODER_REQUEST = "this engine encodes texts; it does not generate"
FEW_TOKENS = 48
"""Steps of up to so many tokens run on one CPU thread: a short text is some hundred small operations, and waking
another thread for each costs more than it saves when cores are shared."""
_CUDA_ROOM = 2**30
"""Free memory for which `device: auto` takes CUDA."""


class EncoderEngine:
    """One encoder model. Not thread-safe: one thread owns it."""

    adapters = None

    def __init__(
        self,
        encoder: Encoder,
        info: EngineInfo,
        *,
        token_budget: int,
        max_waiting: int,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: of the CPU, for steps of many tokens."""
        self.encoder = encoder
        self._threads = threads
        self.info = info
        self._token_budget = token_budget
        self._clock = clock
        self._queue = TextQueue(max_waiting)
        self._deltas: list[Delta] = []
        self._steps = self._tokens = 0

    @classmethod
    def load(cls, config: EncoderEngineConfig, progress: Progress | None = None) -> EncoderEngine:
        return load_encoder(config, progress)

    def unload_adapter(self, name: str) -> None:
        raise ConfigError(f"an encoder has no adapters, and none called {name!r}")

    @property
    def has_work(self) -> bool:
        return bool(len(self._queue) or self._deltas)

    def submit(self, request: Request) -> None:
        self._refuse(request.request_id, NOT_AN_ENCODER_REQUEST)

    def encode(self, request: EncodeRequest) -> None:
        problem = self._problem(request)
        if problem is None and not self._queue.add(request, self._clock()):
            problem = f"{QUEUE_FULL}: {self._queue.waiting} texts already wait"
        if problem is not None:
            self._refuse(request.request_id, problem)

    def abort(self, request_id: str) -> None:
        if self._queue.drop(request_id):
            self._deltas.append(Delta(request_id, finish_reason="abort"))

    def step(self) -> EncodeOutput | None:
        batch = self._queue.take(self._token_budget)
        encodings: list[Encoding] = []
        if batch:
            self._steps += 1
            self._run(batch)
            for job in {id(job): job for job, _ in batch}.values():
                if not job.missing:
                    self._queue.finish(job)
                    encodings.append(self._answer(job))
        deltas, self._deltas = self._deltas, []
        return EncodeOutput(deltas, self.load_snapshot(), encodings) if batch or deltas else None

    def load_snapshot(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._queue), waiting=self._queue.waiting, steps=self._steps, prompt_tokens=self._tokens
        )

    @torch.inference_mode()
    def _run(self, batch: list[Item]) -> None:
        """Compute a batch and hand each text's result to its job."""
        batch.sort(key=lambda item: len(item[0].request.texts[item[1]]))
        now = self._clock()
        texts, seconds = [], []
        for job, index in batch:
            job.begun_at = now if job.begun_at is None else job.begun_at
            request = job.request
            texts.append(request.texts[index])
            seconds.append(None if request.seconds is None else request.seconds[index])
        packed = Packed.of(texts, seconds, self.encoder.device)
        self._tokens += len(packed.tokens)
        if self._threads > 1:
            torch.set_num_threads(1 if len(packed.tokens) <= FEW_TOKENS else self._threads)
        states = self.encoder(packed)
        wanted = {job.request.wanted for job, _ in batch}
        sentences = self._sentences(states, packed) if wanted & {"sentence", "both"} else None
        scores = self._scores(states, packed) if "score" in wanted else None
        tokens = F.normalize(states.float(), dim=-1) if wanted & {"tokens", "both", "late"} else None
        start = 0
        for row, (job, index) in enumerate(batch):
            end = start + len(texts[row])
            match job.request.wanted:
                case "sentence":
                    assert sentences is not None
                    job.results[index] = sentences[row]
                case "score":
                    assert scores is not None
                    job.results[index] = scores[row : row + 1]
                case "tokens":
                    assert tokens is not None
                    job.results[index] = tokens[start:end].cpu()
                case "both":
                    assert sentences is not None and tokens is not None
                    job.results[index] = torch.cat([sentences[row : row + 1], tokens[start:end].cpu()])
                case "late":
                    assert tokens is not None
                    # Without the tokens that mark beginning and end: they are the same in every text.
                    job.results[index] = tokens[start + 1 : end - 1].clone()
            job.missing -= 1
            start = end
        for job in {id(job): job for job, _ in batch}.values():
            if job.request.wanted == "late":
                _interact(job)

    def _sentences(self, states: Tensor, packed: Packed) -> Tensor:
        if self.encoder.shape.pooling == "cls":
            pooled = states[packed.starts[:-1].long()]
        else:
            lengths = torch.tensor(packed.lengths, device=states.device)
            rows = torch.repeat_interleave(torch.arange(len(packed.lengths), device=states.device), lengths)
            pooled = torch.zeros(len(packed.lengths), states.shape[1], dtype=torch.float32, device=states.device)
            pooled = pooled.index_add_(0, rows, states.float()) / lengths[:, None]
        return F.normalize(pooled.float(), dim=-1).cpu()

    def _scores(self, states: Tensor, packed: Packed) -> Tensor:
        assert self.encoder.head is not None
        return self.encoder.head(states[packed.starts[:-1].long()]).float().cpu()

    def _answer(self, job: Job) -> Encoding:
        results = job.results[1:] if job.request.wanted == "late" else job.results
        numbers = torch.cat([result.reshape(-1) for result in results]).numpy().tobytes() if results else b""
        begun = job.begun_at if job.begun_at is not None else job.arrived_at
        return Encoding(job.request.request_id, numbers, begun - job.arrived_at, self._clock() - begun)

    def _problem(self, request: EncodeRequest) -> str | None:
        shape = self.encoder.shape
        if not request.texts:
            return "there is no text to encode"
        if (request.wanted == "score") != shape.scores:
            return "a cross-encoder scores pairs" if shape.scores else "this model is no cross-encoder"
        if request.seconds is not None and len(request.seconds) != len(request.texts):
            return "there must be one second part per text"
        if request.wanted == "late" and len(request.texts[0]) < 3:
            return "the first text is empty"
        for text in request.texts:
            if not 1 <= len(text) <= self.info.max_model_len:
                return f"a text has {len(text)} tokens; from 1 to {self.info.max_model_len} are possible"
            if min(text) < 0 or max(text) >= shape.vocab_size:
                return f"a token id is outside the vocabulary of {shape.vocab_size}"
        return None

    def _refuse(self, request_id: str, why: str) -> None:
        self._deltas.append(Delta(request_id, finish_reason="error", error=why))


def _interact(job: Job) -> None:
    """Late interaction: each token of the first text takes its best match in another; their mean is the score.

    Token vectors are given up as soon as the score is known, so a thousand documents need not be held at once."""
    query = job.results[0]
    if query is None:
        return
    for index, document in enumerate(job.results):
        if index and document is not None and document.dim() == 2:
            score = (query @ document.T).max(dim=1).values.mean() if len(document) else torch.zeros(())
            job.results[index] = score.cpu().reshape(1)


def load_encoder(config: EncoderEngineConfig, progress: Progress | None) -> EncoderEngine:
    """See `EncoderEngine.load`."""
    phases = Phases(progress)
    threads = config.threads or usable_cores()
    torch.set_num_threads(threads)
    device = pick_device(config.device, room=_CUDA_ROOM)
    int8 = config.weights == "int8"
    backend = pick_backend(device, threads) if int8 else plain_backend(device)
    dtype = torch.float32 if config.dtype == "auto" else torch_dtype(config.dtype)
    with phases("weights"):
        checkpoint = open_checkpoint(config.model)
        shape = read_shape(Path(config.model), checkpoint.config)
        product = int8_product(backend) if int8 else dense
        encoder = build_encoder(checkpoint, shape, device, dtype, product)
    longest = config.max_model_len or shape.max_model_len
    if longest > shape.positions:
        raise ConfigError(f"max_model_len {longest} is more than the {shape.positions} positions of this encoder")
    engine = EncoderEngine(
        encoder,
        EngineInfo(
            model=config.name or Path(config.model).name,
            instance=secrets.token_hex(8),
            max_model_len=longest,
            vocab_size=shape.vocab_size,
            block_size=0,
            num_blocks=0,
            max_running=config.max_waiting,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            startup=phases.seconds,
            dimensions=shape.hidden,
            scores=shape.scores,
        ),
        token_budget=config.token_budget or backend.defaults.encoder_token_budget,
        max_waiting=config.max_waiting,
        threads=threads if backend.in_host_memory else 1,
    )
    with phases("warm up"):
        encoder.warm_up(attends_varlen=backend.attends_varlen)
    return engine


def int8_product(backend: Backend) -> MakeProduct:
    """Linears with weights and activations in int8, where their shape allows it."""

    def make(weight: Tensor, bias: Tensor) -> Product:
        return backend.int8_linear(weight, bias) or dense(weight, bias)

    return make

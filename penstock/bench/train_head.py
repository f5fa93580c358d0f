"""Training an EAGLE-3 head for a model by self-distillation, bounded in time.

Prompts are windows of text and code (`library_texts`). The model continues them in our own engine, in large batches;
the hidden states of all tokens are collected with the engine's kernels; the head learns the model's distributions
(`head_model`). It is written in the speculators layout, and measured by `head_comparison`. Needs PyTorch and nothing of
the gateway.

    python -m penstock.bench.train_head --corpus prompts.npz --only-corpus    # where the tokenizer is
    python -m penstock.bench.train_head --corpus prompts.npz --out head --measure
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from penstock.bench.engine import BenchError
from penstock.bench.head_comparison import compare, table
from penstock.bench.head_model import HeadModel
from penstock.bench.library_texts import Corpus, make_corpus, read_corpus
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.tap import Tap
from penstock.engine.request import Request, SamplingParams

PASSES = 4
"""Draft tokens in a row that a head is trained for."""
_DECAY = 0.85
"""Weight of each pass, in those of the one before."""
_GENERATING, _COLLECTING = 0.45, 0.05
"""Parts of the time for generating, and at most for collecting hidden states; the rest is for training."""
_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What to train, and how long."""

    model: str
    """Path of the target."""
    out: Path
    device: str = "auto"
    minutes: float = 5.0
    seed: int = 0
    steps: int | None = None
    """Exact number of steps, for the same head on every run; `minutes` still bounds it."""
    epochs: int = 6
    """How often each text is learned from at most: more, and a head learns the texts by heart."""
    draft_vocab: int = 16384
    new_tokens: int = 160
    rate: float = 1e-3
    batch: int = 64
    """Texts in a step."""
    concurrency: int = 256
    say: Callable[[str], None] = field(default=print)


@dataclass(frozen=True, slots=True)
class Collected:
    """What the model wrote, and what its layers had at every token but the last."""

    tokens: Tensor
    """int64 [N, L + 1]"""
    streams: Tensor
    """[N, L, taps * hidden]"""
    final: Tensor
    """[N, L, hidden]: after the final norm."""


def train(corpus: Corpus, options: Training) -> dict[str, float]:
    """Train a head and write it; figures about it."""
    begin, budget, say = time.perf_counter(), options.minutes * 60, options.say
    torch.manual_seed(options.seed)
    engine = Engine.load(
        EngineConfig(
            model=options.model,
            device=options.device,
            max_running=options.concurrency,
            max_model_len=corpus.train.shape[1] + options.new_tokens + 1,
            kv_dtype="full",
        )
    )
    target = read_config(open_checkpoint(options.model).config)
    say(f"target: {engine.info.model} on {engine.info.device}, {engine.info.dtype}")
    texts = generate(engine, corpus.train, options, begin + budget * _GENERATING)
    say(f"{len(texts):,} texts of {texts.shape[1]} tokens after {time.perf_counter() - begin:.0f} s")
    decoder = engine.runner.decoder
    tapped = tuple(sorted({min(2, target.num_layers), target.num_layers // 2, max(target.num_layers - 3, 0)}))
    collected = collect(decoder, tapped, texts, begin + budget * (_GENERATING + _COLLECTING))
    say(f"hidden states of {collected.tokens.numel():,} tokens after {time.perf_counter() - begin:.0f} s")
    chosen = frequent(collected.tokens[:, corpus.train.shape[1] :], options.draft_vocab, target.vocab_size)
    layer = layer_config(target)
    device = decoder.embedding.device
    model = HeadModel(read_config(layer), len(chosen), len(tapped), collected.tokens.shape[1] + PASSES).to(device)
    head = torch.cat([decoder.logits(part) for part in _unit_rows(decoder)]).T.contiguous()
    initialize(model, options.model, target, chosen, head)
    figures = fit(model, collected, chosen, decoder, options, begin + budget, corpus.train.shape[1])
    write_head(options.out, model, layer, chosen, tapped, target)
    say(f"wrote {options.out} after {time.perf_counter() - begin:.0f} s")
    engine.close()
    return figures


def generate(engine: Engine, prompts: np.ndarray, options: Training, until: float) -> Tensor:
    """Prompts with the model's own continuations, [N, tokens], as many as there is time for: half of them greedy, half
    sampled."""
    found: list[list[int]] = []
    for wave in range(0, len(prompts), 2 * options.concurrency):
        now = prompts[wave : wave + 2 * options.concurrency]
        answers: dict[str, list[int]] = {str(index): [] for index in range(len(now))}
        for index, prompt in enumerate(now):
            params = SamplingParams(
                max_tokens=options.new_tokens, temperature=(0.0, 0.8)[index % 2], seed=options.seed + wave + index
            )
            engine.submit(Request(str(index), prompt.tolist(), params))
        while engine.has_work:
            output = engine.step()
            for delta in output.deltas if output is not None else ():
                if delta.finish_reason == "error":
                    raise BenchError(f"a prompt could not be continued: {delta.error}")
                answers[delta.request_id].extend(delta.tokens)
        found += [prompt.tolist() + answers[str(index)] for index, prompt in enumerate(now)]
        if time.perf_counter() > until:
            break
    return torch.tensor(found)


@torch.inference_mode()
def hidden_states(decoder: Decoder, tapped: tuple[int, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of texts [B, L]: the residual streams in front of the tapped layers [B, L, taps * hidden], and the final hidden
    states [B, L, hidden]."""
    count, length = tokens.shape
    dtype, device = decoder.embedding.dtype, decoder.embedding.device
    width = -(-length // _BLOCK)
    kv = KVCache(decoder.cache_shape(_BLOCK, dtype), count * width + 1, device)
    tables = 1 + torch.arange(count * width, dtype=torch.int32, device=device).view(count, width)
    positions = torch.arange(length, device=device).repeat(count)
    owner = torch.arange(count, device=device).repeat_interleave(length)
    batch = AttentionBatch(
        positions=positions,
        slots=tables[owner, positions // _BLOCK].long() * _BLOCK + positions % _BLOCK,
        query_starts=torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device),
        context_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        rows=torch.arange(count, dtype=torch.int32, device=device),
        block_tables=tables,
        num_decodes=0,
        max_query=length,
        max_context=length,
    )
    residual = decoder.embed(tokens.to(device).flatten())
    streams = [residual.to(dtype, copy=True)] if 0 in tapped else []
    end, final = 0, residual
    for part in Tap(0, decoder.ops, tapped).on(decoder).parts:
        begin, end = end, end + len(part.layers)
        final = part.run(residual, batch, kv.of_layers(begin, end))
        if end in tapped:
            streams.append(residual.to(dtype, copy=True))
    return torch.cat(streams, -1).view(count, length, -1), final.view(count, length, -1)


def collect(decoder: Decoder, tapped: tuple[int, ...], texts: Tensor, until: float) -> Collected:
    """Hidden states of as many texts as there is time for, on the decoder's device."""
    streams, finals = [], []
    for part in torch.split(texts, 64):
        stream, final = hidden_states(decoder, tapped, part[:, :-1])
        streams.append(stream)
        finals.append(final)
        if time.perf_counter() > until and len(streams) > 1:
            break
    taken = sum(map(len, streams))
    # Outside of inference mode: the head's graph refers to them.
    return Collected(texts[:taken].to(streams[0].device), torch.cat(streams).clone(), torch.cat(finals).clone())


def frequent(written: Tensor, most: int, vocab_size: int) -> Tensor:
    """The tokens that the model wrote most often, ascending."""
    counts = torch.bincount(written.flatten().cpu(), minlength=vocab_size)
    return counts.topk(min(most, vocab_size)).indices.sort().values


def layer_config(target: ModelConfig) -> dict[str, Any]:
    """The head's layer: as wide as the target's."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": target.hidden_size,
        "intermediate_size": target.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.rms_eps,
        "rope_theta": target.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _unit_rows(decoder: Decoder) -> Sequence[Tensor]:
    """Hidden states whose logits are the columns of the head: it may be kept in any form, and this reads it."""
    eye = torch.eye(decoder.config.hidden_size, dtype=decoder.embedding.dtype, device=decoder.embedding.device)
    return torch.split(eye, 64)


@torch.no_grad()
def initialize(model: HeadModel, path: str, target: ModelConfig, chosen: Tensor, head: Tensor) -> None:
    """Begin where the model ends: its head, its final norm and its last layer, which is given the highest of the
    streams."""
    hidden = target.hidden_size
    model.lm_head.weight.copy_(head[chosen.to(head.device)])
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -hidden:] += torch.eye(hidden, device=model.fc.weight.device)
    weights = open_checkpoint(path)
    names, prefix = set(weights.names()), f"model.layers.{target.num_layers - 1}."
    if "model.norm.weight" in names:
        model.norm.weight.copy_(weights.tensor("model.norm.weight"))
    for name, parameter in model.layers[0].named_parameters():
        if prefix + name not in names:
            continue
        found = weights.tensor(prefix + name).to(parameter.device, parameter.dtype)
        if found.shape == parameter.shape:
            parameter.copy_(found)
        elif found.ndim == 2 and found.shape == (parameter.shape[0], hidden):  # of two inputs, the hidden state
            parameter[:, :hidden].mul_(0.1)
            parameter[:, hidden:].copy_(found)


def fit(
    model: HeadModel, data: Collected, chosen: Tensor, decoder: Decoder, options: Training, until: float, prompt: int
) -> dict[str, float]:
    """Train until the time is over, or every text has been seen `options.epochs` times. Shares of right tokens are of
    texts that are not learned from."""
    device = decoder.embedding.device
    lesson = _Lesson(model, data, chosen.to(device), decoder, decoder.embedding.detach().clone(), prompt)
    held = max(len(data.tokens) // 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.05)
    begin, order = time.perf_counter(), random.Random(options.seed)
    most = options.steps or max(options.epochs * (len(data.tokens) - held) // options.batch, 1)
    steps, shown = 0, 0.0
    figures: dict[str, float] = {}

    def check(loss: Tensor) -> dict[str, float]:
        with torch.no_grad():
            _, right = lesson(torch.arange(min(held, options.batch), device=device))
        said = ", ".join(f"{share:.0%}" for share in right)
        options.say(f"step {steps} of {most}: loss {float(loss):.3f}, held-out texts right {said}")
        shares = {f"right_{index + 1}": share for index, share in enumerate(right)}
        return {"steps": steps, "loss": float(loss), **shares}

    while steps < most and (steps == 0 or time.perf_counter() < until):
        now = time.perf_counter()
        done = max((now - begin) / max(until - begin, 1e-3), steps / most)
        for group in optimizer.param_groups:
            warm = min((steps + 1) / 50, 1.0)
            group["lr"] = options.rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
        at = [order.randrange(held, max(len(data.tokens), held + 1)) for _ in range(options.batch)]
        loss, _ = lesson(torch.tensor(at, device=device).clamp(max=len(data.tokens) - 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if now - shown > 10 or steps == 1:
            shown, figures = now, check(loss.detach())
    return check(loss.detach()) if figures.get("steps") != steps else figures


@dataclass(frozen=True, slots=True)
class _Lesson:
    """The loss of some texts: the cross-entropy with the model's own distribution over the head's tokens, at the tokens
    that the model wrote; and the share of tokens that each pass gets right."""

    model: HeadModel
    data: Collected
    chosen: Tensor
    decoder: Decoder
    embedding: Tensor
    prompt: int

    def __call__(self, at: Tensor) -> tuple[Tensor, list[float]]:
        tokens, streams, final = self.data.tokens[at], self.data.streams[at], self.data.final[at]
        device, prompt, chosen = tokens.device, self.prompt, self.chosen
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = self.model(F.embedding(tokens, self.embedding).float(), streams.float(), PASSES)
        loss = torch.zeros((), device=device)
        right = []
        wanted, best = _targets(self.decoder, final[:, prompt:], chosen)
        known = (wanted.sum(-1) > 0).float()
        for step, logits in enumerate(scores):
            # Behind token t, pass s is about the token that the model chooses at t + 1 + s.
            first = prompt - 1 - step
            count = min(logits.shape[1] - first, wanted.shape[1])
            log_chances = logits[:, first : first + count].float().log_softmax(-1)
            entropy = -(wanted[:, :count] * log_chances).sum(-1)
            loss = loss + _DECAY**step * (entropy * known[:, :count]).sum() / known[:, :count].sum().clamp(min=1)
            if not loss.requires_grad:
                right.append(float((chosen[log_chances.argmax(-1)] == best[:, :count]).float().mean()))
        return loss, right


@torch.inference_mode()
def _model_logits(decoder: Decoder, final: Tensor) -> Tensor:
    return torch.cat([decoder.logits(part) for part in torch.split(final.flatten(0, 1), 4096)])


def _targets(decoder: Decoder, final: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The model's distribution over the head's tokens, zeros where its likeliest token is not among them; and that."""
    logits = _model_logits(decoder, final)
    best = logits.argmax(-1)
    part = logits[:, chosen]
    wanted = part.softmax(-1) * (part.amax(-1) == logits.amax(-1)).unsqueeze(-1)
    shape = final.shape[:2]
    return wanted.view(*shape, -1).clone(), best.view(shape).clone()


def write_head(
    folder: Path, model: HeadModel, layer: dict[str, Any], chosen: Tensor, tapped: tuple[int, ...], target: ModelConfig
) -> None:
    """In the speculators layout; the embedding is the target's own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(chosen),
        "norm_before_residual": False,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(tapped),
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    chosen = chosen.cpu()
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    save_file(tensors, folder / "model.safetensors")


def corpus_of(model: str, path: Path | None, files: Sequence[Path], prompts: int, length: int) -> Corpus:
    """Read from `path`, or made with the model's tokenizer, and written there."""
    if path is not None and path.exists():
        return read_corpus(path)
    from penstock.text import load_text

    corpus = make_corpus(load_text(Path(model)).encode, files=files, prompts=prompts, length=length)
    if path is not None:
        corpus.write(path)
    return corpus


def main() -> None:
    """The command without the rest of the command line; `penstock bench train-head` is the same."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.train_head", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="texts to learn from; the standard library by default")
    parser.add_argument("--model", required=True, help="path of the target: a folder or GGUF file")
    parser.add_argument("--out", type=Path, default=Path("head"), help="folder of the head")
    parser.add_argument("--corpus", type=Path, help="file of prompts in tokens: read if it exists, else written")
    parser.add_argument("--only-corpus", action="store_true", help="make the file of prompts and stop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=24576)
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--measure", action="store_true", help="compare it with n-grams and with none afterwards")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    corpus = corpus_of(given.model, given.corpus, given.files, given.prompts, given.length)
    if given.only_corpus:
        return
    options = Training(
        model=given.model,
        out=given.out,
        device=given.device,
        minutes=given.minutes,
        seed=given.seed,
        steps=given.steps,
        epochs=given.epochs,
        draft_vocab=given.draft_vocab,
    )
    run(corpus, options, compared=given.measure, json_file=given.json)


def run(corpus: Corpus, options: Training, *, compared: bool, json_file: Path | None) -> None:
    """Train, and measure if asked to."""
    results: dict[str, Any] = {"training": train(corpus, options)}
    if compared:
        rows = compare(corpus, options.model, options.out, device=options.device)
        options.say(table(rows))
        results["measured"] = rows
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

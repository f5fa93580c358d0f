"""From a checkpoint to a decoder: embedding, layers as the family's architecture composes them, norm and head."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

import torch

from penstock.engine.backends.interface import ActivationOps
from penstock.engine.models.architecture import LayerContext
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.families import family_of
from penstock.engine.models.families.tensor_names import HEADS, prefix_of
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.feed_forward import FusedFeedForward, SummedByNorm
from penstock.engine.models.layers.linear import InlineLinear, Linear, shaped
from penstock.engine.models.layers.mixer import FusedMixer
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.llama import LLAMA_LIKE
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.normed_rows import normed_rows
from penstock.engine.models.weights import Quantizer, WeightReader, Weights
from penstock.errors import CheckpointError

FREQUENCIES = "rotary_emb.alpha"
"""Logarithms of the factors of rotary frequencies, where a model has learned some."""


def build_decoder(
    weights: Weights,
    config: ModelConfig,
    backend: LayerFactory,
    *,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None = None,
    asked: str = "",
    inner: ActivationOps | None = None,
    fused_up_to: int = 0,
    fp8_cache: bool = False,
    head_rows: int | None = None,
    progress: Callable[[float], None] | None = None,
    begun: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Read every weight once, fuse and pack it. Peak memory is the model plus one layer.

    `asked`: see `WeightReader`. `head_rows`: how many of the head's rows this process has, when it is one of several;
    with none it has no embedding either. `begun`: called with the decoder as it is with its first layer alone, before
    the others are read.
    """
    read = WeightReader(weights, backend, dtype, quantize, config.norm_offset, asked)
    return compose_decoder(
        read,
        config,
        max_positions=max_positions,
        inner=inner,
        fused_up_to=fused_up_to,
        fp8_cache=fp8_cache,
        head_rows=head_rows,
        progress=progress,
        begun=begun,
    )


def compose_decoder(
    read: WeightReader,
    config: ModelConfig,
    *,
    max_positions: int,
    inner: ActivationOps | None = None,
    fused_up_to: int = 0,
    fp8_cache: bool = False,
    head_rows: int | None = None,
    progress: Callable[[float], None] | None = None,
    begun: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """See `build_decoder`. Asks `read` for every tensor that the family has, and for no other."""
    backend, family = read.backend, family_of(config.family)
    architecture = LLAMA_LIKE if family.architecture is None else family.architecture()
    prefix = prefix_of(read.names, family.names)
    hidden, vocab = config.hidden_size, config.vocab_size
    has_ends = head_rows != 0
    embedding = (
        read.get(f"{prefix}{family.names.embedding}.weight", vocab, hidden) if has_ends else read.zeros(1, hidden)
    )
    if config.embedding_scale != 1.0:
        embedding = embedding * config.embedding_scale
    if config.normed_embedding and has_ends:
        embedding = normed_rows(embedding, config.rms_eps)
    kinds = [(rope, config.rotary_dim(index)) for index, rope in enumerate(config.ropes)]
    tables = {}
    for rope, dim in dict.fromkeys(kinds):
        factors = None
        if config.learned_frequencies and dim:
            factors = read.get(f"{prefix}{FREQUENCIES}", dim // 2, dtype=torch.float32).exp()
        tables[rope, dim] = cos_sin_table(rope, dim, max_positions, backend.device, factors)
    head = compose_head(read, config, head_rows or vocab) if has_ends else backend.linear(read.zeros(16, hidden))
    head = shaped(backend.as_head(head), config.logit_scale, config.logit_softcap)
    if config.final_norm_offset == config.norm_offset:
        final_norm, final_norm_bias = read.layer_norm(prefix, family.names.final_norm, hidden, config.norm_bias)
    else:
        final_norm, final_norm_bias = read.unshifted(f"{prefix}{family.names.final_norm}", hidden), None
        final_norm = final_norm + config.final_norm_offset
    further = {} if architecture.further is None else architecture.further(read, config, prefix)

    def decoder_of(layers: list[DecoderLayer]) -> Decoder:
        fused = min(fused_up_to, most_fused(config, layers))
        alone = head_rows is None
        return architecture.decoder(
            config=config,
            ops=backend.ops,
            embedding=embedding,
            # Where other processes have parts of the model, sums over these may stand before the norm.
            layers=[_leaving_sums(layer) for layer in layers] if fused and alone else layers,
            final_norm=final_norm,
            final_norm_bias=final_norm_bias,
            head=head,
            max_positions=max_positions,
            fused_up_to=fused,
            chains=alone,
            **further,
        )

    layers: list[DecoderLayer] = []
    for index, kind in enumerate(kinds):
        context = LayerContext(
            read=read,
            config=config,
            names=family.names,
            index=index,
            prefix=f"{prefix}layers.{index}.",
            cos_sin=tables[kind],
            inner=inner or backend.ops,
            fp8_cache=fp8_cache,
        )
        layers.append(architecture.compose_layer(context))
        if begun is not None and index == 0:
            begun(decoder_of(layers[:]))
        if progress is not None:
            progress((index + 1) / (config.num_layers + 1))
    if progress is not None:
        progress(1.0)
    return decoder_of(layers)


def most_fused(config: ModelConfig, layers: Sequence[DecoderLayer]) -> int:
    """Tokens that the layers can take in their fused form, if the backend has one. Experts and recurrent layers take
    one."""
    if not all(isinstance(layer.mixer, FusedMixer) for layer in layers):
        return 0
    if config.plain_layers:
        return sys.maxsize
    experts = config.plain_outlines and all(_fuses_one(layer) for layer in layers)
    return 1 if experts else 0


def _fuses_one(layer: DecoderLayer) -> bool:
    feed_forward, mixer = layer.feed_forward, layer.mixer
    fuses = isinstance(feed_forward, FusedFeedForward) and feed_forward.fuses
    return fuses and all(isinstance(linear, InlineLinear) for linear in mixer.linears)


def _leaving_sums(layer: DecoderLayer) -> DecoderLayer:
    feed_forward = layer.feed_forward
    if not isinstance(feed_forward, SummedByNorm):
        return layer
    return dataclasses.replace(layer, feed_forward=feed_forward.leaving_sums())


def compose_head(read: WeightReader, config: ModelConfig, rows: int) -> Linear:
    """The matrix of logits, or `rows` of it. A stored head is used, whatever tie_word_embeddings says."""
    heads = [name for name in HEADS if f"{name}.weight" in read.names]
    if not heads and not config.tied_embeddings:
        raise CheckpointError(
            f"the checkpoint has no {HEADS[0]}.weight, and tie_word_embeddings is false; "
            f"fetch the whole model, or set tie_word_embeddings if its head is the embedding"
        )
    names = family_of(config.family).names
    tied = f"{prefix_of(read.names, names)}{names.embedding}"
    matrix = heads[0] if heads else tied
    # A head that is the embedding has a bias of its own.
    return read.linear("", {matrix: rows}, config.hidden_size, config.head_bias, biased=heads[0] if heads else HEADS[0])


def compose_one(
    read: WeightReader, config: ModelConfig, prefix: str, *, max_positions: int, inner: ActivationOps | None = None
) -> tuple[type[Decoder], DecoderLayer]:
    """One layer of a family, wherever its tensors are: `config` is that of a model of one layer. With the decoder that
    runs it."""
    backend, family = read.backend, family_of(config.family)
    made = family.drafting or family.architecture
    architecture = LLAMA_LIKE if made is None else made()
    context = LayerContext(
        read=read,
        config=config,
        names=family.names,
        index=0,
        prefix=prefix,
        cos_sin=cos_sin_table(config.ropes[0], config.rotary_dim(0), max_positions, backend.device),
        inner=inner or backend.ops,
        fp8_cache=False,
    )
    return architecture.decoder, architecture.compose_layer(context)

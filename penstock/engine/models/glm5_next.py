"""GLM-5-Next: delta nets with a decay for every channel, and attention over latents of chosen tokens, among several
residual streams."""

from __future__ import annotations

from penstock.engine.models import latent
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.deepseek_v4 import DeepseekV4Decoder, StreamsLayer, compose_among_streams
from penstock.engine.models.kimi_linear import compose_mixer
from penstock.engine.models.llama import LlamaDecoder


def compose_layer(context: LayerContext) -> StreamsLayer:
    return compose_among_streams(context, compose_mixer(context))


class GlmDraftingDecoder(LlamaDecoder):
    """Of a layer for multi-token prediction, which has one residual stream."""

    __slots__ = ()

    @property
    def launched_eagerly(self) -> bool:
        return True  # which pools are complete depends on the sequences


GLM5_NEXT_LIKE = Architecture(DeepseekV4Decoder, compose_layer)
GLM5_NEXT_DRAFTING = Architecture(GlmDraftingDecoder, latent.compose_layer)

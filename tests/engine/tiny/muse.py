"""Muse Glimmer and Muse Spark: tiny configurations, and both as causal models, which `transformers` has with parts that
see and hear alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, MuseGlimmerTextConfig, MuseGlimmerTextModel, MuseSparkTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel, MuseSparkTextModel


def _logits(model: Any, input_ids: Tensor | None, arguments: Any) -> CausalLMOutputWithPast:
    """The library's decoder, and the head that it has elsewhere."""
    found, config = model.model(input_ids, **arguments), model.config
    cap = config.final_logit_softcapping
    scaled = model.lm_head(found.last_hidden_state) * config.output_multiplier
    logits: torch.FloatTensor = cap * torch.tanh(scaled / cap)
    return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    config_class = MuseGlimmerTextConfig
    config: MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the library's form

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> CausalLMOutputWithPast:
        return _logits(self, input_ids, arguments)


class MuseSparkForCausalLM(MuseSparkPreTrainedModel, GenerationMixin):
    config_class = MuseSparkTextConfig
    config: MuseSparkTextConfig

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.model = MuseSparkTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> CausalLMOutputWithPast:
        return _logits(self, input_ids, arguments)

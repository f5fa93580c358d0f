"""Mistral Large 4 as a causal model, which `transformers` has with a part that sees alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, MistralLarge4TextConfig, MistralLarge4TextModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4PreTrainedModel


class MistralLarge4ForCausalLM(MistralLarge4PreTrainedModel, GenerationMixin):
    """The library's decoder, and the head that it has elsewhere."""

    config_class = MistralLarge4TextConfig
    config: MistralLarge4TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the library's form

    def __init__(self, config: MistralLarge4TextConfig) -> None:
        super().__init__(config)
        self.model = MistralLarge4TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> MoeCausalLMOutputWithPast:
        found = self.model(input_ids, **arguments)
        cap = self.config.final_logit_softcapping
        logits: torch.FloatTensor = cap * torch.tanh(self.lm_head(found.last_hidden_state) / cap)
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

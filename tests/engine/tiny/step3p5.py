"""Step 3.5 as a causal model, which `transformers` has inside Step 3.7 alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, Step3p7TextConfig, Step3p7TextModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The library's decoder and a head."""

    config_class = Step3p7TextConfig
    config: Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the library's form

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> MoeCausalLMOutputWithPast:
        found = self.model(input_ids, **arguments)
        logits: torch.FloatTensor = self.lm_head(found.last_hidden_state)
        return MoeCausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

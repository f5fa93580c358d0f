"""GLM-5-Next as a causal model, which `transformers` has with a part that sees alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, Glm5NextTextConfig, Glm5NextTextModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """The library's decoder, and the head that it has elsewhere."""

    config_class = Glm5NextTextConfig
    config: Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the library's form

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> MoeCausalLMOutputWithPast:
        found = self.model(input_ids, **arguments)
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), past_key_values=found.past_key_values
        )

"""What `transformers` says of a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.engine.tiny.checkpoints import AutoModelForCausalLM


class Reference:
    """Greedy generation by `transformers` in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        for module in self.model.modules():  # transformers before 5.18 ignores the configured limit of gpt-oss
            if module.__class__.__name__ == "GptOssExperts":
                module.limit = self.model.config.swiglu_limit

    @torch.inference_mode()
    def margins(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """How far the logit of each output token is below the largest, given all tokens before it."""
        logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)

    @torch.inference_mode()
    def margins_by_rounding(self, prompt: list[int], output: list[int], moves: int = 8) -> torch.Tensor:
        """The same, of each token the smallest of this model and some whose weights are moved by about what sums in
        another order are: where two tokens or experts to choose are nearly tied, that decides which one is."""
        found, generator = self.margins(prompt, output), torch.Generator()
        weights = {key: weight.clone() for key, weight in self.model.named_parameters()}
        for seed in range(moves):
            generator.manual_seed(seed)
            for key, weight in self.model.named_parameters():
                weight.copy_(weights[key] * (1 + 1e-6 * torch.randn(weight.shape, generator=generator)))
            found = found.minimum(self.margins(prompt, output))
        for key, weight in self.model.named_parameters():
            weight.copy_(weights[key])
        return found

    def agrees(self, prompt: list[int], output: list[int], tie: float = 0.0) -> bool:
        """Whether greedy decoding of `prompt` gives `output`; logits no more than `tie` apart count as equal."""
        return bool(output) and float(self.margins(prompt, output).max()) <= tie

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

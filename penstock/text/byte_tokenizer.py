"""A tokenizer with one token per byte and four control tokens, for models that are not meant to make sense."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('bad role') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, *, chat: bool = True, context_length: int = 512) -> Tokenizer:
    """Write a model folder that has only a tokenizer and a configuration: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context_length,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"eos_token": "<|end|>", **({"chat_template": TEMPLATE} if chat else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return tokenizer

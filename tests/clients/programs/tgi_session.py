"""Clients of text-generation-inference against a server: `huggingface_hub.InferenceClient`, or with `older` the package
`text-generation`. Arguments: the server's address and the model."""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "The capital of France is"
COUNT = "One, two, three,"


def main() -> None:
    url, model, *rest = sys.argv[1:]
    print(json.dumps(older(url) if rest == ["older"] else inference_client(url, model)))


def inference_client(url: str, model: str) -> dict[str, Any]:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import ValidationError

    client = InferenceClient(model=url)
    options: dict[str, Any] = {"max_new_tokens": 8, "return_full_text": False}
    detailed = client.text_generation(PROMPT, details=True, top_n_tokens=2, **options)
    assert detailed.details is not None
    last = list(client.text_generation(PROMPT, stream=True, details=True, **options))[-1]
    try:
        client.text_generation(PROMPT, temperature=-1.0)
        refused = ""
    except ValidationError as error:
        refused = str(error)
    chat = client.chat_completion(model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=8)
    grammar = {"type": "regex", "value": "[0-9]{4}"}
    return {
        "whole": client.text_generation(PROMPT, **options),
        "streamed": "".join(client.text_generation(PROMPT, stream=True, **options)),
        "detailed": detailed.generated_text,
        "tokens": "".join(token.text for token in detailed.details.tokens),
        "top": [len(top) for top in detailed.details.top_tokens or ()],
        "reasons": [detailed.details.finish_reason, last.details.finish_reason if last.details else None],
        "last": last.generated_text,
        "stopped": client.text_generation(COUNT, max_new_tokens=20, stop=[" five"], return_full_text=False),
        "full": client.text_generation(COUNT, max_new_tokens=2, return_full_text=True),
        "formed": client.text_generation("The year is", grammar=grammar, max_new_tokens=8, return_full_text=False),
        "refused": refused,
        "chat": chat.choices[0].message.content,
    }


def older(url: str) -> dict[str, Any]:
    from text_generation import Client
    from text_generation.errors import ValidationError

    client = Client(url, timeout=120)
    whole = client.generate(PROMPT, max_new_tokens=8, decoder_input_details=True)
    events = list(client.generate_stream(COUNT, max_new_tokens=20, stop_sequences=[" five"]))
    try:
        client.generate(PROMPT, max_new_tokens=10**6)
        refused = ""
    except ValidationError as error:
        refused = str(error)
    return {
        "whole": whole.generated_text,
        "reason": whole.details.finish_reason.value,
        "prefill": len(whole.details.prefill),
        "streamed": "".join(event.token.text for event in events),
        "last": events[-1].generated_text,
        "refused": refused,
    }


if __name__ == "__main__":
    main()

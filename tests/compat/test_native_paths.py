"""The own paths of llama.cpp, text-generation-inference and SGLang, with the real model: what their documentation and
tests show is what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx

COUNT = "One, two, three,"
NATIVE: dict[str, Any] = {"prompt": COUNT, "n_predict": 8, "temperature": 0}


def completion(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/completion", json={**NATIVE, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with http.stream("POST", path, json=body) as reply:
        lines = [line[5:].strip() for line in reply.iter_lines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_llama_cpp_streamed_whole_and_as_ids(http: httpx.Client) -> None:
    whole = completion(http, return_tokens=True, n_probs=3)
    assert whole["content"].startswith(" four") and whole["stop_type"] == "limit" and not whole["truncated"]
    assert len(whole["tokens"]) == whole["tokens_predicted"] == whole["timings"]["predicted_n"] == 8
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    assert whole["timings"]["predicted_per_second"] > 0 and whole["timings"]["predicted_ms"] > 0
    odds = whole["completion_probabilities"]
    assert [odd["id"] for odd in odds] == whole["tokens"]
    assert all(odd["id"] == odd["top_logprobs"][0]["id"] and odd["logprob"] <= 0 for odd in odds), "greedy"
    *parts, last = events(http, "/completion", {**NATIVE, "stream": True})
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert last["stop"] and last["generation_settings"]["n_predict"] == 8
    ids = http.post("/tokenize", json={"content": COUNT, "add_special": True}).json()["tokens"]
    assert completion(http, prompt=ids)["content"] == whole["content"]
    both = completion(http, prompt=[ids, COUNT, {"prompt_string": COUNT}])
    assert [each["content"] for each in both] == [whole["content"]] * 3
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == COUNT


def test_llama_cpp_biases_stops_and_templates(http: httpx.Client) -> None:
    assert " four" in completion(http)["content"]
    for bias in ([[" four", False]], {" four": -100}):
        assert " four" not in completion(http, logit_bias=bias)["content"]
    stopped = completion(http, stop=[" five"], n_predict=20)
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == (" four,", "word", " five")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    native = completion(http, prompt=prompt, n_predict=8)
    chat = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0}
    said = http.post("/v1/chat/completions", json=chat).json()
    assert native["content"] == said["choices"][0]["message"]["content"]
    assert native["tokens_evaluated"] == said["usage"]["prompt_tokens"]
    assert http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"}).status_code == 400


def test_generate_says_what_completion_says(http: httpx.Client) -> None:
    expected = completion(http)["content"]
    tgi = {"inputs": COUNT, "parameters": {"max_new_tokens": 8, "details": True}}
    whole = http.post("/generate", json=tgi).json()
    assert whole["generated_text"] == expected and whole["details"]["generated_tokens"] == 8
    streamed = events(http, "/generate_stream", tgi)
    assert "".join(event["token"]["text"] for event in streamed) == streamed[-1]["generated_text"] == expected
    assert [event["token"]["id"] for event in streamed] == [token["id"] for token in whole["details"]["tokens"]]
    sglang = {"text": COUNT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    answer = http.post("/generate", json=sglang).json()
    assert answer["text"] == expected and answer["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    shown = 0
    text = ""
    for event in events(http, "/generate", {**sglang, "stream": True}):  # as SGLang's documentation reads it
        text += event["text"][shown:]
        shown = len(event["text"])
    assert text == expected
    ids = http.post("/tokenize", json={"prompt": COUNT}).json()["tokens"]
    assert http.post("/generate", json={**sglang, "text": None, "input_ids": ids}).json()["text"] == expected

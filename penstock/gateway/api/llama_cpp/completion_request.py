"""Requests of llama.cpp's API as text completion requests. What needs the model's tokenizer (mixed prompts, biases of
texts) is resolved for each model that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.api.llama_cpp.schemas import (
    ADVICE,
    NEUTRAL,
    LlamaCppCompletionRequest,
    LlamaCppOptions,
    PromptObject,
)
from penstock.gateway.app.decoding import not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import REASONS, ignore_advice
from penstock.gateway.generation.samplers import choose_samplers
from penstock.gateway.generation.sampling import SEED_MASK
from penstock.gateway.generation.schemas import CompletionRequest
from penstock.gateway.generation.tokenization import Tokenization, check_size
from penstock.gateway.generation.tokenized_model import TokenizedModel
from penstock.protocol.errors import InvalidRequest

NAMES = (
    (r"max_tokens$", "n_predict"),
    (r"logprobs$", "n_probs"),
    (r"repetition_penalty$", "repeat_penalty"),
    (r"n$", "n_cmpl"),
    (r"return_token_ids$", "return_tokens"),
)
"""Parameters that text completion requests call differently; see `renamed`."""
RANDOM_SEEDS = (-1, 2**32 - 1)
BANNED = -100.0
MOST_BIASES = 1024
"""Tokens, those of texts included."""
Mixed = str | list[int] | list[str | int]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it does not depend on the model."""

    completion: CompletionRequest
    prompts: Sequence[Mixed]
    biases: Sequence[tuple[int | str, float]]
    several: bool
    """The answer is a list."""

    @property
    def plain(self) -> bool:
        """Whether no tokenizer is needed."""
        texts = any(isinstance(token, str) for token, _ in self.biases)
        return not texts and not any(map(_mixed, self.prompts))

    @property
    def texts(self) -> list[str | list[int]]:
        """The prompts without the token ids of mixed ones."""
        found: list[str | list[int]] = []
        for prompt in self.prompts:
            texts = [part for part in prompt if isinstance(part, str)] if isinstance(prompt, list) else []
            found.append("".join(texts) if texts else prompt)  # type: ignore[arg-type]
        return found


def completion_request(exchange: Exchange, request: LlamaCppOptions, name: str) -> Asked:
    """`name`: of the model. What of the request has no effect is noted for the header."""
    _note_advice(exchange, request)
    seed = None if request.seed in RANDOM_SEEDS else request.seed
    completion = CompletionRequest(
        model=name,
        prompt="",
        n=_same(request, "n_cmpl", "n"),
        stream=request.stream,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        typical_p=request.typical_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=None if seed is None else seed & SEED_MASK,
        ignore_eos=request.ignore_eos,
        json_schema=request.json_schema,
        grammar=request.grammar,
        logprobs=_same(request, "n_probs", "logprobs") or None,
        return_token_ids=request.return_tokens,
        samplers=request.samplers,
        speculation=request.speculation,
    )
    if request.repeat_last_n != 0:
        completion.repetition_penalty = request.repeat_penalty
    choose_samplers(exchange, completion)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    completion.stop = [stop for stop in stops if stop]
    prompts, several = _prompts(request) if isinstance(request, LlamaCppCompletionRequest) else ([""], False)
    biases = _biases(request)
    if all(isinstance(token, int) for token, _ in biases):
        completion.logit_bias = {token: bias for token, bias in biases if isinstance(token, int)} or None
    return Asked(completion, prompts, biases, several or (completion.n or 1) > 1)


def asked_tokens(request: LlamaCppOptions) -> int | None:
    """How many tokens are wanted; None: as many as fit."""
    wanted = _same(request, "n_predict", "max_tokens", "max_completion_tokens")
    return None if wanted == -1 else wanted


async def resolved_prompts(
    asked: Asked, model: TokenizedModel, tokenization: Tokenization, tenant: str, window: int
) -> list[str | list[int]]:
    """The prompts with the texts of mixed ones as tokens. As there, only a text at the beginning gets a BOS."""
    found: list[str | list[int]] = []
    for prompt in asked.prompts:
        if not _mixed(prompt):
            found.append(prompt)  # type: ignore[arg-type]
            continue
        tokens: list[int] = []
        for at, part in enumerate(prompt):
            if isinstance(part, int):
                tokens.append(part)
                continue
            check_size(model, len(part), window, "prompt")
            tokens += await tokenization.encode(model, part, tenant=tenant, most=window, add_special_tokens=not at)
            if len(tokens) > window:
                break  # too long in any case
        found.append(tokens)
    return found


def resolved_biases(asked: Asked, model: TokenizedModel) -> dict[int, float]:
    """The bias of each token, also of those that make up a text."""
    found: dict[int, float] = {}
    for token, bias in asked.biases:
        ids = (
            (token,)
            if isinstance(token, int)
            else model.text.encode(token, special=False, add_special_tokens=False, most=MOST_BIASES)
        )
        found.update(dict.fromkeys(ids, bias))
    if len(found) > MOST_BIASES:
        raise InvalidRequest(
            f"`logit_bias` is about {len(found)} tokens; at most {MOST_BIASES} are accepted.", param="logit_bias"
        )
    return found


def _note_advice(exchange: Exchange, request: LlamaCppOptions) -> None:
    for name in ADVICE:
        if getattr(request, name) is not None:
            ignore_advice(exchange, name)
    if request.repeat_last_n not in (None, 0, -1):
        ignore_advice(exchange, "repeat_last_n")
    for name, neutral in NEUTRAL.items():
        if (value := getattr(request, name)) is not None:
            if value not in neutral:
                raise not_supported(name, REASONS.get(name, _WHY.get(name, "")))
            ignore_advice(exchange, name)
    for name, most in (("top_n_sigma", 0.0), ("adaptive_target", -1e-9)):
        if (value := getattr(request, name)) is not None:
            if value > most:
                raise not_supported(name, REASONS.get(name, ""))
            ignore_advice(exchange, name)
    if request.xtc_probability is not None:
        off = request.xtc_probability == 0 or (request.xtc_threshold or 0) > 0.5
        if not off:
            raise not_supported("xtc_probability", REASONS["xtc_probability"])
        ignore_advice(exchange, "xtc_probability")
    if request.lora is not None:
        if any(each.scale for each in request.lora):
            raise not_supported("lora", _WHY["lora"])
        ignore_advice(exchange, "lora")


_WHY = {
    "lora": "an adapter is a model of its own; send its name as `model`",
    "post_sampling_probs": "probabilities are those of the model, before any filter",
    "min_keep": "the filters keep at least one token",
}


def _same(request: LlamaCppOptions, *names: str) -> int | None:
    """The value of a parameter that has several names."""
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    if len(set(given.values())) > 1:
        first, other = list(given)[:2]
        raise InvalidRequest(f"`{first}` and `{other}` differ; send one of them.", param=first)
    return next(iter(given.values()), None)


def _biases(request: LlamaCppOptions) -> list[tuple[int | str, float]]:
    given = request.logit_bias
    found: list[tuple[int | str, float]] = []
    if given is None:
        return found
    pairs = given.items() if isinstance(given, dict) else given
    for at, (token, bias) in enumerate(pairs):
        where = f"logit_bias[{at}]"
        if isinstance(token, str):
            spells_id = isinstance(given, dict) and token.isdecimal() and len(token) < 10
        else:
            spells_id = token is not False and token.is_integer() and token >= 0
        if spells_id:
            token = int(token)
        if isinstance(token, bool) or not isinstance(token, int | str):
            raise InvalidRequest(f"`{where}` must begin with a token id or a text.", param=where)
        if isinstance(bias, str) or (bias is not False and not -100 <= bias <= 100):
            raise InvalidRequest(f"`{where}` must end with a number from -100 to 100, or false.", param=where)
        found.append((token, BANNED if bias is False else float(bias)))
    return found


def _prompts(request: LlamaCppCompletionRequest) -> tuple[list[Mixed], bool]:
    """The prompts, and whether there may be several."""
    given = request.prompt
    if not isinstance(given, list):
        return [_text(given)], False
    if any(isinstance(part, int) for part in given):
        if all(isinstance(part, int | str) for part in given):
            return [given], False  # type: ignore[list-item]
        raise InvalidRequest("`prompt` mixes token ids with whole prompts.", param="prompt")
    return [part if isinstance(part, list) else _text(part) for part in given], True  # type: ignore[arg-type]


def _text(prompt: str | PromptObject) -> str:
    if isinstance(prompt, str):
        return prompt
    if prompt.multimodal_data:
        raise InvalidRequest(
            "Images are not supported: the models served here read text only.",
            param="prompt.multimodal_data",
            code="unsupported_parameter",
        )
    return prompt.prompt_string


def _mixed(prompt: Mixed) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, str) for part in prompt)

"""Builds a tokenizer from GGUF metadata, equal to the one the model was published with.

Three kinds exist: byte-level BPE (`gpt2`, cut into words by a named pre-tokenizer before merging), SentencePiece
BPE (`llama`, merges ordered by score, byte fallback), and the same with the merges in the file (`gemma4`). An unknown
pre-tokenizer is refused, because a tokenizer that is almost right silently makes a model worse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.engine.loading.gguf import GGUFFile
from penstock.errors import CheckpointError
from penstock.text import deepseek_words

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"

LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST
QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + f"{_CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + f"{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "phi-2"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _single_digits),
    **dict.fromkeys((*_LLAMA3_LIKE, "dbrx", "smaug-bpe"), _split(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _split(QWEN2)),
    "tekken": _split(TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(GPT4O)),
    **deepseek_words.PRE_TOKENIZERS,
}
"""By `tokenizer.ggml.pre`."""

_WHOLE_WORDS = (*_LLAMA3_LIKE, "tekken")
"""Pre-tokenizers whose models use a word that is in the vocabulary directly, without merging (`ignore_merges`)."""

_GEMMA4_CONTROL = frozenset({
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
})  # fmt: skip
"""Control tokens of Gemma 4 that files mark as user-defined, so that llama.cpp shows them in what it returns."""

_BOS_BY_DEFAULT = (*_LLAMA3_LIKE, "tekken")


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer described by a file's metadata."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{file.path} has no tokenizer; use a file that contains one")
    if not isinstance(kind, str):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model must be a name, found {kind!r:.80}")
    tokens = _strings(file, "tokens")
    kinds = [int(entry) for entry in _numbers(file, "token_type", len(tokens), NORMAL)]
    for name in ("bos", "eos", "unknown"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", 0)
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < len(tokens):
            raise CheckpointError(
                f"{file.path}: its {name} token is {token!r:.80}, outside a vocabulary of {len(tokens)}"
            )
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
        bos_default = metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens, kinds)
        bos_default = True
    elif kind == "gemma4":
        tokenizer = _gemma4(file, tokens)
        kinds = [CONTROL if token in _GEMMA4_CONTROL else own for token, own in zip(tokens, kinds, strict=True)]
        bos_default = True
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer kind {kind!r:.80} is not supported; supported: gemma4, gpt2, llama"
        )
    _add_tokens(tokenizer, tokens, kinds)
    _add_post_processor(tokenizer, file, tokens, bos_default)
    return tokenizer


def _strings(file: GGUFFile, name: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} must be a list of strings; the file is damaged")
    return found


def _numbers(file: GGUFFile, name: str, count: int, default: float) -> list[float]:
    """One finite number per token."""
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if found is None:
        return [default] * count
    if not isinstance(found, np.ndarray) or len(found) != count or not bool(np.isfinite(found).all()):
        raise CheckpointError(
            f"{file.path}: its vocabulary and tokenizer.ggml.{name} differ in length, or it holds no numbers"
        )
    numbers: list[float] = found.tolist()
    return numbers


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    metadata = file.metadata
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r:.80} is not known; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    tokenizer = Tokenizer(_bpe(file, tokens, ignore_merges=pre in _WHOLE_WORDS))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(file: GGUFFile, tokens: list[str], **how: Any) -> models.BPE:
    """With the merges of the file."""
    merges: list[tuple[str, str]] = []
    for merge in _strings(file, "merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(f"{file.path}: a merge of its tokenizer is not two pieces")
        merges.append((left, right))
    try:
        return models.BPE(vocab=_by_token(tokens), merges=merges, **how)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.path}: its tokenizer makes no sense ({error!s:.300})") from error


def _gemma4(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Merges run over the whole text, in which spaces are "▁"; what is in no token becomes bytes."""
    if not _strings(file, "merges"):
        raise CheckpointError(f"{file.path}: a gemma4 tokenizer needs tokenizer.ggml.merges, which is missing")
    unknown = tokens[file.metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(_bpe(file, tokens, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    metadata = file.metadata
    if "tokenizer.ggml.scores" not in metadata:
        raise CheckpointError(f"{file.path}: a llama tokenizer needs tokenizer.ggml.scores, which is missing")
    scores = _numbers(file, "scores", len(tokens), 0.0)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=_by_token(tokens),
        merges=merges_by_score(tokens, kinds, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_by_score(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece, best first: every way to compose a token from two others,
    ordered by the token's score."""
    pieces = {token: index for index, token in enumerate(tokens) if kinds[index] in (NORMAL, UNUSED)}
    merges: list[tuple[str, str]] = []
    for token in sorted(pieces, key=lambda token: -scores[pieces[token]]):
        pairs = [
            (left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in pieces and (right := token[cut:]) in pieces
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges += pairs
    return merges


def _by_token(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are recognised in text only where the caller allows it; user-defined ones always are."""
    special = [_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    plain = [_added(token) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _add_post_processor(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], bos_default: bool) -> None:
    metadata = file.metadata
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    pieces, used = ["$A"], []
    # llama.cpp adds it in front of Gemma 4's texts whatever the file says: early files say the wrong thing.
    always = metadata.get("tokenizer.ggml.model") == "gemma4"
    if (always or metadata.get("tokenizer.ggml.add_bos_token", bos_default)) and bos is not None:
        pieces.insert(0, tokens[bos])
        used.append((tokens[bos], bos))
    if metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        pieces.append(tokens[eos])
        used.append((tokens[eos], eos))
    if used:
        try:
            tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)
        except ValueError as error:
            raise CheckpointError(f"{file.path}: its bos or eos token cannot be added ({error!s:.300})") from error

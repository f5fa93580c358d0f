"""`adapter_config.json` of a PEFT adapter: what of it matters here, and what of LoRA's is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

RULES = KeyRules(
    reader="LoRA adapters",
    reference={
        "velora_config": None,
        "alora_invocation_tokens": None,
        "use_qalora": False,
        "monteclora_config": None,
        "layer_replication": None,
        "arrow_config": None,
        "kasa_config": None,
        "megatron_config": None,
    },
    read={
        "peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "target_modules", "exclude_modules",
        "layers_to_transform", "target_parameters", "rank_pattern", "alpha_pattern", "ensure_weight_tying",
        "modules_to_save", "trainable_token_indices", "use_dora", "lora_bias", "fan_in_fan_out",
    },
    limited={
        "bias": ("none", "all", "lora_only"),
        "use_bdlora": (None, False, {}),
    },
    inert={
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "qalora_group_size", "runtime_config",
    },
    strict=True,
)  # fmt: skip
"""The reference is peft's `LoraConfig`. `init_lora_weights` says how an adapter was initialized; the settings of each
way are inert."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations after which the adapter fits the base model as it was. Others change the base too, unless the adapter
was converted when saved."""


_MOST_RANK = 8192
"""Of what is converted: matrices are made on the way that are larger than those in the file."""
_PLAIN_PATTERN = re.compile(r"\^?(?:\.\*)?(?:\\\.|[\w.])*\$?")
"""Patterns that are names, perhaps behind anything: those that PEFT writes. Others could take for ever to match."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The parts of `adapter_config.json` that matter here."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    """Names of modules, or the ends of their paths; None where any may be changed, or a pattern says which."""
    excluded: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    """None: any."""
    parameters: tuple[str, ...] = ()
    """Parameters that are changed though no linear holds them, or the ends of their paths."""
    rooted: bool = False
    """Whether products are divided by the square root of the rank."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Ranks and alphas of modules whose paths match, where they are not those of the others."""
    tied: bool = False
    """Whether an adapter of the embedding is one of the head too, where these are tied."""
    saved: tuple[str, ...] = ()
    """Ends of the paths of modules that were trained as a whole."""
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tokens whose rows were trained one by one, by the end of the module's path; empty: the embedding."""
    dora: bool = False
    """Whether every changed linear has a magnitude."""
    transposed: bool = False
    """Whether the base's matrices are [in, out], as the configuration has it."""
    biased: bool = False
    """Whether every B has a bias."""
    kind: str = "LoRA"
    """What the adapter is called, for messages."""
    adaption: Mapping[str, int] = field(default_factory=dict)
    """Of adaption prompts: how many tokens, and in how many layers."""
    ranks: Mapping[str, int] | None = None
    """Of an adapter of another kind that was converted: the rank of each module's pair of matrices, by its path; the
    product then has no factor."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Of LoRA."""
        where = CONFIG
        RULES.check(raw, where)
        start = raw.get("init_lora_weights", True)
        if not any(start is choice or (isinstance(start, str) and start == choice) for choice in _KEEPS_BASE):
            raise CheckpointError(
                f"{where}: init_lora_weights {start!r:.80} changes the base model; save it as a plain LoRA first"
            )
        rank, alpha = _rank(raw, "r", 8), _alpha(raw, "lora_alpha")
        rooted, tied = _flag(raw, "use_rslora"), _flag(raw, "ensure_weight_tying")
        targets, layers = raw.get("target_modules"), raw.get("layers_to_transform")
        return cls(
            rank,
            alpha,
            # A pattern is not evaluated: it could take for ever, and the tensors say what it matched.
            None if targets is None or isinstance(targets, str) else _strings(targets, "target_modules"),
            _strings(raw.get("exclude_modules"), "exclude_modules"),
            None if layers is None or layers == [] else _integers(layers, "layers_to_transform"),
            _strings(raw.get("target_parameters"), "target_parameters"),
            rooted,
            _patterns(raw.get("rank_pattern"), "rank_pattern", int),
            _patterns(raw.get("alpha_pattern"), "alpha_pattern", (int, float)),
            tied,
            _strings(raw.get("modules_to_save"), "modules_to_save", only=True),
            _token_rows(raw.get("trainable_token_indices")),
            _flag(raw, "use_dora"),
            _flag(raw, "fan_in_fan_out"),
            _flag(raw, "lora_bias"),
        )

    @classmethod
    def of_kind(
        cls, raw: Mapping[str, Any], kind: str, *, rank_key: str = "", default_rank: int = 1, alpha_key: str = "",
        patterns: bool = False,
    ) -> LoraConfig:  # fmt: skip
        """What other kinds have in common with LoRA. `rank_key`, `alpha_key`: what they call these two, if they have
        them; `patterns`: whether modules may have others."""
        targets, layers = raw.get("target_modules"), raw.get("layers_to_transform")
        rank = _rank(raw, rank_key, default_rank) if rank_key else 1
        if rank > _MOST_RANK:
            raise CheckpointError(f"{CONFIG}: {rank_key} is {rank}; other kinds than LoRA may have {_MOST_RANK}")
        return cls(
            rank,
            _alpha(raw, alpha_key) if alpha_key else 1,
            None if targets is None or isinstance(targets, str) else _strings(targets, "target_modules"),
            _strings(raw.get("exclude_modules"), "exclude_modules"),
            None if layers is None or layers == [] else _integers(layers, "layers_to_transform"),
            rank_pattern=_patterns(raw.get("rank_pattern"), "rank_pattern", int) if patterns else {},
            alpha_pattern=_patterns(raw.get("alpha_pattern"), "alpha_pattern", (int, float)) if patterns else {},
            saved=_strings(raw.get("modules_to_save"), "modules_to_save", only=True),
            token_rows=_token_rows(raw.get("trainable_token_indices")),
            transposed=_flag(raw, "fan_in_fan_out"),
            kind=kind,
        )

    def tokens_of(self, path: str, tied: bool) -> tuple[int, ...] | None:
        """The tokens of the module with this path whose rows were trained, in the order of the file. `tied`: the head
        has those of the embedding where it has none of its own, and the other way round."""
        for name, tokens in self.token_rows.items():
            if path.endswith(name) and name:
                return tokens
        every = set(self.token_rows.values())
        return next(iter(every)) if "" in self.token_rows or (tied and len(every) == 1) else None

    def applies(self, module: str, parameter: str, layer: int | None) -> bool:
        """Whether the configuration lets the module with this path be changed, or its `parameter`. `layer`: None where
        it belongs to none."""
        if _is_named(f"{module}.{parameter}", self.parameters):
            return True
        if self.targets is not None and not _is_named(module, self.targets):
            return False
        return not _is_named(module, self.excluded) and (self.layers is None or layer in self.layers)

    def rank_of(self, path: str) -> int:
        if self.ranks is not None:
            if path not in self.ranks:
                raise CheckpointError(
                    f"{WEIGHTS}: cannot apply the matrices of {path}, which {self.kind} does not have"
                )
            return self.ranks[path]
        rank: int = _matching(self.rank_pattern, path, self.rank)
        return rank

    def scale_of(self, path: str) -> float:
        """What the product of both matrices is multiplied by."""
        if self.ranks is not None:
            return 1.0
        rank = self.rank_of(path)
        alpha: float = _matching(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.rooted else rank)


def _rank(raw: Mapping[str, Any], key: str, default: int) -> int:
    rank = raw.get(key, default)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{CONFIG}: {key} must be a positive integer, found {rank!r:.80}")
    return rank


def _alpha(raw: Mapping[str, Any], key: str) -> float:
    alpha = raw.get(key, 8)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
        raise CheckpointError(f"{CONFIG}: {key} must be a number, found {alpha!r:.80}")
    return alpha


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if value not in (True, False, None):
        raise CheckpointError(f"{CONFIG}: {key} must be true or false, found {value!r:.80}")
    return bool(value)


def _matching(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """As PEFT matches them: the first whose pattern is all of the path or its end."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(?:.*\.)?(?:{pattern})$", path))
    return next(found, default)


def _patterns(value: Any, key: str, kind: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(number, kind) and not isinstance(number, bool) and 0 < abs(number) < 1e30
        for number in value.values()
    ):
        raise CheckpointError(f"{CONFIG}: {key} must give numbers by names of modules, found {value!r:.80}")
    if kind is int and min(value.values(), default=1) < 1:
        raise CheckpointError(f"{CONFIG}: {key} must give positive integers, found {value!r:.80}")
    for pattern in value:
        if len(pattern) > 200 or not _PLAIN_PATTERN.fullmatch(pattern):
            raise CheckpointError(
                f"{CONFIG}: {key} has the pattern {pattern!r:.80}; only names of modules are supported"
            )
    return value


def _is_named(module: str, names: Collection[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _token_rows(value: Any) -> Mapping[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    if value is None:
        return {}
    if isinstance(value, dict):
        return {name: _integers(tokens, key) for name, tokens in value.items()}
    return {"": _integers(value, key)}


def _strings(value: Any, key: str, *, only: bool = False) -> tuple[str, ...]:
    """`only`: nothing but a list of names will do."""
    if value is None or (isinstance(value, str) and not only):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        kinds = "a list of names" if only else "a list of names or a pattern"
        raise CheckpointError(f"{CONFIG}: {key} must be {kinds}, found {value!r:.80}")
    return tuple(value)


def _integers(value: Any, key: str) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise CheckpointError(f"{CONFIG}: {key} must be one or more integers, found {value!r:.80}")
    return tuple(numbers)

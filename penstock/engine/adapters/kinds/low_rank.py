"""Kinds that change a matrix by a product of two thin ones, written as such a pair.

| kind | change of W | rank of the pair |
|---|---|---|
| AdaLoRA | s / (r + 1e-5) B diag(E) A, r the initial rank | of what is left of E |
| VeRA | diag(b) B diag(d) A, with A and B of all linears | r |
| LoHa | s (W1a W1b) * (W2a W2b), number by number | r^2 |
| LoKr | s W1 (x) W2, a Kronecker product | the product of both ranks |
| MiSS | B times sums of every r-th input | r |
| DeLoRA | lambda / r B diag(1 / (|a| |b|)) A diag(w) | r |
| VB-LoRA | B A, made of vectors of a bank | r |

Where a pair would have a higher rank than the matrix, it is the change itself and the identity. Factors are inside B:
what is computed is the same in another order, and rounded to the type of adapters once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import Converted, Module, Tensors, modules_of
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

Pair = tuple[Tensor, Tensor]
"""A [r, inputs] and B [outputs, r] in float32."""


class _Pairs(Protocol):
    """What a kind makes of a module."""

    def rank(self, module: Module) -> int:
        """Of its pair, by the shapes of what is stored."""
        ...

    def pair(self, module: Module) -> Pair: ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """One kind; see `kinds.read_settings` and `kinds.as_lora`."""

    title: str
    rules: KeyRules
    tensors: tuple[str, ...]
    """Names of a module's tensors."""
    make: Callable[[Mapping[str, Any], LoraConfig, Sequence[Module], Mapping[str, Tensor]], _Pairs]
    """From the configuration, the modules, and what all modules share."""
    rank_key: str = "r"
    default_rank: int = 8
    alpha_key: str = ""
    patterns: bool = False
    """Whether modules may have ranks and factors of their own."""
    shared: tuple[str, ...] = ()
    """Tensors that all modules have in common."""

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        return LoraConfig.of_kind(
            raw,
            self.title,
            rank_key=self.rank_key,
            default_rank=self.default_rank,
            alpha_key=self.alpha_key,
            patterns=self.patterns,
        )

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        modules, others = modules_of(tensors, self.tensors, layout)
        names = {f"base_model.{name}{end}": name for name in self.shared for end in ("", ".default")}
        shared = {names[key]: tensors.get_tensor(key).float() for key in others if key in names}
        pairs = self.make(raw, settings, modules, shared)
        made: dict[str, Callable[[], Tensor]] = {}
        ranks: dict[str, int] = {}
        for module in modules:
            rank = pairs.rank(module)
            if rank < 1 and self.make is not _AdaLora:
                raise CheckpointError(f"{WEIGHTS}: tensors of {module.path} are empty")
            if rank < 1:
                continue  # training may have pruned all of a module
            ranks[module.path] = rank if module.shape is None else min(rank, *module.shape)
            made |= _both(module, pairs, ranks[module.path])
        kept = [key for key in others if key not in names]
        return replace(settings, ranks=ranks), Converted(tensors, kept, made)


def _both(module: Module, pairs: _Pairs, rank: int) -> dict[str, Callable[[], Tensor]]:
    found: list[Pair] = []

    def side(index: int) -> Tensor:
        if not found:
            a, b = pairs.pair(module)
            if len(a) > rank:
                if (len(b), a.shape[1]) != module.shape:
                    raise CheckpointError(
                        f"{WEIGHTS}: matrices of {module.path} make one of {len(b)} x {a.shape[1]}, not "
                        f"{' x '.join(map(str, module.model_shape()))}"
                    )
                a, b = _of_matrix(b @ a)
            found.append((a, b))
        tensor = found[0][index]
        if index:  # B is asked for last: an adapter's pairs are never all in memory
            found.clear()
        return tensor

    return {f"{module.key}.lora_{'AB'[index]}.weight": lambda index=index: side(index) for index in range(2)}  # type: ignore[misc]


def _of_matrix(change: Tensor) -> Pair:
    """A matrix as a pair: itself and the identity, the smaller one of two."""
    rows, columns = change.shape
    return (change, torch.eye(rows)) if rows <= columns else (torch.eye(columns), change)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What pairs are made from."""

    raw: Mapping[str, Any]
    settings: LoraConfig
    modules: Sequence[Module]
    shared: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _AdaLora(_Adapter):
    def __post_init__(self) -> None:
        if self.settings.alpha <= 0:
            raise CheckpointError(f"{CONFIG}: lora_alpha of AdaLoRA must be above 0, found {self.settings.alpha}")
        pattern = self.raw.get("rank_pattern")
        if not isinstance(pattern, dict | None):
            raise CheckpointError(f"{CONFIG}: rank_pattern of AdaLoRA must be an object, found {pattern!r:.80}")

    def rank(self, module: Module) -> int:
        stored, first = module.size("lora_A", 2)[0], self.settings.rank
        kept = (self.raw.get("rank_pattern") or {}).get(f"{module.path}.lora_E")
        wanted = first if kept is None else sum(map(bool, kept)) if isinstance(kept, list) else -1
        if stored != wanted:
            raise CheckpointError(
                f"{WEIGHTS}: {module.path} has rank {stored}, and {CONFIG} gives it {wanted} (init_r, rank_pattern)"
            )
        return stored

    def pair(self, module: Module) -> Pair:
        rank, scale = self.rank(module), self.settings.alpha / (self.settings.rank + 1e-5)
        a = module.tensor("lora_A", rank, None) * module.tensor("lora_E", rank, 1)
        return a, module.tensor("lora_B", None, rank) * scale


class _Vera:
    def __init__(
        self, raw: Mapping[str, Any], settings: LoraConfig, modules: Sequence[Module], shared: Mapping[str, Tensor]
    ) -> None:
        self._rank = settings.rank
        if len(shared) < 2 and raw.get("save_projection", True):
            raise CheckpointError(f"{WEIGHTS} has no vera_A and vera_B, and {CONFIG} has save_projection: true")
        self._modules = modules
        self._key = 0
        self._both: Pair | None = None
        """A and B; drawn when they are first needed, which is when the rank is known to fit into a slot."""
        if len(shared) == 2:
            self._both = shared["vera_A"], shared["vera_B"]
            if any(one.dim() != 2 for one in self._both):
                raise CheckpointError(f"{WEIGHTS}: vera_A and vera_B must be matrices")
            return
        key = raw.get("projection_prng_key", 0)
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < 1 << 63:
            raise CheckpointError(f"{CONFIG}: projection_prng_key must be an integer from 0 on, found {key!r:.80}")
        self._key = key

    def rank(self, module: Module) -> int:
        return self._rank

    def pair(self, module: Module) -> Pair:
        outputs, inputs = module.model_shape()
        self._both = a, b = self._both or self._drawn()
        if a.shape[1] < inputs or b.shape[0] < outputs or a.shape[0] != self._rank or b.shape[1] != self._rank:
            raise CheckpointError(
                f"{WEIGHTS}: vera_A and vera_B are {tuple(a.shape)} and {tuple(b.shape)}, which do not fit "
                f"{module.path}, which is {(outputs, inputs)} with r {self._rank}"
            )
        a = a[:, :inputs] * module.tensor("vera_lambda_d", self._rank).unsqueeze(1)
        return a, b[:outputs] * module.tensor("vera_lambda_b", outputs).unsqueeze(1)

    def _drawn(self) -> Pair:
        shapes = [module.model_shape() for module in self._modules]
        outputs, inputs = (max(shape[side] for shape in shapes) for side in (0, 1))
        generator = torch.Generator().manual_seed(self._key)
        a = _projection(self._rank, inputs, generator)
        return a, _projection(outputs, self._rank, generator)


def _projection(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """As PEFT draws it: uniformly, with a variance of two over the columns."""
    bound = math.sqrt(6 / columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


class _LoHa(_Adapter):
    def rank(self, module: Module) -> int:
        rank: int = self.settings.rank_of(module.path) ** 2
        return rank

    def pair(self, module: Module) -> Pair:
        rank, scale = self.settings.rank_of(module.path), self.settings.scale_of(module.path)
        outputs, inputs = module.model_shape()
        left, other_left = (module.tensor(f"hada_w{number}_a", outputs, rank) for number in (1, 2))
        right, other_right = (module.tensor(f"hada_w{number}_b", rank, inputs) for number in (1, 2))
        if rank * rank > min(outputs, inputs):
            return _of_matrix((left @ right) * (other_left @ other_right) * scale)
        b = (left.unsqueeze(2) * other_left.unsqueeze(1)).flatten(1) * scale
        return (right.unsqueeze(1) * other_right.unsqueeze(0)).flatten(0, 1), b


class _LoKr(_Adapter):
    def rank(self, module: Module) -> int:
        return math.prod(min(self._sizes(module, name)) for name in ("lokr_w1", "lokr_w2"))

    def pair(self, module: Module) -> Pair:
        (rows, columns, *_), (more_rows, more_columns, *_) = (self._sizes(module, f"lokr_w{n}") for n in (1, 2))
        if (rows * more_rows, columns * more_columns) != module.model_shape():
            raise CheckpointError(
                f"{WEIGHTS}: factors of {module.path} are {rows} x {columns} and {more_rows} x {more_columns}; their "
                f"product must be {' x '.join(map(str, module.model_shape()))}"
            )
        (left, right), (other_left, other_right) = (self._factors(module, name) for name in ("lokr_w1", "lokr_w2"))
        b = torch.kron(left, other_left) * self.settings.scale_of(module.path)
        return torch.kron(right, other_right), b

    def _sizes(self, module: Module, name: str) -> tuple[int, ...]:
        """Rows, columns and rank of a factor of the Kronecker product."""
        if name in module.keys:
            return module.size(name, 2)
        return module.size(f"{name}_a", 2)[0], module.size(f"{name}_b", 2)[1], self.settings.rank_of(module.path)

    def _factors(self, module: Module, name: str) -> Pair:
        """Two matrices whose product the factor is, as thin as its shape allows."""
        if name in module.keys:
            whole = module.tensor(name, None, None)
        else:
            rank = self.settings.rank_of(module.path)
            left, right = module.tensor(f"{name}_a", None, rank), module.tensor(f"{name}_b", rank, None)
            if rank <= min(len(left), right.shape[1]):
                return left, right
            whole = left @ right
        right, left = _of_matrix(whole)
        return left, right


class _Miss(_Adapter):
    def rank(self, module: Module) -> int:
        return self.settings.rank

    def pair(self, module: Module) -> Pair:
        rank, (outputs, inputs) = self.settings.rank, module.model_shape()
        mini = self.raw.get("mini_r", 1) if self.raw.get("init_weights", True) == "mini" else outputs
        if not isinstance(mini, int) or mini < 1 or outputs % mini:
            raise CheckpointError(f"{CONFIG}: mini_r must divide the {outputs} outputs of {module.path}")
        if rank > inputs:
            raise CheckpointError(f"{CONFIG}: r is {rank}, and {module.path} has {inputs} inputs")
        block = module.tensor("miss_block", rank, mini)
        a = torch.eye(rank).repeat(1, -(-inputs // rank))[:, :inputs]
        return a, block.repeat(1, outputs // mini).t()


class _DeLora(_Adapter):
    def rank(self, module: Module) -> int:
        return self.settings.rank_of(module.path)

    def pair(self, module: Module) -> Pair:
        rank = self.rank(module)
        a, b = module.tensor("delora_A", rank, None), module.tensor("delora_B", None, rank)
        lengths = a.norm(dim=1).clamp(min=1e-4) * b.norm(dim=0).clamp(min=1e-4)
        return a * module.tensor("delora_w_norm", a.shape[1]), b * (module.tensor("delora_lambda", 1) / rank / lengths)


class _VbLora:
    def __init__(
        self, raw: Mapping[str, Any], settings: LoraConfig, modules: Sequence[Module], shared: Mapping[str, Tensor]
    ) -> None:
        if "vblora_vector_bank" not in shared:
            raise CheckpointError(f"{WEIGHTS} has no vblora_vector_bank")
        self._bank = shared["vblora_vector_bank"]
        if self._bank.dim() != 2 or not self._bank.numel():
            raise CheckpointError(f"{WEIGHTS}: vblora_vector_bank is {tuple(self._bank.shape)}, not a list of vectors")
        self._rank = settings.rank
        topk = raw.get("topk", 2)
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= len(self._bank):
            raise CheckpointError(f"{CONFIG}: topk must be one of the bank's {len(self._bank)} vectors or more of them")
        self._topk = topk

    def rank(self, module: Module) -> int:
        return self._rank

    def pair(self, module: Module) -> Pair:
        length = self._bank.shape[1]
        outputs, inputs = module.model_shape()
        if outputs % length or inputs % length:
            raise CheckpointError(
                f"{WEIGHTS}: {module.path} is {(outputs, inputs)}, no multiple of vectors of {length}"
            )
        a = self._vectors(module, "A", (self._rank, inputs // length))
        b = self._vectors(module, "B", (outputs // length, self._rank))
        return a.flatten(1), b.transpose(1, 2).flatten(0, 1)

    def _vectors(self, module: Module, side: str, sizes: tuple[int, int]) -> Tensor:
        """[*sizes, length]"""
        name = f"vblora_logits_{side}"
        if f"{name}_topk_indices" in module.keys:
            chosen = module.tensor(f"{name}_topk_indices", *sizes, self._topk).long()
            weights = module.tensor(f"{name}_topk_weights", *sizes, self._topk - 1)
            weights = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), -1)
            if not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self._bank):
                raise CheckpointError(f"{WEIGHTS}: {module.path} names vectors that the bank does not have")
        else:
            logits, chosen = module.tensor(name, *sizes, len(self._bank)).topk(self._topk, dim=-1)
            weights = logits.softmax(-1)
        # Summed as they are looked up: all that were chosen could be far more than the matrix.
        summed: Tensor = torch.nn.functional.embedding_bag(
            chosen.flatten(0, 1), self._bank, mode="sum", per_sample_weights=weights.flatten(0, 1)
        )
        return summed.view(*sizes, -1)


_LOGITS = tuple(f"vblora_logits_{side}{end}" for side in "AB" for end in ("", "_topk_indices", "_topk_weights"))
_LOKR = tuple(f"lokr_w{number}{end}" for number in (1, 2) for end in ("", "_a", "_b"))
LOW_RANK: Mapping[str, LowRank] = {
    "ADALORA": LowRank(
        "AdaLoRA", rules.ADALORA, ("lora_A", "lora_B", "lora_E"), _AdaLora,
        rank_key="init_r", default_rank=12, alpha_key="lora_alpha",
    ),
    "VERA": LowRank(
        "VeRA", rules.VERA, ("vera_lambda_b", "vera_lambda_d"), _Vera,
        default_rank=256, shared=("vera_A", "vera_B"),
    ),
    "LOHA": LowRank(
        "LoHa", rules.LOHA, tuple(f"hada_w{number}_{side}" for number in (1, 2) for side in "ab"), _LoHa,
        alpha_key="alpha", patterns=True,
    ),
    "LOKR": LowRank("LoKr", rules.LOKR, _LOKR, _LoKr, alpha_key="alpha", patterns=True),
    "MISS": LowRank("MiSS", rules.MISS, ("miss_block",), _Miss, default_rank=64),
    "DELORA": LowRank(
        "DeLoRA", rules.DELORA, ("delora_A", "delora_B", "delora_lambda", "delora_w_norm"), _DeLora, patterns=True,
    ),
    "VBLORA": LowRank("VB-LoRA", rules.VBLORA, _LOGITS, _VbLora, default_rank=4, shared=("vblora_vector_bank",)),
}  # fmt: skip
"""By `peft_type`."""

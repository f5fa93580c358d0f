"""Whole matrices and single rows of embedding and head in an adapter's file.

PEFT saves such matrices in three cases: they were trained (`modules_to_save`), the vocabulary was resized, or they are
the base of an adapter of this module. Rows of single tokens were trained in place (`trainable_token_indices`). All are
what the model has with the adapter; rows that the model has too are not kept. Rows behind the model's vocabulary are
tokens of the adapter's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.adapters.layout import AdapterCut, Site, rows_of
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.rows import EndRows, ReplacedRows
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.models.normed_rows import normed_rows
from penstock.errors import CheckpointError

VIRTUAL = "virtual_tokens"
"""The name of what an adapter of learned inputs puts before prompts, once it is converted."""
_FORMS = {
    f".{VIRTUAL}": "virtual",
    ".token_adapter.trainable_tokens_delta": "tokens",
    ".token_adapter.base_layer.weight": "base",
    ".base_layer.weight": "base",
    ".modules_to_save.weight": "saved",
    ".original_module.weight": "original",
    ".weight": "saved",
}
"""What comes behind the path of a module, and what it is: `original` was replaced by what was saved. The first that
fits counts."""


class KnownMatrices(Protocol):
    """The embedding and the head of a model, as far as an adapter's file can be compared with them."""

    def changed(self, attribute: str, rows: Tensor, *, trained: bool) -> Tensor:
        """int64: which of these first rows of the embedding, or of this rank's head, are not the model's own. Where
        that cannot be known: all, if they were `trained`, or else none."""
        ...


@dataclass(slots=True)
class EndTensors:
    """Collects the tensors of one file, then reads them."""

    file: str
    cut: AdapterCut
    ends: Mapping[str, int]
    """Sites by the name of the module."""
    config: LoraConfig
    base: KnownMatrices | None
    dtype: torch.dtype
    most: int | None = None
    """Rows of each end that there is room for; None: any number."""
    room: int = 0
    """Tokens that adapters may have beyond the model's."""
    _keys: dict[tuple[str, str], str] = field(default_factory=dict)
    _paths: dict[str, str] = field(default_factory=dict)

    def take(self, key: str) -> bool:
        """Whether a tensor is one of these."""
        name = key.replace(".default", "").removeprefix("base_model.model.")
        form = next((form for form in _FORMS if name.endswith(form)), "")
        path = name.removesuffix(form)
        module = path.rpartition(".")[2]
        if not form or module not in self.ends or (self.cut.whole.virtual_only and _FORMS[form] != "virtual"):
            return False
        self._keys.setdefault((module, _FORMS[form]), key)
        self._paths[module] = path
        return True

    @property
    def any(self) -> bool:
        return bool(self._keys)

    def read(
        self,
        tensors: Any,
        hashed: Callable[[str, Tensor], None],
        *,
        tied: bool,
        further: Mapping[str, Tensor],
    ) -> EndRows | None:
        """`hashed` is called with what may be replaced; `tied`: whether the model's head is its embedding; `further`:
        what the adapter's own products add to rows behind the vocabulary, by module. Of a rank that has no part of what
        is replaced the rows are empty; None: the adapter replaces nothing on any rank."""
        self._check_declared(tied)
        for module, form in self._keys:
            if form == "virtual":
                return self._virtual(module, tensors, hashed)
        rows: dict[str, ReplacedRows | None] = {"embedding": None, "head": None}
        added, tokens, changes = None, None, False
        for module, index in self.ends.items():
            site = self.cut.whole.sites[index]
            vocabulary, first = _vocabulary(site), site.end == "embedding"
            ids, values = torch.empty(0, dtype=torch.int64), torch.empty(0, _hidden(site))
            span = (0, vocabulary) if first else self._span(index)
            matrix, trained = self._whole(module, site, tensors, hashed, tied)
            if matrix is not None:
                ids, values = self._changed(module, site, matrix, span, trained)
            named, trained_rows = self._tokens(module, site, tensors, hashed, tied)
            changes = changes or trained or bool(len(named)) or (matrix is not None and len(matrix) != vocabulary)
            if len(named):
                here = ((named >= span[0]) & (named < span[1])) | (named >= vocabulary)
                named, trained_rows = named[here], trained_rows[here]
                kept = ~torch.isin(ids, named)
                ids, values = torch.cat((ids[kept], named)), torch.cat((values[kept], trained_rows.to(values.dtype)))
            if first and site.norm_eps is not None:
                if len(named):
                    raise CheckpointError(
                        f"{CONFIG}: trainable_token_indices is not supported for this family: with it PEFT leaves out "
                        "the norm of the embedding; save the whole embedding"
                    )
                values = normed_rows(values.to(self.dtype), site.norm_eps)
            if module in further:
                behind = ids >= vocabulary
                values[behind] = values[behind].float() + further[module][ids[behind] - vocabulary]
            if first:
                rows["embedding"] = self._packed(module, site, ids, values)
                continue
            if matrix is not None and len(matrix) != vocabulary:
                tokens = len(matrix)
            behind = ids >= vocabulary
            added = self._packed(module, site, ids[behind], values[behind])
            rows["head"] = self._packed(module, site, ids[~behind] - span[0], values[~behind])
        found = EndRows(rows["embedding"], rows["head"], added, tokens)
        if added is not None and not found.has(added.ids.tolist(), vocabulary):
            raise CheckpointError(
                f"{self.file}: the head has rows of tokens behind the model's that the embedding has none of, so what "
                "is generated could not be read; save both"
            )
        return found if changes else None

    def _virtual(self, module: str, tensors: Any, hashed: Callable[[str, Tensor], None]) -> EndRows:
        """Rows for the first tokens behind the model's vocabulary, which only the embedding has."""
        site = self.cut.whole.sites[self.ends[module]]
        if site.closed:
            raise CheckpointError(
                f"{self.config.kind} is not supported for this family: it looks tokens up in other tables too, in "
                "which virtual tokens have no rows; train a LoRA"
            )
        if site.virtual_factor is None:
            raise CheckpointError(
                f"{self.config.kind} is not supported for this family: where rows stand before tokens, transformers "
                "leaves out the factor of its embedding, or cannot look tokens up by their ids"
            )
        rows: Tensor = tensors.get_tensor(self._keys[module, "virtual"])
        if rows.dim() != 2 or not len(rows) or rows.shape[1] != _hidden(site):
            raise CheckpointError(
                f"{self.file}: prompt_embeddings is {tuple(rows.shape)}, and rows of the model's {module} have "
                f"{_hidden(site)} numbers"
            )
        count, vocabulary = len(rows), _vocabulary(site)
        if count > self.room:
            raise CheckpointError(
                f"{self.file} puts {count} virtual tokens before prompts; set adapter_tokens: {count} or more"
            )
        hashed(f"{module} virtual", rows)
        ids = torch.arange(vocabulary, vocabulary + count)
        kept = self._packed(module, replace(site, factor=site.virtual_factor), ids, rows)
        return EndRows(embedding=kept, virtual=count)

    def _check_declared(self, tied: bool) -> None:
        """PEFT saves every module that it was told to train."""
        for module in self.ends:
            named = any(module.endswith(name) for name in self.config.saved)
            if named and not {(module, "saved"), (module, "base")} & self._keys.keys():
                raise CheckpointError(f"{CONFIG}: modules_to_save has {module}, and {self.file} does not")
        rows = self.config.token_rows
        for name, tokens in rows.items():
            same = tied and any(other != name and rows[other] == tokens for other in rows)
            modules = [module for module, form in self._keys if form == "tokens"]
            if not same and not any(self._paths[module].endswith(name) for module in modules):
                raise CheckpointError(
                    f"{CONFIG}: trainable_token_indices has rows of {name or 'the embedding'}, and {self.file} has not"
                )

    def _span(self, index: int) -> tuple[int, int]:
        first, last = self.cut.outputs[index][0]
        assert isinstance(first, int) and isinstance(last, int)
        return first, last

    def _whole(
        self, module: str, site: Site, tensors: Any, hashed: Callable[[str, Tensor], None], tied: bool
    ) -> tuple[Tensor | None, bool]:
        """The matrix of an end, and whether it was trained."""
        saved = self._keys.get((module, "saved"))
        key = saved or self._keys.get((module, "base"))
        if key is None:
            if (module, "original") in self._keys:
                raise CheckpointError(f"{self.file}: {module} has no modules_to_save.weight")
            return None, False
        shape, hidden, vocabulary = tuple(tensors.get_slice(key).get_shape()), _hidden(site), _vocabulary(site)
        if len(shape) != 2 or shape[1] != hidden:
            raise CheckpointError(
                f"{self.file}: {key!r} is {shape}, and the model's {module} is {(vocabulary, hidden)}"
            )
        self.check_tokens(module, site, shape[0])
        matrix: Tensor = tensors.get_tensor(key)
        hashed(f"{module} whole", matrix)
        # Of a tied pair that is trained as one, the other is saved too.
        paths = list(self._paths.values()) if tied and self.config.tied else [self._paths[module]]
        trained = any(path.endswith(name) for path in paths for name in self.config.saved)
        return matrix, trained

    def check_tokens(self, module: str, site: Site, count: int) -> None:
        """Refuse more tokens than there is room for."""
        vocabulary = _vocabulary(site)
        if site.closed and count > vocabulary:
            raise CheckpointError(
                f"{self.file}: {module} has {count} tokens, and the model {vocabulary}, which it looks up in other "
                "tables too; an adapter of this family cannot bring tokens of its own"
            )
        if count > vocabulary + self.room:
            raise CheckpointError(
                f"{self.file}: {module} has {count} tokens, and the model {vocabulary}; an adapter cannot bring "
                f"{count - vocabulary} tokens of its own unless adapter_tokens is at least that"
            )

    def _changed(
        self, module: str, site: Site, matrix: Tensor, span: tuple[int, int], trained: bool
    ) -> tuple[Tensor, Tensor]:
        """The rows of a matrix that are not the model's own, those behind its vocabulary too."""
        vocabulary = _vocabulary(site)
        span = min(span[0], len(matrix)), min(span[1], len(matrix))
        rows = rows_of(matrix, span)
        if self.base is None:
            at = torch.arange(len(rows)) if trained else torch.empty(0, dtype=torch.int64)
        else:
            at = self.base.changed(site.attribute, rows, trained=trained)
        if len(at) and not trained and len(matrix) == vocabulary:
            raise CheckpointError(
                f"{self.file}: {module} is another matrix than the model's own, and {CONFIG} does not name it in "
                "modules_to_save, so the adapter belongs to another model; merge it into that"
            )
        behind = torch.arange(vocabulary, max(vocabulary, len(matrix)))
        return torch.cat((at + span[0], behind)), torch.cat((rows[at], matrix[vocabulary:]))

    def _tokens(
        self, module: str, site: Site, tensors: Any, hashed: Callable[[str, Tensor], None], tied: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens whose rows were trained one by one, ascending, and these rows."""
        key, of = self._keys.get((module, "tokens")), module
        if key is None and tied and site.end == "head":
            # What an embedding has of such rows its tied head has too, unless it has some of its own.
            for other, index in self.ends.items():
                if self.cut.whole.sites[index].end == "embedding":
                    key, of = self._keys.get((other, "tokens")), other
        if key is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, _hidden(site))
        ids, rows = self.config.tokens_of(self._paths[of], tied), tensors.get_tensor(key)
        if ids is None or tuple(rows.shape) != (len(ids), _hidden(site)):
            raise CheckpointError(
                f"{self.file}: {key!r} is {tuple(rows.shape)}, which does not fit trainable_token_indices in {CONFIG}"
            )
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            raise CheckpointError(f"{CONFIG}: trainable_token_indices must be different tokens")
        self.check_tokens(module, site, max(ids, default=-1) + 1)
        named, order = torch.tensor(ids, dtype=torch.int64).sort()
        hashed(f"{module} tokens {named.tolist()}", rows)
        return named, rows[order]

    def _packed(self, module: str, site: Site, ids: Tensor, values: Tensor) -> ReplacedRows | None:
        if not len(ids):
            return None
        if self.most is not None and len(ids) > self.most:
            raise CheckpointError(
                f"{self.file} replaces {len(ids)} rows of {module}, and slots have room for {self.most}; "
                f"set adapter_rows: {len(ids)}"
            )
        ids, order = ids.sort()
        kept = values[order].to(self.dtype)
        if site.factor != 1.0:
            kept = kept * site.factor
        if not bool(kept.isfinite().all()):
            raise CheckpointError(f"{self.file}: {module} holds values that are not finite in {self.dtype}")
        return ReplacedRows(ids, kept)


def _vocabulary(site: Site) -> int:
    return site.inputs if site.end == "embedding" else site.outputs


def _hidden(site: Site) -> int:
    return site.outputs if site.end == "embedding" else site.inputs

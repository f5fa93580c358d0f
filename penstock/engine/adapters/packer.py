"""Puts the tensors of an adapter's file where the layout wants them.

A tensor belongs to a linear by the path of its module, or to the experts of a layer by the path of the parameter that
stacks them. PEFT keeps for such a parameter A [experts * r, in] and B [out, r * experts]; several parameters of one
module are told apart by their shapes, since the path says only how PEFT nested them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.adaption_prompts import AdaptionPrompts, AdaptionTensors
from penstock.engine.adapters.base_tensors import BaseTensors
from penstock.engine.adapters.end_tensors import EndTensors, KnownMatrices
from penstock.engine.adapters.input_tensors import InputTensors
from penstock.engine.adapters.inputs import InputBlocks
from penstock.engine.adapters.layout import ANY, LAYER, AdapterCut, AdapterLayout, Site, rows_of
from penstock.engine.adapters.norm_tensors import NormNames, NormTensors
from penstock.engine.adapters.norms import Norm
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.prefixes import PREFIX, StoredPrefix, read_prefix
from penstock.engine.adapters.rows import EndRows
from penstock.engine.adapters.spec import CONFIG
from penstock.engine.adapters.vector_tensors import Changed, VectorTensors
from penstock.engine.adapters.vectors import SiteVectors
from penstock.engine.adapters.visits import VisitChanges, changes_of
from penstock.engine.models.wrappers import senses
from penstock.errors import CheckpointError

_TENSOR = re.compile(LAYER + r"([\w.]+?)\.lora_([AB])(?:\.default)?\.weight")
_END = re.compile(r"(?:.*\.)?(\w+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
_NESTED = ".base_layer"
"""How PEFT calls what it has wrapped already."""


@dataclass(slots=True)
class _Target:
    """What a pair of tensors changes."""

    layer: int | None
    """None: it belongs to none."""
    module: str
    path: str
    """Of the module or parameter in the whole model."""
    index: int
    """Of the site."""
    parts: range
    expert: int | None = None
    """None: the linear is no expert's, or the tensors are of all experts."""
    stacked: bool = False
    turned: bool = False
    """Of a stack: whether A belongs to the outputs, and B to the inputs."""
    rank: int = 0

    @property
    def where(self) -> str:
        return self.module if self.layer is None else f"layer {self.layer} {self.module}"


class Packer:
    """Reads one file. `data` is flat in the order of `layout`; `ranks` has one for each site, and `parts` its parts, as
    in `LoadedAdapter`."""

    data: Tensor
    rank: int
    rows: EndRows | None
    """What it replaces of embedding and head."""
    vectors: SiteVectors | None
    """What it does to single outputs of linears."""
    norms: Mapping[Norm, Tensor] | None
    """The norms that it replaces."""
    head_norms: Mapping[Norm, Tensor] | None
    """Those of queries and keys."""
    inputs: InputBlocks | None
    """What it does to the inputs of linears."""
    prefix: StoredPrefix | None
    """Keys and values of its virtual tokens."""
    adaption: AdaptionPrompts | None
    """Learned tokens that queries attend to by themselves."""
    visits: VisitChanges | None
    """What it does to outputs and inputs of experts and of `kv_b_proj`."""

    def __init__(
        self,
        file: str,
        layout: AdapterLayout,
        cut: AdapterCut,
        config: LoraConfig,
        *,
        max_rank: int,
        dtype: torch.dtype,
        pin: bool,
        base: KnownMatrices | None = None,
        row_dtype: torch.dtype | None = None,
        most_rows: int | None = None,
        room: int = 0,
        stored: BaseTensors | None = None,
        norms: NormNames | None = None,
    ) -> None:
        """`file`: its name, for messages. `base`: the model's own matrices, where these can be compared. `row_dtype`,
        `most_rows`, `room`: see `EndTensors`. `stored`: the model's checkpoint."""
        self.file = file
        self.layout = layout
        self.cut = cut
        self.config = config
        self.ranks, self.parts = torch.zeros(2, len(layout.sites), dtype=torch.int32).unbind()
        self._max_rank = max_rank
        self._dtype, self._row_dtype = dtype, row_dtype or dtype
        self._pin = pin
        self._content = hashlib.blake2b(str(dtype).encode(), digest_size=16)
        self._places: dict[str, list[tuple[int, range]]] = {}
        """Sites by the names of modules, and which parts of them these are; dense layers may have a name that experts
        have in others."""
        self._stacks: dict[str, list[int]] = {}
        self._ends = {site.modules[0]: index for index, site in enumerate(cut.whole.sites) if site.end}
        self._whole = EndTensors(file, cut, self._ends, config, base, self._row_dtype, most_rows, room)
        self._vectors = VectorTensors(file, layout, cut, config, stored)
        self._norms = NormTensors(file, config, norms, stored)
        self._inputs = InputTensors(file, cut, config)
        self._adaption = AdaptionTensors(file, cut, stored)
        for index, site in enumerate(cut.whole.sites):
            if site.end:
                continue
            for part, module in enumerate(site.modules):
                self._places.setdefault(module, []).append((index, range(part, part + 1)))
            for alias in site.aliases:
                self._places.setdefault(alias, []).append((index, range(1)))
            if site.fused:
                self._places.setdefault(site.fused, []).insert(0, (index, range(len(site.modules))))
            for path in site.stack.paths if site.stack is not None else ():
                self._stacks.setdefault(path.rpartition(".")[0], []).append(index)

    @property
    def version(self) -> str:
        """Of what was packed; the same on every rank."""
        return self._content.hexdigest()

    def pack(self, tensors: Any) -> None:
        found: dict[tuple[int, str], dict[str, str]] = {}
        ends: dict[str, dict[str, str]] = {}
        self.prefix = None
        for key in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
            if senses(key):
                continue  # its layers are numbered too, but are not the decoder's
            match = _TENSOR.fullmatch(key)
            if match is not None:
                layer = self.cut.whole.numbered(match[1], match[2])
                found.setdefault((layer, match[3]), {})[match[4]] = key
            elif (match := _END.fullmatch(key)) is not None and match[1] in self._targets:
                ends.setdefault(match[1], {})[match[2]] = key
            elif key == PREFIX:
                stored = tensors.get_tensor(key)
                self._hash(key, stored)
                self.prefix = read_prefix(stored, self.cut, self._row_dtype)
            elif not any(each.take(key) for each in self._others):
                raise self._refusal(key)
        others = (self._norms, self._whole, self._inputs, self._adaption)
        converted = self.config.ranks is not None and any(each.any for each in others)
        if not found and not ends and not self._vectors.any and not converted:
            raise CheckpointError(f"{self.file} holds no {self.config.kind} matrices")
        targets = [(self._end(module, pair), pair) for module, pair in sorted(ends.items())]
        for (layer, module), pair in sorted(found.items()):
            target = self._target(layer, module, next(iter(pair.values())), pair, tensors)
            targets.append((target, pair))
        for target, pair in targets:
            if len(pair) != 2:
                missing = "B" if "A" in pair else "A"
                raise CheckpointError(f"{self.file}: {target.where} has no lora_{missing}")
        self.rank = max((target.rank for target, _ in targets), default=1)
        if self.rank > self._max_rank:
            where, merge = CONFIG, ""
            if self.config.ranks is not None and self.config.kind == "LoRA":
                where = self.file  # a GGUF file, which has no configuration beside it
            elif self.config.ranks is not None:
                merge = f" ({self.config.kind} becomes a LoRA of that rank here) or merge the adapter into the model"
            raise CheckpointError(
                f"{where}: rank {self.rank} is above adapter_rank {self._max_rank}; raise adapter_rank{merge}"
            )
        behind = {
            target.module: added
            for target, pair in targets
            if target.layer is None and (added := self._behind(target, pair, tensors)) is not None
        }
        self.rows = self._whole.read(tensors, self._hash, tied=self.layout.tied, further=behind)
        sites = self.layout.sites
        experts = any(sites[target.index].experts for target, _ in targets)
        shared = self.layout.unit_to_ends if ends else self.layout.shared_unit
        unit, width = self.layout.unit if experts else shared, self.layout.width(self.rank)
        self.data = torch.zeros(width * unit, dtype=self._dtype, pin_memory=self._pin)
        for target, pair in targets:
            a, b = (tensors.get_tensor(pair[side]) for side in "AB")
            self._put(target, a, b, key=pair["A"])
            self._take_vectors(target, a, b, tensors)
            self.ranks[target.index] = width
            self.parts[target.index] |= sum(1 << part for part in target.parts)
            if sites[target.index].heads:
                self.ranks[target.index + 1], self.parts[target.index + 1] = width, 1
            if target.layer is None and self._tied and len(ends) == 1:
                self._put_tied(target, a, b, tensors, key=pair["A"])
        self._vectors.outputs(self._biased, tensors, self._hash)
        self._vectors.biases(self._biased, tensors, self._hash)
        self.adaption = self._adaption.read(self.config.adaption, tensors, self._hash, self._add)
        self.vectors = self._vectors.vectors()
        self.norms, self.head_norms = self._norms.read(tensors, self._hash)
        self.inputs = self._inputs.read(self._biased, tensors, self._hash)
        self.visits = changes_of(self._vectors.visits(), self._inputs.visits)

    @property
    def _others(self) -> tuple[AdaptionTensors | InputTensors | EndTensors | VectorTensors | NormTensors, ...]:
        """Who take tensors that are no matrices of low rank."""
        adaption = (self._adaption,) if self.config.adaption else ()
        return *adaption, self._inputs, self._whole, self._vectors, self._norms

    def _add(self, layer: int, module: str, vector: Tensor) -> None:
        changed = self._biased(layer, module)
        assert changed is not None
        self._vectors.add(changed, vector)

    def _take_vectors(self, target: _Target, a: Tensor, b: Tensor, tensors: Any) -> None:
        changed = self._changed(target.layer, target.module, target.index, target.parts, target.expert)
        scale = self.config.scale_of(target.path)
        self._vectors.target(changed, target.module, tensors, a, b, scale, self._hash)

    def _changed(self, layer: int | None, module: str, index: int, parts: range, expert: int | None = None) -> Changed:
        site = self.cut.whole.sites[index]
        others = [name.replace(ANY, str(expert)) for name in site.modules] if len(site.modules) == 1 else ()
        return Changed(layer, index, parts, (module, *others, *site.aliases), expert)

    def _place_of(self, layer: int, module: str) -> tuple[int, range]:
        """Of a module that some layer has: the one in this layer, if it is in it."""
        places = self._places[module]
        return next((place for place in places if self.cut.whole.sites[place[0]].is_in(layer)), places[0])

    def _biased(self, layer: int | None, module: str) -> Changed | None:
        """The linear whose bias that is; None: adapters may not change it."""
        if layer is None:
            index = self._ends.get(module.rpartition(".")[2])
            of_head = index is not None and self.cut.whole.sites[index].end == "head"
            return Changed(None, index, range(1), (module,)) if index is not None and of_head else None
        numbered = _EXPERT.fullmatch(module)
        named = module if numbered is None else f"{numbered[1]}{ANY}{numbered[3]}"
        if layer >= self.cut.whole.layers or named not in self._places:
            return None
        expert = None if numbered is None else int(numbered[2])
        index, parts = self._place_of(layer, named)
        site = self.cut.whole.sites[index]
        if not site.is_in(layer) or (expert or 0) >= max(1, site.experts):
            return None
        return self._changed(layer, module, index, parts, expert)

    def _refusal(self, key: str) -> CheckpointError:
        modules = ", ".join(sorted({module.rpartition(".")[2] for module in (*self._places, *self._targets)}))
        hint = ""
        if (".experts." in key or ".kv_b_proj." in key) and not any(site.experts for site in self.cut.whole.sites):
            hint = "; for adapters of experts or of kv_b_proj set adapter_experts: true"
        return CheckpointError(f"{self.file}: cannot apply {key!r}; adapters may change {modules}{hint}")

    @property
    def _targets(self) -> Mapping[str, int]:
        """Ends that matrices may change."""
        return {} if self.cut.whole.virtual_only else self._ends

    @property
    def _tied(self) -> bool:
        return self.config.tied and self.layout.tied

    def _end(self, module: str, pair: dict[str, str]) -> _Target:
        key = next(iter(pair.values()))
        path = key.rpartition(".lora_")[0].removeprefix("base_model.model.")
        named = any(self.config.applies(name, "weight", None) for name in (path, *(self._ends if self._tied else ())))
        if not named:
            raise CheckpointError(
                f"{self.file} changes {path}, which {CONFIG} leaves out (target_modules, target_parameters, "
                "exclude_modules or layers_to_transform)"
            )
        return _Target(None, module, path, self._ends[module], range(1), rank=self.config.rank_of(path))

    def _hash(self, name: str, tensor: Tensor) -> None:
        self._content.update(f"{name} {tensor.dtype}".encode())
        self._content.update(tensor.contiguous().view(torch.uint8).numpy().data)

    def _behind(self, target: _Target, pair: dict[str, str], tensors: Any) -> Tensor | None:
        """What the product of an end's matrices adds to rows behind the model's vocabulary."""
        site = self.cut.whole.sites[target.index]
        a, b = (tensors.get_tensor(pair[side]) for side in "AB")
        embedding = site.end == "embedding"
        count, vocabulary = (a.shape[-1], site.inputs) if embedding else (b.shape[0], site.outputs)
        if count == vocabulary or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            return None
        self._whole.check_tokens(target.module, site, count)
        a, b = a.float(), b.float()
        product: Tensor = a[:, vocabulary:].t() @ b.t() if embedding else b[vocabulary:] @ a
        return product * self.config.scale_of(target.path)

    def _put_tied(self, target: _Target, a: Tensor, b: Tensor, tensors: Any, *, key: str) -> None:
        """The same matrices at the other end (`ensure_weight_tying`); magnitudes and biases are its own."""
        (other,) = (module for module in self._ends if module != target.module)
        index = self._ends[other]
        of, a, b = replace(target, index=index, module=other), b.t().contiguous(), a.t().contiguous()
        self._put(of, a, b, key=key)
        self._take_vectors(of, a, b, tensors)
        self.ranks[index], self.parts[index] = self.layout.width(self.rank), 1

    def _target(self, layer: int, module: str, key: str, pair: dict[str, str], tensors: Any) -> _Target:
        layers = self.cut.whole.layers
        inner = module
        while inner.endswith(_NESTED):
            inner = inner.removesuffix(_NESTED)
        numbered = _EXPERT.fullmatch(module)
        named = module if numbered is None else f"{numbered[1]}{ANY}{numbered[3]}"
        if named not in self._places and inner not in self._stacks:
            raise self._refusal(key)
        if layer >= layers:
            below = f", which are below {' and '.join(self.cut.whole.stacks)}" if self.cut.whole.stacks else ""
            raise CheckpointError(f"{self.file}: {key!r} is beyond the model's {layers} layers{below}")
        path = key.rpartition(".lora_")[0].removeprefix("base_model.model.")
        parameter = "weight"
        if named in self._places:
            index, parts = self._place_of(layer, named)
            target = _Target(layer, module, path, index, parts, None if numbered is None else int(numbered[2]))
        else:
            path = path.replace(_NESTED, "")
            target = self._stack(layer, module, inner, pair, tensors)
            stack = self.cut.whole.sites[target.index].stack
            assert stack is not None
            parameter = next(one for one in stack.paths if one.rpartition(".")[0] == inner).rpartition(".")[2]
            target.path = f"{path}.{parameter}"
        site = self.cut.whole.sites[target.index]
        if not site.is_in(layer) or (target.expert or 0) >= max(1, site.experts):
            raise CheckpointError(f"{self.file}: {key!r} is of a module that the model does not have")
        if not self.config.applies(path, parameter, self.cut.whole.number_in_path(layer)):
            raise CheckpointError(
                f"{self.file} changes {path}, which {CONFIG} leaves out (target_modules, target_parameters, "
                "exclude_modules or layers_to_transform)"
            )
        if parameter == "weight" and self._named_by_parameter(path):
            target.path = f"{path}.weight"
        target.rank = self.config.rank_of(target.path)
        return target

    def _named_by_parameter(self, path: str) -> bool:
        return any(f"{path}.weight".endswith(f".{name}") for name in self.config.parameters)

    def _stack(self, layer: int, module: str, inner: str, pair: dict[str, str], tensors: Any) -> _Target:
        """Which stack of the module it is, by the shapes of what is there."""
        shapes = {side: tuple(tensors.get_slice(key).get_shape()) for side, key in pair.items()}
        ins = shapes["A"][-1] if "A" in shapes else None
        outs = shapes["B"][0] if "B" in shapes else None
        fitting: list[tuple[bool, int, bool]] = []
        for place, index in enumerate(self._stacks[inner]):
            site = self.cut.whole.sites[index]
            assert site.stack is not None
            straight = ins in (None, site.inputs) and outs in (None, site.outputs)
            turned = ins in (None, site.outputs) and outs in (None, site.inputs)
            if straight or turned:
                either = site.stack.reversed if straight and turned else turned
                fitting.append((either is not site.stack.reversed, place if module != inner else -place, either))
        if fitting:
            # Without a gate the two stacks of a module may be as wide as they are high. PEFT has then wrapped the first
            # of them before the other, if it has wrapped both.
            _, place, either = min(self._wrapped(inner, fitting))
            index = self._stacks[inner][abs(place)]
            parts = range(len(self.cut.whole.sites[index].sizes))
            return _Target(layer, module, "", index, parts, stacked=True, turned=either)
        raise CheckpointError(
            f"{self.file}: the matrices of layer {layer} {module} are {shapes}, and fit no experts here"
        )

    def _wrapped(self, inner: str, fitting: list[tuple[bool, int, bool]]) -> list[tuple[bool, int, bool]]:
        """Those of the stacks that the configuration names, if it names some."""

        def named(place: int) -> bool:
            stack = self.cut.whole.sites[self._stacks[inner][abs(place)]].stack
            assert stack is not None
            return any(
                f".{one}".endswith(f".{name}")
                for one in stack.paths
                if one.rpartition(".")[0] == inner
                for name in self.config.parameters
            )

        return [one for one in fitting if named(one[1])] or fitting

    def _put(self, target: _Target, a: Tensor, b: Tensor, *, key: str) -> None:
        whole, rank = self.cut.whole.sites[target.index], target.rank
        outputs = sum(whole.sizes[part] for part in target.parts)
        inputs, count = whole.inputs, 1
        if target.stacked:
            count = whole.experts
        if whole.heads:
            keys, values = self.cut.whole.sites[target.index : target.index + 2]
            inputs, outputs = values.inputs, whole.experts * (keys.inputs + values.outputs)
        ins, outs = (outputs, inputs) if target.turned else (inputs, outputs)
        if whole.end:
            a, b = _as_many_tokens(whole, a, b)
        for side, tensor, shape in (("A", a, (count * rank, ins)), ("B", b, (outs, count * rank))):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.file}: lora_{side} of {target.where} is {tuple(tensor.shape)}; rank {rank} "
                    f"{'(rank_pattern) ' if rank != self.config.rank else ''}on this model needs {shape}"
                )
            self._hash(f"{target.layer} {target.module} {side}", tensor)
        scale = self.config.scale_of(target.path)
        self._content.update(repr(scale).encode())
        if whole.heads:
            self._place_heads(target, a, b, scale, key)
            return
        if not target.stacked:
            self._place(target, target.expert or 0, a, b, scale, key)
            return
        downs, ups = a.view(count, rank, ins), b.view(outs, rank, count).permute(2, 0, 1)
        if target.turned:
            downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
        stack = whole.stack
        assert stack is not None
        if stack.interleaved and len(whole.sizes) > 1:
            ups = torch.cat([ups[:, part :: len(whole.sizes)] for part in range(len(whole.sizes))], dim=1)
        for expert in range(count):
            self._place(target, expert, downs[expert], ups[expert], scale, key)

    def _place_heads(self, target: _Target, a: Tensor, b: Tensor, scale: float, key: str) -> None:
        """Of what makes keys and values of latents, those of each head: see `adapters.latent`."""
        keys = self.cut.whole.sites[target.index]
        values = replace(target, index=target.index + 1)
        for head, rows in enumerate(b.view(keys.experts, -1, b.shape[1])[slice(*self.cut.heads)]):
            of_keys, of_values = rows[: keys.inputs], rows[keys.inputs :]
            self._place(target, head, of_keys.t(), a.t(), scale, key)
            self._place(values, head, a, of_values, scale, key)

    def _place(self, target: _Target, expert: int, a: Tensor, b: Tensor, scale: float, key: str) -> None:
        """A [r, inputs] and B [outputs, r] of some parts of a linear."""
        first, last = self.cut.layers
        if not self.layout.ends if target.layer is None else not first <= target.layer < last:
            return
        index, parts = target.index, target.parts
        whole, spans = self.cut.whole.sites[index], self.cut.outputs[index]
        a, rows = a[:, slice(*self.cut.inputs[index])], torch.split(b, [whole.sizes[part] for part in parts])
        scale *= whole.factor
        ups = [rows_of(row, spans[part]).float() * scale for part, row in zip(parts, rows, strict=True)]
        if not all(bool(each.to(self.data.dtype).isfinite().all()) for each in (a, *ups)):
            raise CheckpointError(
                f"{self.file}: {key!r} or its partner holds values that are not finite in {self.data.dtype}"
            )
        layer = 0 if target.layer is None else target.layer - first
        placed, width = self.layout.place(layer, index), self.layout.width(self.rank)
        site = placed.site
        begin = width * (placed.start + expert * site.each)
        middle = begin + width * len(site.sizes) * site.inputs
        down = self.data[begin:middle].view(len(site.sizes), width, site.inputs)
        up = self.layout.up(self.data[middle : middle + width * site.outputs], width, site.outputs)
        for part, matrix in zip(parts, ups, strict=True):
            column = sum(site.sizes[:part])
            down[part, : target.rank] = a
            up[: target.rank, column : column + len(matrix)] = matrix.t()  # behind it: padding of a shard's head


def _as_many_tokens(site: Site, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of an end for the model's own tokens, where the adapter has more or fewer."""
    if a.dim() != 2 or b.dim() != 2:
        return a, b
    if site.end == "embedding":
        return torch.nn.functional.pad(a, (0, site.inputs - a.shape[1])), b
    return a, torch.nn.functional.pad(b, (0, 0, 0, site.outputs - b.shape[0]))

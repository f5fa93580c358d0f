"""From a checkpoint folder to a `TransformersDecoder`: read by the library, its linears replaced by the engine's, its
attention surveyed, and the result compared with what the library computes alone."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.transformers.body import Body, CannotDivide, Junction, StageBody, WholeBody, take_out
from penstock.engine.models.transformers.comparison import Comparison, refusal
from penstock.engine.models.transformers.config import check_custom_code
from penstock.engine.models.transformers.cuts import Cuts, Shard
from penstock.engine.models.transformers.decoder import CachedLayer, KeptStates, ModelHead, TransformersDecoder
from penstock.engine.models.transformers.experts import divide_experts, find_experts, has_experts
from penstock.engine.models.transformers.hidden import HiddenStates, PackedPass
from penstock.engine.models.transformers.linears import (
    EngineLinear,
    ModuleWeights,
    await_linears,
    read_directly,
    replace_linears,
    shapes_by_layer,
)
from penstock.engine.models.transformers.passes import first_that_fits, keeps_states
from penstock.engine.models.transformers.read import Reduce, read_model
from penstock.engine.models.transformers.shards import CLOSE, find_cuts
from penstock.engine.models.transformers.survey import TOKENS
from penstock.engine.models.weights import Quantizer, WeightReader, Weights
from penstock.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


class Way(Enum):
    """How shards divide a model: the first that gives what the model does is taken."""

    PAGED = "the engine's attention"
    OWN = "attention of their own"
    WHOLE = "nothing divided"


class _PartsDiffer(Exception):
    """What shards compute together is not the model's."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    raw: dict[str, Any],
    backend: LayerFactory,
    *,
    dtype: torch.dtype,
    max_positions: int,
    quantize: Quantizer | None = None,
    stored: Weights | None = None,
    custom_code: tuple[str, ...] = (),
    span: tuple[int, int] | None = None,
    shard: Shard | None = None,
    alone: bool = False,
    experts: bool = False,
    progress: Callable[[float], None] | None = None,
) -> TransformersDecoder:
    """Read every weight once. `custom_code`: the checkpoints whose own code may run. `progress` is called with the
    fraction that is done. The others: see `_Loader`."""
    log.warning(
        "%s models have no family here: this one runs through transformers, exactly but slower than a family would",
        config.family,
    )
    loader = _Loader(
        folder=folder,
        config=config,
        raw=raw,
        backend=backend,
        dtype=dtype,
        max_positions=max_positions,
        quantize=quantize,
        stored=stored,
        trusted=check_custom_code(raw, folder, custom_code),
        span=span,
        shard=shard,
        alone=alone,
        experts=experts,
        report=progress or (lambda fraction: None),
    )
    for way in (Way.PAGED, Way.OWN):
        try:
            return loader.load(way)
        except _PartsDiffer as error:
            log.warning(
                "tensor_parallel: %s models cannot be divided with %s: %s", config.family, way.value, str(error)
            )
        gc.collect()  # the model is read again: not beside what is left of this attempt
    log.warning("tensor_parallel: every shard has this %s model whole", config.family)
    return loader.load(Way.WHOLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loader:
    """What to load, and for which part of an engine. Nothing of an attempt is kept."""

    folder: Path
    config: ModelConfig
    raw: dict[str, Any]
    backend: LayerFactory
    dtype: torch.dtype
    max_positions: int
    quantize: Quantizer | None
    stored: Weights | None
    """The checkpoint where it has weights in few bits: the library gets their values, and linears are made of them as
    they are stored."""
    trusted: bool
    """Whether the checkpoint's own code may run."""
    span: tuple[int, int] | None
    """The layers of this stage, where other ranks have others."""
    shard: Shard | None
    """Of several that have a part of each layer."""
    alone: bool
    """In deterministic mode: tokens are computed one by one."""
    experts: bool
    """The model must have experts that shards divide."""
    report: Callable[[float], None]

    def load(self, way: Way) -> TransformersDecoder:
        """The decoder, where shards divide the model in this way. _PartsDiffer: they cannot, and all of them say so."""
        try:
            return self._read(way)
        except CannotDivide as error:
            raise refusal(self.config, f"{error}, so it has no parts for several ranks") from error

    def _read(self, way: Way) -> TransformersDecoder:
        config, dtype = self.config, self.dtype
        junction = Junction(self.span or (0, config.num_layers), config.num_layers)
        reduce: list[Reduce] = []
        if self.span is not None:
            reduce.append(lambda model: take_out(model, junction, dtype))
        # What the checkpoint has in few bits is read from it; the rest stays as the library has it. Shards cut values.
        as_stored = None
        if self.stored is not None and self.shard is None:
            as_stored = reader = WeightReader(self.stored, self.backend, dtype, self.quantize)
            reduce.append(lambda model: await_linears(model, reader))
        model = read_model(self.folder, config.family, dtype, self.trusted, self.stored, reduce)
        self.report(0.5)
        if keeps_states(model):
            self._check_states()
        base: Any = getattr(model, model.base_model_prefix, None)
        if not isinstance(base, nn.Module) or base is model:
            raise refusal(config, f"{type(model).__name__} does not keep its layers apart from its head")
        body: Body = WholeBody(base, config.vocab_size)
        if self.span is not None or self.shard is not None:
            junction.shapes = junction.shapes or shapes_by_layer(model)
            body = StageBody(base, junction, config.hidden_size, dtype)
        return self._decoder(model, body, as_stored, way)

    def _check_states(self) -> None:
        """ConfigError where shards or stages would have to divide states."""
        if self.span is not None or self.shard is not None:
            raise ConfigError(
                f"tensor_parallel, pipeline_parallel: not available for {self.config.family} models, whose layers keep "
                "states and which run through transformers; use data parallel replicas"
            )

    def _read_directly(self, model: Any, body: Body) -> frozenset[str]:
        """See `read_directly`: of whole models."""
        if self.span is not None or self.shard is not None:
            return frozenset()
        tokens = body.sample(TOKENS, self.backend.device)
        return read_directly(model, lambda: body(tokens, use_cache=False))

    def _decoder(self, model: Any, body: Body, as_stored: WeightReader | None, way: Way) -> TransformersDecoder:
        """The decoder of a model that the library has read. `as_stored` reads the linears that it has not read."""
        config, shard, device = self.config, self.shard, self.backend.device
        if shard is None:
            model.to(device)
        output = model.get_output_embeddings()
        head_name = next((name for name, module in model.named_modules() if module is output), "")
        # Rounded linears change the logits, and some are not there yet; without them the comparison covers the linears
        # too. Shards are compared with the whole in any case.
        late = as_stored is not None or (self._rounds and shard is None)
        at = device if shard is None else torch.device("cpu")
        comparison = None if late else _compared(model, body, config, at)
        cuts = None if shard is None else self._cuts(model, body, shard, way)
        modules = ModuleWeights(model, self.raw, None if cuts is None else cuts.apply)
        reader = WeightReader(modules, self.backend, self.dtype, self.quantize if as_stored is None else None)
        others = self._read_directly(model, body)
        linears = replace_linears(model, reader, modules, head_name, as_stored, cuts, others)
        if cuts is not None:
            divide_experts(model, cuts)
            model.to(device)
            cuts.shard.agree(0)  # what follows is summed over shards: one that has failed would be waited for
        comparison = comparison or _compared(model, body, config, device)
        embeds = _only_reader(body, device) if isinstance(body, WholeBody) else None
        head_linear = next((linear for linear in linears if linear.name == head_name), None)
        own_head = None if head_linear is None else head_linear.linear
        head = ModelHead(model, model.base_model_prefix, own_head, alone=self.alone)
        self.report(0.8)
        hidden = self._hidden(body, comparison, head, cuts, way)
        embedding = _embedding_of(body.base, device, self.dtype)
        self.report(1.0)
        stage = body if isinstance(body, StageBody) else None
        return TransformersDecoder(
            config=_found(config, hidden, (0, config.num_layers) if stage is None else stage.junction.span),
            ops=self.backend.ops,
            embedding=embedding.detach(),
            layers=_layers(hidden, linears, head_name, self.backend),
            final_norm=embedding.new_empty(0),
            head=head,
            max_positions=self.max_positions,
            hidden=hidden,
            linears=linears,
            other_bytes=_other_bytes(body.base),
            stage=stage,
            cuts=cuts,
            embeds=embeds,
            final_width=config.hidden_size if head_linear is None else head_linear.in_features,
        )

    @property
    def _rounds(self) -> bool:
        """Whether linears get fewer bits than the checkpoint has."""
        return getattr(self.quantize, "few_bits", self.quantize) is not None

    def _cuts(self, model: Any, body: Body, shard: Shard, way: Way) -> Cuts:
        """What this shard has of a model that is still whole."""
        config = self.config
        if self.experts and not has_experts(body.base, config.num_layers):
            raise ConfigError("expert_parallel: this model has no experts that could be divided; leave it out")
        if way is Way.WHOLE:
            return Cuts(shard)
        row = body.junction.row if isinstance(body, StageBody) else None
        if shard.exchange is None and row is not None and any(row.left):
            # A shard would have keys and values of its own heads only, and the next stage might read all of them.
            log.warning(
                "tensor_parallel: every shard has the linears of this %s model whole: its layers leave keys and values "
                "to those of other stages",
                config.family,
            )
            cuts = Cuts(shard)
            shard.agree(0)
        elif shard.exchange is None:
            paged = way is Way.PAGED
            cuts = find_cuts(model, body, config.family, config.num_layers, shard, self.dtype, paged=paged)
        else:  # layers are whole, and experts too where shards would not meet at them
            cuts = Cuts(shard)
            if way is Way.OWN or self.alone:
                log.warning("attention_parallel: every shard has the experts of this %s model whole", config.family)
                return cuts
            shard.agree(0)
        cuts.experts = find_experts(model, shard, config.family, CLOSE[self.dtype])
        return cuts

    def _hidden(self, body: Body, comparison: Comparison, head: ModelHead, cuts: Cuts | None, way: Way) -> HiddenStates:
        """How hidden states are computed: as the library does, on all shards."""
        whole = None if isinstance(body, StageBody) else head

        def check(hidden: HiddenStates) -> None:
            comparison.check(hidden, whole, self.dtype, self.backend.device, rounded=self._rounds)

        fits = partial(first_that_fits, body, self.config, self.backend, self.dtype, check, alone=self.alone, cuts=cuts)
        if cuts is None or way is Way.WHOLE:
            return self._meeting(fits(), cuts)
        differs = ""
        try:
            hidden = self._meeting(fits(), cuts)
        except CheckpointError as error:
            differs = str(error)
        shard = cuts.shard
        shard.agree(0)
        failed = shard.any([bool(differs)])[0]
        if not shard.agree(int(not failed)):  # all ranks try again, or none
            raise _PartsDiffer(differs or "another rank's part differs")
        return hidden

    def _meeting(self, hidden: HiddenStates, cuts: Cuts | None) -> HiddenStates:
        """Refused where shards have experts of their own and would not meet at the same ones, sequence by sequence."""
        if cuts is not None and cuts.experts and cuts.shard.exchange and not isinstance(hidden, PackedPass):
            raise refusal(self.config, "it does not run with the engine's attention")
        return hidden


def _compared(model: Any, body: Body, config: ModelConfig, device: torch.device) -> Comparison:
    if isinstance(body, StageBody):
        body.find_form(body.sample(TOKENS, device))
    return Comparison(model, body, config, device)


def _found(config: ModelConfig, hidden: HiddenStates, span: tuple[int, int]) -> ModelConfig:
    """The configuration with what was found of attention: windows, of other stages' layers none."""
    if hidden.states is not None:
        return config
    windows = tuple(site.heads.window for site in hidden.sites)
    behind = config.num_layers - span[1]
    return replace(config, windows=((None,) * span[0] + windows + (None,) * behind))


def _layers(hidden: HiddenStates, linears: list[EngineLinear], head: str, backend: LayerFactory) -> list[DecoderLayer]:
    """One entry for every attention call, with the linears of its layer; the first call of a layer has them. One for
    all states, with the linears of layers that do not attend."""
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.name != head:
            by_layer.setdefault(linear.layer or 0, []).append(linear.linear)
    nothing = torch.empty(0)
    layers: list[DecoderLayer] = []
    for site in hidden.sites:
        at = layer_of(site.module)
        mine = tuple(by_layer.pop(len(layers) if at is None else at, ()))
        mixer = CachedLayer(backend.ops, site.heads, mine)
        rest = CachedLayer(backend.ops, site.heads, ())
        layers.append(DecoderLayer(nothing, mixer, nothing, rest))
    if hidden.states is not None:
        kept = KeptStates(backend.ops, hidden.states, tuple(chain.from_iterable(by_layer.values())))
        layers.append(DecoderLayer(nothing, kept, nothing, KeptStates(backend.ops, hidden.states, ())))
    return layers


def _embedding_of(base: nn.Module, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The embedding of tokens, as far as it can be told: the engine asks for its type and device."""
    tables = (module.weight for module in base.modules() if isinstance(module, nn.Embedding))
    found: Tensor | None = next(tables, None)
    return torch.empty(0, dtype=dtype, device=device) if found is None else found


def _only_reader(body: WholeBody, device: torch.device) -> nn.Embedding | None:
    """The module that embeds tokens, if the model gives the same for what it gives as for the tokens: only then can
    there be rows that stand for no token."""
    try:
        table = body.base.get_input_embeddings()
        if not isinstance(table, nn.Embedding):
            return None
        with torch.inference_mode():
            tokens = body.sample(TOKENS, device)
            from_tokens = body(tokens, use_cache=False)
            rows = table(tokens.unsqueeze(0)).clone()  # some models scale them in place
            from_rows = body.base(inputs_embeds=rows, use_cache=False).last_hidden_state[0]
        return table if torch.equal(from_tokens, from_rows) else None
    except Exception as error:  # whatever the library's code does with rows alone
        log.info("virtual tokens of adapters do not fit this model: %s", error)
        return None


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is in, from its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])


def _other_bytes(base: nn.Module) -> int:
    embeddings = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    return sum(p.nbytes for p in base.parameters() if p.dim() > 1 and id(p) not in embeddings)

"""From a checkpoint folder to a `TransformersDecoder`: read by the library, its linears replaced by the engine's, its
attention surveyed, and the result compared with what the library computes alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.backends.interface import AttentionBatch, HeadLayout
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.layers.factory import LayerFactory
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.transformers.attention import (
    CALLS,
    PAGED,
    SURVEYED,
    PagedCalls,
    Site,
    attention_function,
    cached_dim,
)
from penstock.engine.models.transformers.config import check_custom_code
from penstock.engine.models.transformers.decoder import CachedLayer, ModelHead, TransformersDecoder
from penstock.engine.models.transformers.hidden import HiddenStates, PackedPass, SequencePass
from penstock.engine.models.transformers.linears import EngineLinear, ModuleWeights, integer_matrices, replace_linears
from penstock.engine.models.transformers.survey import TOKENS, Survey
from penstock.engine.models.weights import Quantizer, WeightReader, Weights
from penstock.engine.torch_import import with_meta_kernels
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)

_COMPARED = 24
"""Tokens of the comparison with the library, in two chunks."""
_BLOCK = 16
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Of logits, relative to their size: other orders of summation, not another computation."""
_ROUNDED = 0.15
"""The same where linears round what they are applied to."""


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
    progress: Callable[[float], None] | None = None,
) -> TransformersDecoder:
    """Read every weight once. `stored`: the checkpoint where it has weights in few bits; the library gets their values,
    and linears are made of them as they are stored. `custom_code`: the checkpoints whose own code may run."""
    report = progress or (lambda fraction: None)
    log.warning(
        "%s models have no family here: this one runs through transformers, exactly but slower than a family would",
        config.family,
    )
    trusted = check_custom_code(raw, folder, custom_code)
    model = _read(folder, config.family, dtype, trusted, stored).to(backend.device)
    report(0.5)
    if getattr(model, "_is_stateful", False):
        raise _refusal(config, "its layers keep a state other than keys and values")
    base_name = model.base_model_prefix
    base: Any = getattr(model, base_name, None)
    if not isinstance(base, nn.Module) or base is model:
        raise _refusal(config, f"{type(model).__name__} does not keep its layers apart from its head")
    head_name = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    # Rounded linears change the logits; without them the comparison covers the linears too.
    comparison = _Comparison(model, config, backend.device) if quantize is None else None
    modules = ModuleWeights(model, raw)
    # What the checkpoint has in few bits is read from it; the rest stays as the library has it.
    reader = WeightReader(modules, backend, dtype, quantize if stored is None else None)
    as_stored = None if stored is None else WeightReader(stored, backend, dtype, quantize)
    linears = replace_linears(model, reader, modules, head_name, as_stored)
    comparison = comparison or _Comparison(model, config, backend.device)
    head_linear = next((linear.linear for linear in linears if linear.name == head_name), None)
    head = ModelHead(model, base_name, head_linear)
    report(0.8)

    def check(hidden: HiddenStates) -> None:
        comparison.check(hidden, head, dtype, _TOLERANCE[dtype] if quantize is None else _ROUNDED)

    hidden = _first_that_fits(base, config, backend, check)
    embedding = _embedding_of(base)
    windows = tuple(site.heads.window for site in hidden.sites)
    report(1.0)
    return TransformersDecoder(
        config=replace(config, windows=windows),
        ops=backend.ops,
        embedding=embedding.detach(),
        layers=_layers(hidden.sites, linears, head_name, backend),
        final_norm=embedding.new_empty(0),
        head=head,
        max_positions=max_positions,
        hidden=hidden,
        linears=linears,
        other_bytes=_other_bytes(base),
    )


def _read(folder: Path, model_type: str, dtype: torch.dtype, trusted: bool, stored: Weights | None) -> Any:
    with_meta_kernels()
    library: Any = import_module("transformers")
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    with _quiet():
        try:
            if stored is None:
                model, found = library.AutoModelForCausalLM.from_pretrained(
                    str(folder), trust_remote_code=trusted, local_files_only=True, use_safetensors=True, **options
                )
            else:
                kind, config = _class_and_config(library, folder, trusted)
                values = _values(stored, kind, config, dtype)
                model, found = kind.from_pretrained(None, config=config, state_dict=values, **options)
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"{folder}: transformers cannot load this {model_type} model: {error}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint has no tensor {missing[0]!r}{more}; it is incomplete: fetch it again")
    unused = sorted(found["unexpected_keys"])
    if unused:
        log.warning("%d tensors of the checkpoint are not used by its model, such as %s", len(unused), unused[0])
    return model.eval().requires_grad_(False)


def _class_and_config(library: Any, folder: Path, trusted: bool) -> tuple[Any, Any]:
    """The model's class, and its configuration as if its weights were not stored in few bits."""
    config = library.AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    if not trusted:
        return library.AutoModelForCausalLM._model_mapping[type(config)], config
    dynamic: Any = import_module("transformers.dynamic_module_utils")
    reference = config.auto_map["AutoModelForCausalLM"]
    return dynamic.get_class_from_dynamic_module(reference, str(folder), local_files_only=True), config


def _values(stored: Weights, kind: Any, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the stored numbers stand for, by the names of the checkpoint. Few-bit layouts have matrices as [out, in];
    the library keeps those of `Conv1D` the other way around."""
    with torch.device("meta"):
        turned = [name for name, module in kind(config).named_modules() if type(module).__name__ == "Conv1D"]
    integers = integer_matrices(stored)
    values = {}
    for name in stored.names():
        value = stored.tensor(name)
        if name in integers and any(f".{module}.weight".endswith(f".{name}") for module in turned):
            value = value.t().contiguous()
        values[name] = value.to(dtype) if value.is_floating_point() else value
    return values


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's progress bars would end up in the log."""
    library: Any = import_module("transformers.utils.logging")
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, attention_function)
    AttentionInterface.register(SURVEYED, attention_function)
    AttentionMaskInterface.register(SURVEYED, _surveyed_mask)


def _surveyed_mask(*arguments: Any, **options: Any) -> Any:
    calls = CALLS.get()
    assert isinstance(calls, Survey)
    return calls.mask(*arguments, **options)


def _use(base: nn.Module, implementation: str) -> None:
    """Choose the attention function of a model and of the models in it."""
    for module in base.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = implementation


def _first_that_fits(
    base: Any, config: ModelConfig, backend: LayerFactory, check: Callable[[HiddenStates], None]
) -> HiddenStates:
    """How the model's hidden states are computed: with the engine's attention, or else with the model's own."""
    takes_positions = "position_ids" in signature(base.forward).parameters
    reason = "it does not take positions"
    if takes_positions:
        try:
            packed = _packed(base, config, backend)
            check(packed)
            return packed
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = str(error)
    _use(base, "eager")
    log.warning(
        "%s: sequences run one after the other with the model's own attention, since ours does not fit (%s)",
        config.family,
        reason,
    )
    alone = SequencePass(base, _cached_sites(base, config, backend.device, takes_positions), takes_positions)
    check(alone)
    return alone


def _packed(base: Any, config: ModelConfig, backend: LayerFactory) -> PackedPass:
    """With the engine's attention, wherever the model calls it."""
    device = backend.device
    _register()
    survey = Survey({module: name for name, module in base.named_modules()}, config.family)
    _use(base, SURVEYED)
    token = CALLS.set(survey)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    try:
        base(input_ids=ids, position_ids=torch.arange(TOKENS, device=device).unsqueeze(0), use_cache=False)
    finally:
        CALLS.reset(token)
    if not survey.sites:
        raise _refusal(config, "it is not on the library's attention interface")
    _check_layers(config, len({site.module for site in survey.sites}))
    _use(base, PAGED)
    return PackedPass(base, survey.sites, PagedCalls(survey.sites, backend.ops, device))


def _cached_sites(base: Any, config: ModelConfig, device: torch.device, takes_positions: bool) -> list[Site]:
    """What a model with attention of its own keeps, as seen in a cache of the library's."""
    library: Any = import_module("transformers.cache_utils")
    cache = library.DynamicCache()
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    positions = {"position_ids": torch.arange(TOKENS, device=device).unsqueeze(0)} if takes_positions else {}
    try:
        base(input_ids=ids, past_key_values=cache, use_cache=True, **positions)
    except Exception as error:
        raise _refusal(config, f"it does not run with a cache of keys and values ({error})") from error
    _check_layers(config, len(cache.layers))
    sites = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not library.DynamicLayer or layer.keys is None or layer.keys.dim() != 4:
            raise _refusal(config, f"layer {index} keeps something other than keys and values")
        (_, heads, tokens, key_dim), (_, value_heads, _, value_dim) = layer.keys.shape, layer.values.shape
        if tokens != TOKENS or heads != value_heads:
            raise _refusal(config, f"layer {index} does not keep one key and one value for every token")
        layout = HeadLayout(heads=heads, kv_heads=heads, head_dim=cached_dim(key_dim, value_dim), scale=1.0)
        sites.append(Site(str(index), layout, key_dim, value_dim))
    return sites


def _check_layers(config: ModelConfig, attending: int) -> None:
    if attending != config.num_layers:
        raise _refusal(
            config,
            f"{attending} of its {config.num_layers} layers attend to keys and values; what the others keep of earlier "
            "tokens is not known",
        )


def _layers(sites: list[Site], linears: list[EngineLinear], head: str, backend: LayerFactory) -> list[DecoderLayer]:
    """One entry for every attention call, with the linears of its layer; the first call of a layer has them."""
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.name != head:
            by_layer.setdefault(linear.layer or 0, []).append(linear.linear)
    nothing = torch.empty(0)
    layers: list[DecoderLayer] = []
    for site in sites:
        at = layer_of(site.module)
        mine = tuple(by_layer.pop(len(layers) if at is None else at, ()))
        mixer = CachedLayer(backend.ops, site.heads, mine)
        rest = CachedLayer(backend.ops, site.heads, ())
        layers.append(DecoderLayer(nothing, mixer, nothing, rest))
    return layers


def _embedding_of(base: nn.Module) -> Tensor:
    """The embedding of tokens, as far as it can be told: the engine asks for its type and device."""
    tables = (module.weight for module in base.modules() if isinstance(module, nn.Embedding))
    found: Tensor | None = next(tables, None)
    return next(p for p in base.parameters() if p.is_floating_point()) if found is None else found


def layer_of(name: str) -> int | None:
    """The number of the layer that a module is in, from its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])


def _other_bytes(base: nn.Module) -> int:
    embeddings = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    return sum(p.nbytes for p in base.parameters() if p.dim() > 1 and id(p) not in embeddings)


class _Comparison:
    """What the library computes of a few tokens by itself. A model whose tokens do not come out alike is refused: one
    that ignores positions, or in which tokens reach each other by another way than attention."""

    @torch.inference_mode()
    def __init__(self, model: Any, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        count = min(_COMPARED, config.max_positions)
        self._ids = (torch.arange(count, device=device) * 7 + 3) % config.vocab_size
        self._expected: Tensor = model(input_ids=self._ids.unsqueeze(0), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def check(self, hidden: HiddenStates, head: Linear, dtype: torch.dtype, tolerance: float) -> None:
        """CheckpointError where the same tokens, in two chunks, give something else."""
        tokens, device = len(self._ids), self._ids.device
        kinds = tuple(site.cache_kind(_BLOCK, dtype) for site in hidden.sites)
        kv = KVCache(CacheShape(kinds, _BLOCK), -(-tokens // _BLOCK) + 1, device)
        whole = AttentionBatch.of_one(tokens, _BLOCK, device)
        parts = []
        for begin, end in ((0, tokens // 2), (tokens // 2, tokens)):
            batch = replace(
                whole,
                positions=whole.positions[begin:end],
                slots=whole.slots[begin:end],
                query_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                context_lens=torch.tensor([end], dtype=torch.int32, device=device),
                max_query=end - begin,
                max_context=end,
            )
            if end > begin:
                parts.append(head(hidden(self._ids[begin:end], batch, kv)).float())
        errors = (torch.cat(parts) - self._expected).norm(dim=-1) / self._expected.norm(dim=-1).clamp_min(1e-6)
        # Each chunk by itself: what earlier tokens pass on shows in the second only. In few bits of the median token,
        # since one that is sent to another expert by a rounding may differ.
        exact = tolerance == _TOLERANCE[torch.float32]
        error = max(float(part.max() if exact else part.median()) for part in errors.split(max(tokens // 2, 1)))
        if not error < tolerance:
            raise _refusal(self._config, f"its logits differ from the library's, relatively by {error:.2g}")


def _refusal(config: ModelConfig, reason: str) -> CheckpointError:
    return CheckpointError(f"a {config.family} model cannot be run through transformers: {reason}")

"""A checkpoint folder read by the `transformers` library: the whole model, or the layers of one pipeline stage, whose
other layers are never read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.body import CannotDivide
from penstock.engine.models.transformers.config import decoder_config
from penstock.engine.models.transformers.linears import integer_matrices
from penstock.engine.models.weights import Weights
from penstock.engine.models.wrappers import ALONE, WRAPPERS, senses
from penstock.errors import CheckpointError

log = logging.getLogger(__name__)

_LOADING = Lock()
"""While it loads a model, the library changes defaults of the process."""

Reduce = Callable[[nn.Module], Callable[[str], bool]]
"""Takes parts out of a model before its weights are read; says which names in a checkpoint belong to them."""


def read_model(
    folder: Path,
    model_type: str,
    dtype: torch.dtype,
    trusted: bool,
    stored: Weights | None,
    reduce: Sequence[Reduce] = (),
) -> Any:
    """`trusted`: the checkpoint's own code runs. `stored`: the checkpoint, where it has weights in few bits."""
    library: Any = import_module("transformers")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    wrapped = model_type in WRAPPERS
    if wrapped and stored is None:
        options["key_mapping"] = dict(ALONE)
    absent: list[Callable[[str], bool]] = []
    with _LOADING, _quiet(reports=not reduce):
        try:
            if stored is None and not reduce and not wrapped:
                model, found = library.AutoModelForCausalLM.from_pretrained(
                    str(folder), trust_remote_code=trusted, local_files_only=True, use_safetensors=True, **options
                )
            else:
                kind, config = _class_and_config(library, folder, trusted)
                if reduce:
                    kind = _reduced(kind, reduce, absent)
                if stored is None:
                    model, found = kind.from_pretrained(
                        str(folder), config=config, local_files_only=True, use_safetensors=True, **options
                    )
                else:
                    values = _values(stored, kind, config, dtype, absent)
                    model, found = kind.from_pretrained(None, config=config, state_dict=values, **options)
        except (KeyboardInterrupt, MemoryError, CheckpointError, CannotDivide):
            raise
        except Exception as error:
            raise CheckpointError(f"{folder}: transformers cannot load this {model_type} model: {error}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(f"the checkpoint has no tensor {missing[0]!r}{more}; it is incomplete: fetch it again")
    elsewhere = [*absent, senses] if wrapped else absent
    unused = sorted(name for name in found["unexpected_keys"] if not any(where(name) for where in elsewhere))
    if unused:
        log.warning("%d tensors of the checkpoint are not used by its model, such as %s", len(unused), unused[0])
    return model.eval().requires_grad_(False)


def _reduced(kind: Any, reduce: Sequence[Reduce], absent: list[Callable[[str], bool]]) -> Any:
    """The model's class without some of its parts; the library makes an instance and reads what that has."""

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, *arguments, **options)
        absent[:] = [each(self) for each in reduce]

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


def _class_and_config(library: Any, folder: Path, trusted: bool) -> tuple[Any, Any]:
    """The model's class, and its configuration as if its weights were not stored in few bits."""
    config = library.AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)
    if not trusted:
        factory: Any = import_module("transformers.models.auto.auto_factory")
        if config.model_type in WRAPPERS:
            config = decoder_config(config)
        kind = factory._get_model_class(config, library.AutoModelForCausalLM._model_mapping)
        if kind.config_class == config.sub_configs.get("text_config"):
            config = config.get_text_config()
        return kind, config
    dynamic: Any = import_module("transformers.dynamic_module_utils")
    reference = config.auto_map["AutoModelForCausalLM"]
    return dynamic.get_class_from_dynamic_module(reference, str(folder), local_files_only=True), config


def _values(
    stored: Weights, kind: Any, config: Any, dtype: torch.dtype, absent: list[Callable[[str], bool]]
) -> dict[str, Tensor]:
    """What the stored numbers stand for, by the names of the checkpoint. Few-bit layouts have matrices as [out, in];
    the library keeps those of `Conv1D` the other way around."""
    with torch.device("meta"):
        turned = [name for name, module in kind(config).named_modules() if type(module).__name__ == "Conv1D"]
    integers = integer_matrices(stored)
    values = {}
    for name in stored.names():
        if any(elsewhere(name) for elsewhere in absent):
            continue
        value = stored.tensor(name)
        if name in integers and any(f".{module}.weight".endswith(f".{name}") for module in turned):
            value = value.t().contiguous()
        values[name] = value.to(dtype) if value.is_floating_point() else value
    return values


@contextmanager
def _quiet(*, reports: bool) -> Iterator[None]:
    """The library's progress bars would end up in the log. `reports`: its warnings of names that have no place may; of
    a stage they would list the layers of all others."""
    library: Any = import_module("transformers.utils.logging")
    shown, verbosity = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    if not reports:
        library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if shown:
            library.enable_progress_bar()

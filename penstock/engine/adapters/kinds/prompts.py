"""Kinds that train inputs: what is put before every prompt, as virtual tokens.

However such rows were trained (as they are, by an encoder, from the rows of real tokens), PEFT stores what it puts
before a prompt. Here they become rows for ids behind the model's vocabulary, and the engine begins each sequence with
those ids. Prefix tuning stores keys and values instead: the rows of its tokens are zeros (`adapters.prefixes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.end_tensors import VIRTUAL
from penstock.engine.adapters.kinds import rules
from penstock.engine.adapters.kinds.modules import PREFIX, Converted, Tensors
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.peft_config import LoraConfig
from penstock.engine.adapters.prefixes import PREFIX as STORED
from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError

_NAME = "prompt_embeddings"
_TASK = ("prefix_task_cols", "prefix_task_rows")


@dataclass(frozen=True, slots=True)
class Prompts:
    """One kind; see `kinds.read_settings` and `kinds.as_lora`."""

    title: str
    rules: KeyRules
    keys: bool = False
    """Whether keys and values are stored."""
    tasks: bool = False
    """Whether rows are multiplied by those of a task."""

    def settings(self, raw: Mapping[str, Any]) -> LoraConfig:
        count = raw.get("num_virtual_tokens")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CheckpointError(f"{CONFIG}: num_virtual_tokens must be a positive integer, found {count!r:.80}")
        if self.tasks:
            _task(raw)
        return LoraConfig.of_kind(raw, self.title)

    def convert(
        self, raw: Mapping[str, Any], settings: LoraConfig, tensors: Tensors, layout: AdapterLayout
    ) -> tuple[LoraConfig, Tensors]:
        name = next((site.modules[0] for site in layout.sites if site.end == "embedding"), None)
        if name is None:
            raise CheckpointError(
                f"{CONFIG}: {self.title} adapters are not supported on models that run through transformers and read "
                "tokens elsewhere than in their embedding, nor on several devices there"
            )
        if self.keys and layout.virtual_only:
            raise CheckpointError(
                f"{CONFIG}: {self.title} adapters are not supported on models that run through transformers; train "
                "prompt tuning"
            )
        keys = list(tensors.keys())
        if _NAME not in keys:
            raise CheckpointError(f"{WEIGHTS} has no {_NAME}")
        shape = tuple(tensors.get_slice(_NAME).get_shape())
        count, width = raw["num_virtual_tokens"], raw.get("token_dim")
        if self.keys and isinstance(width, int) and isinstance(raw.get("num_layers"), int):
            width *= 2 * raw["num_layers"]
        if shape[:1] != (count,) or (width is not None and shape != (count, width)):
            raise CheckpointError(f"{WEIGHTS}: {_NAME} is {shape}, and {CONFIG} says ({count}, {width!r})")
        taken = (_NAME, *(_TASK if self.tasks else ()))
        others = [key for key in keys if key not in taken]
        rows = partial(_of_task, tensors, raw) if self.tasks else partial(tensors.get_tensor, _NAME)
        made: dict[str, Callable[[], Tensor]] = {f"{PREFIX}{name}.{VIRTUAL}": rows}
        if self.keys:
            hidden = next(site.outputs for site in layout.sites if site.end == "embedding")
            made = {STORED: partial(tensors.get_tensor, _NAME), next(iter(made)): partial(torch.zeros, count, hidden)}
        return replace(settings, ranks={}), Converted(tensors, others, made)


def _task(raw: Mapping[str, Any]) -> int:
    """Which task's rows are used. PEFT is told with every call; here `task_id` in the configuration says it."""
    count, task = raw.get("num_tasks", 1), raw.get("task_id")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise CheckpointError(f"{CONFIG}: num_tasks must be a positive integer, found {count!r:.80}")
    if task is None and count > 1:
        raise CheckpointError(
            f"{CONFIG}: the adapter has {count} tasks; add task_id, 0 to {count - 1}, to a copy of the folder for each "
            "that is to be served"
        )
    task = 0 if task is None else task
    if not isinstance(task, int) or isinstance(task, bool) or not 0 <= task < count:
        raise CheckpointError(f"{CONFIG}: task_id must be 0 to {count - 1}, found {task!r:.80}")
    return task


def _of_task(tensors: Tensors, raw: Mapping[str, Any]) -> Tensor:
    rows, keys = tensors.get_tensor(_NAME), list(tensors.keys())
    if not set(_TASK) <= set(keys):
        raise CheckpointError(f"{WEIGHTS} has no {' and '.join(_TASK)}")
    columns, by = (tensors.get_tensor(key) for key in _TASK)
    count, ranks = raw.get("num_tasks", 1), columns.shape[-1] if columns.dim() else 0
    fits = rows.dim() == 2 and columns.shape == (count, len(rows), ranks)
    if not fits or by.shape != (count, ranks, rows.shape[1]):
        raise CheckpointError(
            f"{WEIGHTS}: {_TASK[0]} is {tuple(columns.shape)} and {_TASK[1]} {tuple(by.shape)}, which do not fit "
            f"{count} tasks and rows of {tuple(rows.shape)}"
        )
    task = _task(raw)
    return rows.float() * (columns[task].float() @ by[task].float())


PROMPTS: Mapping[str, Prompts] = {
    "PROMPT_TUNING": Prompts("prompt tuning", rules.PROMPT_TUNING),
    "P_TUNING": Prompts("p-tuning", rules.P_TUNING),
    "CPT": Prompts("CPT", rules.CPT),
    "MULTITASK_PROMPT_TUNING": Prompts("multitask prompt tuning", rules.MULTITASK_PROMPT_TUNING, tasks=True),
    "PREFIX_TUNING": Prompts("prefix tuning", rules.PREFIX_TUNING, keys=True),
    "CARTRIDGE": Prompts("cartridge", rules.CARTRIDGE, keys=True),
}
"""By `peft_type`."""

"""The layers of a model of the `transformers` library, called with packed tokens: of the whole model, or of one stage
of a pipeline.

In a stage, modules of this file stand for the layers of others. The first of those before it gives out the residual
stream that the stage before has sent, in place of what the model makes of its tokens; the first behind it takes the
stream and ends the pass. Invariant: between two layers nothing is passed on but the stream, or what `stage_row` has
found beside it; a model of which a stage can see that this does not hold is refused at load.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.linears import Shapes, shapes_by_layer
from penstock.engine.models.transformers.stage_row import StageRow, find_stage_row


class Body(Protocol):
    """The layers, from what a pass begins with to hidden states."""

    base: Any

    def __call__(self, entry: Tensor, **options: Any) -> Tensor:
        """[T, width] of the tokens that `entry` stands for: their ids, or in one of several stages what `embed` or the
        stage before has made of them."""
        ...

    def sample(self, count: int, device: torch.device) -> Tensor:
        """An entry of some tokens, for checks."""
        ...

    def reference(self, model: Any, count: int, device: torch.device) -> Tensor:
        """What the library computes of the same tokens by itself: logits, or in a stage what its layers give."""
        ...


class WholeBody:
    """See `Body`."""

    def __init__(self, base: Any, vocabulary: int) -> None:
        self.base = base
        self._vocabulary = vocabulary

    def __call__(self, entry: Tensor, **options: Any) -> Tensor:
        hidden: Tensor = self.base(input_ids=entry.unsqueeze(0), **options).last_hidden_state
        return hidden[0]

    def sample(self, count: int, device: torch.device) -> Tensor:
        return _some_tokens(count, self._vocabulary, device)

    def reference(self, model: Any, count: int, device: torch.device) -> Tensor:
        logits: Tensor = model(input_ids=self.sample(count, device).unsqueeze(0), use_cache=False).logits
        return logits[0]


def _some_tokens(count: int, vocabulary: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) * 7 + 3) % vocabulary


class CannotDivide(Exception):
    """A model that has no stages, with the reason."""


class _Left(Exception):
    """The stream has left the stage."""


class Junction:
    """Where the residual stream comes into a stage and leaves it."""

    def __init__(self, span: tuple[int, int], layers: int) -> None:
        self.span = span
        self.layers = layers
        self.given: Tensor | None = None
        """What the stage is run on, as a stage is given it: [1, T, width]."""
        self.entered: Tensor | None = None
        """The stream in it, as layers are."""
        self.taken: Tensor | None = None
        """What the next stage is given."""
        self.row: StageRow | None = None
        """Where layers pass on more than one residual stream."""
        self.in_tuples = False
        """Whether the model expects its layers to return tuples."""
        self.shapes: dict[int, Shapes] = {}
        """Of the linears of all layers."""

    @property
    def first(self) -> bool:
        return self.span[0] == 0

    @property
    def last(self) -> bool:
        return self.span[1] == self.layers

    def passed(self, index: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What the layer `index`, which is elsewhere, would return."""
        if self.row is None:
            hidden: Tensor | None = stream_of(arguments, options)
        else:
            hidden = arguments[0] if arguments else options["hidden_states"]
        if index >= self.span[1]:
            self.taken = hidden
            if self.row is not None:
                assert self.given is not None and hidden is not None
                self.taken = self.row.pack(self.span[1], hidden, options, self.given[0]).unsqueeze(0)
            raise _Left
        if index == 0:
            hidden = self.given
            if self.row is not None:
                assert hidden is not None
                hidden = self.row.unpack(self.span[0], hidden[0], options)
            self.entered = hidden
        return (hidden,) if self.in_tuples else hidden


class Elsewhere(nn.Module):
    """Stands for a layer of another stage. What a model asks of its layers beside calling them is the layer's own,
    which has no weights."""

    def __init__(self, layer: nn.Module, index: int, junction: Junction) -> None:
        super().__init__()
        self._layer = (layer,)  # not a part of this module
        self._index = index
        self._junction = junction

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._layer[0], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self._junction.passed(self._index, arguments, options)


class NoEmbedding(nn.Module):
    """Stands for the embedding of tokens in stages that have none. Its values reach no layer; `salt` changes them, to
    see that."""

    salt = 0

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding_dim = width
        self.weight = torch.empty(0, dtype=dtype)
        """Some models initialize it by name, before any weights are read."""
        self._dtype = dtype

    def forward(self, ids: Tensor, *_: Any) -> Tensor:
        return torch.full((*ids.shape, self.embedding_dim), float(self.salt), dtype=self._dtype, device=ids.device)


class NoHead(nn.Module):
    """Stands for the output projection in stages that have none. It is called where memory is measured only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return x


def stream_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The residual stream among the arguments of a layer."""
    hidden = arguments[0] if arguments else options.get("hidden_states")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != 1:
        raise CannotDivide("its layers pass on something other than one residual stream")
    return hidden


class StageBody:
    """See `Body`. An entry is the residual stream [T, hidden], or the row that `stage_row` makes of all that layers
    pass on; in the first stage, the embedded tokens. Where one stage has all layers, and shards have parts of them, it
    is the ids."""

    def __init__(self, base: Any, junction: Junction, hidden: int, dtype: torch.dtype) -> None:
        self.base = base
        self.junction = junction
        self.width = hidden if junction.row is None else junction.row.width
        """Of an entry."""
        self._dtype = dtype
        self._stand_in = 0
        """Behind the first stage: the id of all tokens, which no layer reads."""

    @property
    def reads_tokens(self) -> bool:
        """Whether a pass begins with token ids."""
        return self.junction.first and self.junction.last

    @property
    def _carries(self) -> StageRow | None:
        """Where the tokens go from stage to stage."""
        row = self.junction.row
        return row if row is not None and row.tokens else None

    def compared(self, x: Tensor) -> Tensor:
        """Of what the stage gives: what is the same whatever part of its layers a shard has."""
        row = self.junction.row
        return x if row is None or self.junction.last else x[:, : row.stream_width]

    def embed(self, token_ids: Tensor) -> Tensor:
        """What a pass begins with. Only in the first stage."""
        if self.reads_tokens:
            return token_ids
        if self._carries is not None:
            return self._carries.of_tokens(token_ids, self._dtype)
        embedded: Tensor = self.base.get_input_embeddings()(token_ids)
        if embedded.shape[-1] > self.width:
            raise CannotDivide("its embedding is wider than its residual stream")
        return nn.functional.pad(embedded, (0, self.width - embedded.shape[-1]))

    def __call__(self, entry: Tensor, **options: Any) -> Tensor:
        if self.reads_tokens:
            return self._run(input_ids=entry.unsqueeze(0), **options)
        self.junction.given = stream = entry.unsqueeze(0).clone()  # a model may write into what it is given
        if self._carries is not None:
            return self._run(input_ids=self._carries.ids(entry).unsqueeze(0), **options)
        if self.junction.first:
            return self._run(inputs_embeds=stream[..., : self.base.get_input_embeddings().embedding_dim], **options)
        ids = torch.full((1, len(entry)), self._stand_in, dtype=torch.int64, device=entry.device)
        return self._run(input_ids=ids, **options)

    def _run(self, **options: Any) -> Tensor:
        junction = self.junction
        try:
            hidden: Tensor = self.base(**options).last_hidden_state
            if not junction.last:
                raise CannotDivide("it does not run its layers one after the other")
        except _Left:
            taken = junction.taken
            assert taken is not None
            hidden = taken
        finally:
            junction.given = junction.entered = junction.taken = None
        return hidden[0]

    def sample(self, count: int, device: torch.device) -> Tensor:
        if self.junction.first:
            return self.embed(self._tokens(count, device))
        seeded = torch.Generator().manual_seed(0)
        entry = torch.randn(count, self.width, generator=seeded).to(device, self._dtype)
        return entry if self._carries is None else self._carries.marked(entry, self._tokens(count, device))

    def reference(self, model: Any, count: int, device: torch.device) -> Tensor:
        entry = self.sample(count, device)
        if not self.junction.first or self._carries is not None:
            return self(entry, use_cache=False)
        # From the tokens themselves: a model may use them for more than their embedding.
        self.junction.given = entry.unsqueeze(0)
        return self._run(input_ids=self._tokens(count, device).unsqueeze(0), use_cache=False)

    def _tokens(self, count: int, device: torch.device) -> Tensor:
        return _some_tokens(count, self.base.get_input_embeddings().num_embeddings, device)

    def find_form(self, entry: Tensor) -> None:
        """How the model expects its layers to return the stream, found by what its next layer receives. CannotDivide
        where it receives something else, or anything else makes a difference."""
        if self.junction.first:
            return
        for self.junction.in_tuples in (False, True):
            if self._arrives(entry):
                break
        else:
            raise CannotDivide("its layers return something other than one residual stream")
        try:
            plain = self(entry, use_cache=False)
        except (MemoryError, torch.OutOfMemoryError, CannotDivide):
            raise
        except Exception as error:  # such as keys that an earlier layer was to leave
            what = f"{type(error).__name__}: {error}"
            raise CannotDivide(f"its layers do not run without those before them ({what})") from error
        if self._carries is not None:
            return
        self._salt(1)
        salted = self(entry, use_cache=False)
        self._salt(0)
        if not torch.equal(plain, salted):
            raise CannotDivide("layers behind the first read the tokens too")

    def _salt(self, salt: int) -> None:
        """Change what stands for the tokens behind the first stage, ids and embedding."""
        self._stand_in = salt
        for module in self.base.modules():
            if isinstance(module, NoEmbedding):
                module.salt = salt

    def _arrives(self, entry: Tensor) -> bool:
        """Whether this stage's first layer receives the stream that the stage is given."""
        same: list[bool] = []

        def look(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            hidden = arguments[0] if arguments else options.get("hidden_states")
            same.append(hidden is not None and hidden is self.junction.entered)
            raise _Left

        layer = layers_of(self.base, self.junction.layers)[1][self.junction.span[0]]
        hook = layer.register_forward_pre_hook(look, with_kwargs=True)
        self.junction.taken = entry.unsqueeze(0)
        try:
            self(entry, use_cache=False)
        except Exception:  # whatever a model does with a stream in the other form
            return False
        finally:
            hook.remove()
        return same == [True]


def layers_of(base: Any, count: int) -> tuple[str, nn.ModuleList]:
    """The list of a model's layers, with its name."""
    lists = [
        (name, module)
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and not re.search(r"\.\d+\.", f".{name}.")
    ]
    if len(lists) != 1:
        raise CannotDivide("its layers do not lie in one list")
    return lists[0]


def take_out(model: Any, junction: Junction, dtype: torch.dtype) -> Callable[[str], bool]:
    """Put stand-ins for what belongs to other stages into a model that has no weights yet. Returns whether a name in
    the checkpoint is one of theirs."""
    base_name: str = model.base_model_prefix
    base: Any = getattr(model, base_name, None)
    if base is None or base is model:
        raise CannotDivide("it does not keep its layers apart from its head")
    name, layers = layers_of(base, junction.layers)
    begin, end = junction.span
    junction.row = find_stage_row(base, name, base.get_input_embeddings().num_embeddings)
    junction.shapes = shapes_by_layer(model)
    for index, layer in enumerate(layers):
        if not begin <= index < end:
            layers[index] = Elsewhere(layer, index, junction)
    ends: list[str] = []
    if not junction.first:
        table, head = base.get_input_embeddings(), model.get_output_embeddings()
        if junction.row is not None and junction.row.tokens:
            table = None
        ends = [path for path, module in model.named_modules() if module is table or module is head]
        if table is not None:
            base.set_input_embeddings(NoEmbedding(table.embedding_dim, dtype))
        for path in ends:
            if model.get_submodule(path) is head:
                above, _, last = path.rpartition(".")
                setattr(model.get_submodule(above), last, NoHead())
        model.all_tied_weights_keys = {}
    inside = re.compile(rf"(?:^|\.){re.escape(name)}\.(\d+)\.")

    def elsewhere(tensor: str) -> bool:
        found = inside.search(tensor)
        if found is not None:
            return not begin <= int(found[1]) < end
        return any(f".{tensor}".endswith(f".{path.removeprefix(f'{base_name}.')}.weight") for path in ends)

    return elsewhere

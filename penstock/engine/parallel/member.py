"""A rank's membership in its engine: which part it holds, and how it agrees with the others while starting.

Rank 0 and the worker ranks load their part of the model with the same code (`startup.part`); they differ only in how
they agree on a number.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.experts import AdaptedExperts
from penstock.engine.adapters.layout import AdapterCut
from penstock.engine.backends.backend import Backend
from penstock.engine.backends.interface import OverRanks
from penstock.engine.backends.select import rank_device
from penstock.engine.models.decoder import Decoder, DecoderLayer
from penstock.engine.models.layers.absent import NoFeedForward, NoMixer
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.compressed_attention import CompressedAttention
from penstock.engine.models.layers.delta_net import GatedDeltaNet
from penstock.engine.models.layers.experts import ApartExperts, NarrowExperts, SharedAndRouted
from penstock.engine.models.layers.feed_forward import FeedForward
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.layers.short_conv import ShortConv
from penstock.engine.models.layers.side_by_side import SideBySide
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.muse import GatedResidualLayer
from penstock.engine.models.weights import Weights
from penstock.engine.parallel.adapters import adapter_cut
from penstock.engine.parallel.cuts import head_rows
from penstock.engine.parallel.dispatch import ExchangedExperts
from penstock.engine.parallel.groups import Group, Groups
from penstock.engine.parallel.kept_sums import KeptSums
from penstock.engine.parallel.layout import Place, check_layout, local_config, place_experts
from penstock.engine.parallel.linears import GatheredLinear, SummedFeedForward, SummedLinear, summed, summing
from penstock.engine.parallel.rendezvous import Rendezvous
from penstock.engine.parallel.shards import shard
from penstock.errors import PenstockError, ReplicaLost

GONE = (RuntimeError, ConnectionError, TimeoutError)
"""What groups raise when a member is gone: those of one machine, and those between machines."""
KV_BLOCKS = "KV blocks"
"""What ranks call the blocks of their caches when they agree on a number."""


class Member(ABC):
    """One rank of several."""

    def __init__(self, place: Place, rendezvous: Rendezvous) -> None:
        self.place = place
        self.rendezvous = rendezvous
        self._groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        assert self._groups is not None, "the ranks have not met yet"
        return self._groups

    @property
    def captures(self) -> bool:
        """Whether steps are captured, where its device captures any; see `LeadDecoder.followers`."""
        return self.groups.capturable and not self.place.data

    @property
    def neighbours(self) -> int:
        """Ranks on this machine, itself included."""
        return len(self.rendezvous.beside(self.place.rank))

    def device(self, first: torch.device) -> torch.device:
        """This rank's device, when the first rank on its machine has `first` and none are named."""
        beside = self.rendezvous.beside(self.place.rank)
        devices = [self.rendezvous.devices[rank] for rank in beside] if self.rendezvous.devices else ()
        return rank_device(first, beside.index(self.place.rank), len(beside), devices)

    def meet(self, backend: Backend) -> None:
        """Connect with the other ranks, once."""
        if self._groups is None:
            self._announce()
            try:
                self._groups = Groups(self.place, self.rendezvous, backend)
            except GONE as error:  # one that was here first may have failed since, and left
                raise self.loss(error) from error

    @property
    def calibration(self) -> Path | None:
        """Where this rank keeps what its calibration found; None where nobody will ask. See `calibrate`."""
        return self._kept("calibration")

    def _kept(self, what: str) -> Path | None:
        """A file that outlives this rank, where it is started again when it is lost."""
        if not self.rendezvous.keeps or self.place.rank == 0:
            return None
        return self.rendezvous.folder / f"{self._holds}-{what}-{self.place.rank}.safetensors"

    _holds = "model"

    def check(self, model: ModelConfig) -> None:
        """Raise `ConfigError` when the model cannot be split over these ranks."""
        check_layout(model, self.place.tensor, self.place.pipeline, self.place.data)

    def cut(
        self, weights: Weights, model: ModelConfig, expert_copies: int | None = None
    ) -> tuple[Weights, ModelConfig, int]:
        """This rank's part of a checkpoint, the configuration that describes it, and its rows of the head.

        `expert_copies`: experts are whole, with that many copies on each shard; None: they are cut like all else.
        """
        if expert_copies is not None:
            model = place_experts(model, self.place.tensor, expert_copies)
        self.check(model)
        return shard(weights, model, self.place), local_config(model, self.place), head_rows(model, self.place)

    def adapter_cut(self, model: ModelConfig, *, experts: bool, whole_experts: bool) -> AdapterCut:
        """This rank's part of every adapter; see there."""
        return adapter_cut(model, self.place, experts=experts, whole_experts=whole_experts)

    def connect(self, decoder: Decoder) -> Decoder:
        """Put the sums and gathers between shards into a decoder made of parts."""
        group = self.groups.tensor
        if group is None or decoder.config.by_transformers:
            return decoder  # where the library runs it, its linears add up by themselves
        mamba = decoder.config.mamba
        norm_shards = 1 if mamba is None else mamba.norm_shards
        return dataclasses.replace(
            decoder,
            ops=decoder.ops if self.place.data else summing(decoder.ops, group),
            layers=[
                _exchanged(layer, group) if self.place.data else _summed(layer, group, norm_shards)
                for layer in decoder.layers
            ],
            head=GatheredLinear(decoder.head, group, decoder.config.vocab_size),
            # The fused path adds to the residual stream inside the linears, before there is a sum.
            fused_up_to=0,
        )

    def loading_sums(self) -> KeptSums | None:
        """`summed` while a rank loads, where it is started again when it is lost."""
        file = self._kept("sums")
        return None if file is None else KeptSums(self.summed, file)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of every shard's `x`, in place. ReplicaLost where one of them is gone."""
        group = self.groups.tensor
        assert group is not None
        try:
            return group.sum(x)
        except GONE as error:
            raise self.loss(error) from error

    def loss(self, error: Exception) -> PenstockError:
        """What to raise when ranks could not do together what they do while loading: why another one left, as far as
        this one knows."""
        return ReplicaLost(f"another rank is gone: {error}")

    def leave(self) -> None:
        """Let those that wait for this rank know that it is gone."""
        if self._groups is not None:
            self._groups.drop()

    def _announce(self) -> None:  # noqa: B027 - some have nobody to tell
        """Before the first collective: this rank is up and has found its device."""

    def agree(self, choices: Mapping[str, Any]) -> None:  # noqa: B027 - as above
        """Make sure that all ranks have chosen the same where the configuration left it to them: their machines may
        differ."""

    def anywhere(self, found: bool) -> bool:
        """Whether something holds on one of the ranks; every rank calls this at the same point."""
        return not self.least(int(not found))

    @abstractmethod
    def least(self, count: int, of: str = "") -> int:
        """The smallest `count` of all ranks; every rank calls this at the same point. `of`: what is counted."""


class DraftMember(Member):
    """A rank's membership among those that have a part of the draft model: the first few shards of the first stage."""

    _holds = "draft"

    def __init__(self, whole: Member, shards: int) -> None:
        super().__init__(Place(whole.place.rank, shards, 1), whole.rendezvous)
        self._whole = whole

    def device(self, first: torch.device) -> torch.device:
        return self._whole.device(first)

    def meet(self, backend: Backend) -> None:
        self._whole.meet(backend)
        self._groups = self._whole.groups.of_first(self.place.tensor)

    def loss(self, error: Exception) -> PenstockError:
        return self._whole.loss(error)

    def least(self, count: int, of: str = "") -> int:
        """Its cache has the target's number of blocks, on which the ranks agree."""
        return count


def _exchanged(layer: DecoderLayer, group: Group) -> DecoderLayer:
    """Layers are whole, and each shard has its own tokens: only those for experts elsewhere are exchanged."""

    def exchanged(found: Any) -> Any:
        if isinstance(found, SharedAndRouted | NarrowExperts | ApartExperts):  # every shard has what all tokens pass
            return dataclasses.replace(found, routed=exchanged(found.routed))
        return ExchangedExperts(found, group) if hasattr(found, "slots") else found

    return dataclasses.replace(layer, feed_forward=exchanged(layer.feed_forward))


def _norm_over(group: Group, shards: int) -> OverRanks:
    """Means over each `shards` neighbouring ranks, of equally many channels each."""
    run, runs = group.rank // shards, group.size // shards

    def mean(means: Tensor) -> Tensor:
        if runs == 1:
            return group.sum(means) / shards
        every = means.new_zeros(len(means), runs)
        every[:, run : run + 1] = means
        return group.sum(every)[:, run : run + 1] / shards

    return mean


def _visits_over(experts: Any, group: Group) -> Any:
    """Experts whose outputs are normalized, where ranks have parts of all of them: what each gives is summed first."""
    if isinstance(experts, NarrowExperts):
        return dataclasses.replace(experts, routed=_visits_over(experts.routed, group))
    if isinstance(experts, AdaptedExperts):
        return dataclasses.replace(experts, base=_visits_over(experts.base, group))
    if experts.visit_norm is None or experts.slots is not None:
        return experts
    norm = dataclasses.replace(experts.visit_norm, over_ranks=group.sum, share=(group.rank, group.size))
    return dataclasses.replace(experts, visit_norm=norm)


def _summed(layer: DecoderLayer, group: Group, norm_shards: int = 1) -> DecoderLayer:
    """`norm_shards`: see `MambaConfig`."""
    feed_forward: FeedForward = SummedFeedForward(layer.feed_forward, group)
    if isinstance(layer.feed_forward, NoFeedForward):
        feed_forward = layer.feed_forward
    if isinstance(layer.feed_forward, NarrowExperts):
        feed_forward = SummedFeedForward(_visits_over(layer.feed_forward, group), group)
    if isinstance(layer, GatedResidualLayer):  # what the feed-forward gives is multiplied before a norm reads it
        assert isinstance(feed_forward, SummedFeedForward)
        feed_forward.at_once = True
    if isinstance(layer.feed_forward, ApartExperts):  # norms stand between its parts and the sum
        feed_forward = dataclasses.replace(layer.feed_forward, over_ranks=group.sum)
    if isinstance(layer.mixer, NoMixer):
        return dataclasses.replace(layer, feed_forward=feed_forward)
    if isinstance(layer.mixer, CompressedAttention):
        # Several streams are added to, which no norm does on the way.
        whole = dataclasses.replace(layer.mixer, output=SummedLinear(layer.mixer.output, group, at_once=True))
        added = SummedFeedForward(layer.feed_forward, group, at_once=True)
        return dataclasses.replace(layer, mixer=whole, feed_forward=added)
    if isinstance(layer.mixer, LatentAttention | GatedDeltaNet):
        other: Any = layer.mixer
        mixed = dataclasses.replace(other, ops=summing(other.ops, group), output=SummedLinear(other.output, group))
        return dataclasses.replace(layer, mixer=mixed, feed_forward=feed_forward)
    norms = _norm_over(group, norm_shards) if norm_shards > 1 else None
    if isinstance(layer.mixer, Mamba2):
        mamba = layer.mixer
        changed = dataclasses.replace(
            mamba, ops=summing(mamba.ops, group), out_proj=SummedLinear(mamba.out_proj, group), over_ranks=norms
        )
        return dataclasses.replace(layer, mixer=changed, feed_forward=feed_forward)
    if isinstance(layer.mixer, ShortConv):
        short = layer.mixer
        cut = dataclasses.replace(short, ops=summing(short.ops, group), out_proj=SummedLinear(short.out_proj, group))
        return dataclasses.replace(layer, mixer=cut, feed_forward=feed_forward)
    if isinstance(layer.mixer, SideBySide):
        both = layer.mixer
        beside = dataclasses.replace(
            both,
            ops=summing(both.ops, group),
            mamba=dataclasses.replace(both.mamba, over_ranks=norms),
            over_ranks=lambda part: summed(part, group),
        )
        return dataclasses.replace(layer, mixer=beside, feed_forward=feed_forward)
    assert isinstance(layer.mixer, Attention), "only attention and delta nets are cut by heads"
    attention = layer.mixer
    row_norms = attention.row_norms
    if row_norms is not None:
        # Every shard has as many heads, so the mean of their means is that of all.
        row_norms = dataclasses.replace(row_norms, over_ranks=lambda means: group.sum(means) / group.size)
    mixer = dataclasses.replace(
        attention, ops=summing(attention.ops, group), output=SummedLinear(attention.output, group), row_norms=row_norms
    )
    return dataclasses.replace(layer, mixer=mixer, feed_forward=feed_forward)

"""Adapters on the gates behind norms, of what a part of a layer reads (A.X K2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock.engine.adapters.kernel import AdaptedLinear, LoraKernel
from penstock.engine.adapters.layout import (
    EXPERTS_GATE_IN,
    EXPERTS_GATE_OUT,
    MIXER_GATE_IN,
    MIXER_GATE_OUT,
    PlacedSite,
)
from penstock.engine.models.axk2 import GatedNormsLayer, InputGate


def adapt_input_gates(layer: GatedNormsLayer, kernel: LoraKernel, placed: Mapping[str, PlacedSite]) -> GatedNormsLayer:
    """A layer with the adapters of its gates; `placed`: sites by attribute."""

    def adapted(gate: InputGate, narrow: str, wide: str) -> InputGate:
        return dataclasses.replace(
            gate,
            down=AdaptedLinear(gate.down, kernel, placed[narrow]),
            up=AdaptedLinear(gate.up, kernel, placed[wide]),
        )

    of_experts = layer.feed_forward_gate
    return dataclasses.replace(
        layer,
        mixer_gate=adapted(layer.mixer_gate, MIXER_GATE_IN, MIXER_GATE_OUT),
        feed_forward_gate=None if of_experts is None else adapted(of_experts, EXPERTS_GATE_IN, EXPERTS_GATE_OUT),
    )

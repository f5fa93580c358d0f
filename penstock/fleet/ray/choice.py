"""Which node a new replica should go to (pure).

    spread   the node with the fewest replicas of the same model, then the one with the largest share of free resources
    pack     the node with the smallest share of free resources that still has room

Only what this server reserved is known here, not what others use, so the choice is a preference: Ray places the replica
elsewhere if that node has no room. Where no node seems to have room, Ray alone decides, and waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.fleet.ray.bundle import Bundle, Node


@dataclass(frozen=True, slots=True)
class Reserved:
    """A bundle on a node; `model` is empty for a gateway."""

    node: str
    bundle: Bundle
    model: str = ""


def preferred_node(
    bundle: Bundle, model: str, nodes: Sequence[Node], reserved: Iterable[Reserved], how: Literal["spread", "pack"]
) -> str:
    """The id of the node; empty: none seems to have room."""
    taken = [entry for entry in reserved if entry.node]
    open_nodes = [(node, free) for node in nodes if (free := _free(node, bundle, taken)) is not None]
    if not open_nodes:
        return ""
    if how == "pack":
        return min(open_nodes, key=lambda entry: (entry[1], entry[0].id))[0].id
    same = {node.id: sum(entry.node == node.id and entry.model == model for entry in taken) for node, _ in open_nodes}
    return min(open_nodes, key=lambda entry: (same[entry[0].id], -entry[1], entry[0].id))[0].id


def _free(node: Node, bundle: Bundle, taken: Sequence[Reserved]) -> float | None:
    """The smallest share of a needed resource that is left on a node before the bundle is placed; None: no room."""
    shares = []
    for name, amount in bundle.resources.items():
        total = node.resources.get(name, 0.0)
        left = total - sum(entry.bundle.resources.get(name, 0.0) for entry in taken if entry.node == node.id)
        if left + 1e-9 < amount:
            return None
        shares.append(left / total)
    return min(shares, default=1.0)

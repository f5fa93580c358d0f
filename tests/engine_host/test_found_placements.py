"""Blocks that an engine found on disk are announced like prompts that were sent to it."""

from __future__ import annotations

from penstock.engine.kv.block_hash import DIGEST_SIZE
from penstock.engine_host.placements import MOST_BLOCKS, Placements
from penstock.routing.prefix_index import PrefixIndex


def test_gateways_learn_the_newest_blocks_that_were_found() -> None:
    names = [number.to_bytes(DIGEST_SIZE) for number in range(2000)]
    placements, index = Placements(), PrefixIndex()
    placements.add_found(names, 1500)
    sent = [placement.names for message in placements.messages() for placement in message.placements]
    assert sum(map(len, sent)) == 1500 * DIGEST_SIZE and max(map(len, sent)) == MOST_BLOCKS * DIGEST_SIZE
    for joined in sent:
        index.sent("a", [joined[at : at + DIGEST_SIZE] for at in range(0, len(joined), DIGEST_SIZE)], 1000)
    assert index.matched("a", names[::-1]) == 1000, "the most recently used are remembered"

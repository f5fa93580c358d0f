"""Names for cached prefixes.

The name of a full block is a digest of its parent's name and its own tokens, so equal names mean equal prefixes.
Digests, not `hash()`: a router in another process must arrive at the same names, and a collision would hand one
request's keys to another. No torch here, so that the router can import it.

Every name begins with the tag of its owner, usually a tenant, so that everything of an owner can be found wherever
names are kept, also by a process that comes later (`kv.erasure`). Owners with equal tags share nothing: the other 96
bits depend on the whole salt.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

NAMING = 2
"""Grows when names change. Engines that differ in it do not hand over blocks, nor read what the other left on disk. 2:
they begin with the tag of their owner."""
DIGEST_SIZE = 16
OWNER_SIZE = 4
_REST = DIGEST_SIZE - OWNER_SIZE
_STATE = b"s"


def root_name(salt: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block. Different salts never share blocks, nor do different adapters
    (`adapter` is the version of its weights)."""
    return owner_tag(salt) + blake2b(salt.encode(), digest_size=_REST, key=adapter.encode()).digest()


def owner_tag(salt: str) -> bytes:
    """What all names of an owner begin with. The owner is the part of a salt before its first NUL."""
    return blake2b(salt.partition("\0")[0].encode(), digest_size=OWNER_SIZE).digest()


def block_name(parent: bytes, tokens: list[int]) -> bytes:
    """The name of the block that holds `tokens` after the prefix called `parent`."""
    return parent[:OWNER_SIZE] + blake2b(parent + array("I", tokens).tobytes(), digest_size=_REST).digest()


def names_after(parent: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    """The names of the full blocks of `tokens`, one after the other, after the prefix called `parent`."""
    names: list[bytes] = []
    owner, content = parent[:OWNER_SIZE], array("I", tokens)
    width, data = block_size * content.itemsize, content.tobytes()
    for end in range(width, len(data) + 1, width):
        parent = owner + blake2b(parent + data[end - width : end], digest_size=_REST).digest()
        names.append(parent)
    return names


def block_names(tokens: list[int], block_size: int, salt: str = "", adapter: str = "") -> list[bytes]:
    """Names of every full block of `tokens`."""
    return names_after(root_name(salt, adapter), tokens, block_size)


def state_name(block: bytes) -> bytes:
    """What engines call the state at the end of a block when they hand it over (`kv.states`)."""
    return block + _STATE


def is_state(name: bytes) -> bool:
    return len(name) > DIGEST_SIZE


def of_state(name: bytes) -> bytes:
    """The block at whose end a state stands; a block's own name stays."""
    return name[:DIGEST_SIZE]

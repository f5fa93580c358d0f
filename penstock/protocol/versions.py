"""Which versions of the gateway-engine protocol this release speaks, and how two sides agree on one.

A release speaks its own version and the one before, so that a fleet is upgraded process by process. A gateway proposes
in `Hello`, first its newest version. An engine that speaks the proposed version registers the gateway and repeats it
in `Ready`; one that does not answers with the nearest version that it does speak and registers nothing, and the gateway
proposes that one, if it can. What a version added is only sent to a side that agreed on it.

To change the protocol (docs/upgrade.md): new fields have defaults and need no new version; a new message, or a new
meaning of a field, gets one, and `OLDEST_VERSION` follows one release later. Fields are never removed or renamed before
no supported version uses them.
"""

from __future__ import annotations

PROTOCOL_VERSION = 6
"""3: the first that is kept compatible. 4: `Placed`. 5: `Erase`. 6: `Begun`."""
OLDEST_VERSION = 3
PLACED_SINCE = 4
"""`Placed` is sent from this version on."""
ERASE_SINCE = 5
"""And `Erase` from this one."""
BEGUN_SINCE = 6
"""And `Begun` from this one."""


def answer(proposed: int) -> int:
    """The version that an engine answers to a proposal with: the same, or the nearest that it speaks."""
    return min(max(proposed, OLDEST_VERSION), PROTOCOL_VERSION)


class Proposal:
    """A gateway's side of the agreement with one engine."""

    __slots__ = ("problem", "version")

    def __init__(self) -> None:
        self.version = PROTOCOL_VERSION
        """What is proposed, and spoken once the engine has agreed."""
        self.problem = ""
        """Why there is no common version."""

    def again(self) -> None:
        """Another engine may listen there now."""
        self.version = PROTOCOL_VERSION
        self.problem = ""

    def agreed(self, answered: int) -> bool:
        """Whether the engine's answer settles the version. If not, `version` is to be proposed, unless there is a
        `problem`."""
        if answered == self.version:
            self.problem = ""
            return True
        if OLDEST_VERSION <= answered <= PROTOCOL_VERSION:
            self.version = answered
        else:
            newer, older = ("it", "this side") if answered > PROTOCOL_VERSION else ("this side", "it")
            self.problem = (
                f"it speaks protocol {answered}, this side {OLDEST_VERSION} to {PROTOCOL_VERSION}: {newer} is more "
                f"than one release newer than {older}; upgrade {older} first, one release at a time"
            )
        return False

"""The errors of Unicron: one base, and a few that callers distinguish.

Each message names what was wrong, where, and the cure.
"""

import errno
from typing import Any, NamedTuple


class UnicronError(Exception):
    """Base of every error that Unicron raises on purpose."""


class InvalidInputError(UnicronError):
    """Something from outside (file, message, order, setting) can't be used; nothing was changed."""


class BusUnavailableError(UnicronError):
    """The message bus can't be reached or did not answer in time."""


class NobodyAnswersError(BusUnavailableError):
    """Nobody is there to take a query or an order: it had no effect."""


class NotAllowedError(UnicronError):
    """The message bus refused what our key gives us no right to."""


class ConflictError(UnicronError):
    """A compare-and-set lost: somebody else wrote in between."""


class UntimelyProofError(InvalidInputError):
    """A proof holds but for its time: the clock of one of the two is off, or somebody shows an old one again."""


class StaleTokenError(UnicronError):
    """A command carried a fencing token lower than one already seen."""


class GroupBrokenError(RuntimeError, UnicronError):
    """A collective, or the forming of a group, was interrupted or lost a peer: the membership can't go on."""


class StateDivergedError(GroupBrokenError):
    """Replicas of a place have different states, which were the same: some of them are to take another's.

    Attributes:
        own: this rank's is one of those that must not be used any more.
    """

    def __init__(self, text: str, *, own: bool) -> None:
        super().__init__(text)
        self.own = own


class StateTransferError(RuntimeError, UnicronError):
    """No source could hand over a state that has its checksum."""


class LackError(StateTransferError):
    """A machine lacks what healing takes, such as room: no process is at fault, and it may be there later."""


_LACKS = {
    errno.ENOSPC: ("room", "make room there, or give it more, as with --shm-size"),
    errno.EDQUOT: ("room", "make room there, or raise the quota"),
    errno.ENOMEM: ("memory", "raise the limit of the container or of `ulimit -v`, or have fewer workers there"),
    errno.EMFILE: ("descriptors", "raise `ulimit -n`"),
    errno.ENFILE: ("descriptors", "raise fs.file-max"),
    errno.EAGAIN: ("processes", "raise `ulimit -u`, or the limit of pids of the container"),
    errno.EADDRNOTAVAIL: ("ports", "widen net.ipv4.ip_local_port_range"),
}


def explain_lack(error: OSError) -> str:
    """Return the reason of an error of the system; where a machine lacks something, what that is, and the cure."""
    what, cure = _LACKS.get(error.errno or 0, ("", ""))
    reason = error.strerror or str(error)
    return f"{reason}: the machine lacks {what}; {cure}" if what else reason


_SAID = {"Too many open files": errno.EMFILE, "Cannot assign requested address": errno.EADDRNOTAVAIL}
"""How libraries that connect repeat the system, as gloo does."""


def explain_text(text: str) -> str:
    """Return what a library says of an error of the system; with lack and cure, as `explain_lack` does."""
    found = next((code for said, code in _SAID.items() if said in text), None)
    return text if found is None or tells_lack(text) else explain_lack(OSError(found, text.strip()))


def tells_lack(text: str) -> bool:
    """Return whether a text is about something that `explain_lack` found lacking."""
    return any(f": the machine lacks {what}; " in text for what, _ in _LACKS.values())


class UnusableStateError(GroupBrokenError):
    """The first gradient on a state that was had from copies is not finite: nobody goes on with it."""


class NonFiniteGradientError(RuntimeError, UnicronError):
    """The gradient is not finite, and the session's rule is to stop then: no restart would change that."""


class StateLostError(RuntimeError, UnicronError):
    """A worker has no state that others could go on from with it: only a new process can begin without."""


class RankEndedError(UnicronError):
    """A rank of a script waits for another that never comes, as it has ended: no restart would change that."""


class UnsoundStateError(StateTransferError):
    """A copy of a state is not what its checksum says, or is gone though it was to last."""


class CheckpointError(RuntimeError, UnicronError):
    """A checkpoint could not be written or read, or fails its check; the others on the storage are as they were."""


class Problem(NamedTuple):
    """A field that can't be used.

    Attributes:
        field: its name, with the key after a dot for a row of a map.
        value: what was given.
        allowed: what it must be.
    """

    field: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        return f"{self.field} {self.value!r}: {self.allowed}"

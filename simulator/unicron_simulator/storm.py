"""A storm: the real services in virtual time while seeded faults strike them and the cluster."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a storm ended.

    Attributes:
        seed: of the storm; the same seed gives the same history, byte for byte.
        violation: the invariant that was broken, in words; empty where all held.
        story: the shrunk history that leads to the violation, one line an event; empty where all held.
        faults: how many faults struck.
        messages: length of the journal at the end.
        virtual_s: virtual seconds that the storm lasted.
        digest: of the journal.
    """

    seed: int
    violation: str = ""
    story: str = ""
    faults: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    digest: str = ""


def run(seed: int) -> Outcome:
    """Run the storm `seed`; on a violation, also shrink its history (which takes many runs)."""
    return Outcome(seed)

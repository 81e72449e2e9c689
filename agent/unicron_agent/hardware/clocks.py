"""Whether a node's clock is right: other nodes take no proof from one that is not, so it can fetch no state."""

from unicron.fabric_proofs import WINDOW_S

MOST_S = WINDOW_S / 2
"""By which a node's clock may differ from that of the registry, as another's may be as far off on the other side."""


def clock_off(joined: float, admitted: float, read: float) -> str:
    """Return what is wrong with this node's clock; empty where nothing is.

    Args:
        joined: when this node said that it joins, by its own clock in Unix seconds; 0 where that is not known yet.
        admitted: when the registry admitted it, by the registry's clock: behind the one and before the other.
        read: when this node read that, by its own clock.
    """
    earliest = (joined or read - MOST_S) - MOST_S
    if earliest <= admitted <= read + MOST_S:
        return ""
    apart = admitted - read if admitted > read else admitted - (joined or read)
    side = "behind" if apart > 0 else "ahead of"
    return (
        f"its clock is {abs(apart):.0f} s {side} the registry's, and {MOST_S:g} s are allowed: set both (by chrony or "
        "systemd-timesyncd), then start its agent again"
    )

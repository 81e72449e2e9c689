"""Whose clock is wrong: told once, with by how much, until it is right again, which is told, too."""

from unicron.contracts.base import Message
from unicron.contracts.events import Alert
from unicron.contracts.watchdogs import AlertKind
from unicron.fabric_proofs import WINDOW_S
from unicron_detector.state import DetectorState, NodeRecord

CLOCK_S = WINDOW_S / 2
"""By which a node's clock may differ from ours, as another's may be as far off on the other side."""

OFF_TICKS = 4
"""More ticks that show a clock to be off than others; heartbeats that waited while we were held up show it in one or
two."""

OWN = ""
"""As the name of a node: the machine that the detector runs on."""


def check_clocks(state: DetectorState) -> list[Message]:
    """Return an alert for each clock that is found to be off, and one for each that is right again."""
    for node in state.nodes.values():
        if not node.silent:  # else nothing was heard since the last tick
            change = 1 if abs(node.ahead_s) > CLOCK_S else -1
            node.off_ticks = min(max(node.off_ticks + change, 0), OFF_TICKS)
    known = set(state.clocks)
    out: list[Message] = [_over(state, name) for name in known if _is_right(state, name)]
    if OWN in state.clocks:
        return out  # by a clock that is wrong nobody else's can be told
    off = {name: node for name, node in state.nodes.items() if node.off_ticks == OFF_TICKS}
    if off and _are_together(state.nodes):
        state.clocks = [OWN]
        others = f"the clocks of all {len(state.nodes)} nodes"
        return [*out, _wrong(OWN, -next(iter(off.values())).ahead_s, others)]
    right = [name for name, node in state.nodes.items() if not (node.off_ticks or node.silent)]
    for name in [name for name in off if name not in state.clocks and (right or len(state.nodes) == 1)]:
        state.clocks.append(name)
        out.append(_wrong(name, off[name].ahead_s, "the detector's"))
    return out


def _are_together(nodes: dict[str, NodeRecord]) -> bool:
    """Return whether all clocks are off by as much: then it is this machine's own that is wrong."""
    apart = [node.ahead_s for node in nodes.values()]
    return len(nodes) > 1 and all(node.off_ticks for node in nodes.values()) and max(apart) - min(apart) < CLOCK_S


def _is_right(state: DetectorState, name: str) -> bool:
    """Return whether a clock is right again; ours is by what most of the others say, who are then judged anew."""
    if name != OWN:
        return name not in state.nodes or not state.nodes[name].off_ticks
    over = 2 * sum(not node.off_ticks for node in state.nodes.values()) > len(state.nodes)
    for node in state.nodes.values() if over else ():
        node.off_ticks = 0
    return over


def _over(state: DetectorState, name: str) -> Alert:
    state.clocks.remove(name)
    gone = name != OWN and name not in state.nodes
    text = f"the clock of {_whose(name)} {'is not heard any more' if gone else 'is right again'}"
    return Alert(text=text, node=name, kind=AlertKind.CLOCK, over=True)


def _wrong(name: str, ahead_s: float, other: str) -> Alert:
    side = "ahead of" if ahead_s > 0 else "behind"
    text = (
        f"the clock of {_whose(name)} is {abs(ahead_s):.0f} s {side} {other}, and {CLOCK_S:g} s are allowed: set it "
        "(by chrony or systemd-timesyncd); healing goes on meanwhile"
    )
    return Alert(text=text, node=name, kind=AlertKind.CLOCK)


def _whose(name: str) -> str:
    return name or "the machine that the detector runs on"

"""How a rank of a script that is healed in place meets the others outside of its loops."""

from unicron.contracts.worker import NOWHERE, Membership
from unicron.errors import GroupBrokenError, StateTransferError
from unicron.train.groups.group import Group
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.scripts.files import Files
from unicron.train.scripts.groups import ScriptGroups, packed
from unicron.train.snapshots.state import Fetcher
from unicron.train.worker.channel import Channel

STANDS, NEW, GOES_ON, AGAIN = "-stands", b"new", b"goes on", b"again"
"""What ranks of a membership tell those that have just been started."""


class ScriptMeeting:
    """The rank's part in it; a newer membership interrupts that, and all else in which the rank waits for others.

    Args:
        channel: to the agent.
        files: that the script opens.

    Attributes:
        membership: that met before the loops.
        group: over which gradients are summed; None before the loops.
    """

    def __init__(self, channel: Channel, files: Files) -> None:
        self.membership = NOWHERE
        self.group: Group | None = None
        self._channel, self._files = channel, files
        self._groups: ScriptGroups | None = None
        self._waits: Rendezvous | None = None
        self._waits_in = -1

    def meet(self, groups: ScriptGroups) -> None:
        """Form the script's group, where all ranks are new; else have a ghost of it until its loops begin."""
        self._groups = groups
        self._channel.interrupt = self.interrupt
        above = -1
        while True:
            membership = self._channel.await_membership(above)
            above = membership.epoch
            try:
                self._meet(membership, groups)
            except GroupBrokenError:  # somebody was lost, and there is a newer one soon
                continue
            self.membership = membership
            return

    def _meet(self, membership: Membership, groups: ScriptGroups) -> None:
        told = self.wait_for(STANDS, membership, self._stands(membership))
        others = [each for each in told if each.startswith(GOES_ON)]
        self._files.know(late=any(each != NEW for each in told))
        if others:
            groups.come_late(others[0].removeprefix(GOES_ON))
        else:
            if again := next((each for each in told if each != NEW), None):
                groups.come_again(again.removeprefix(AGAIN))
            groups.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            groups.strict = True

    def _stands(self, membership: Membership) -> bytes:
        """Return what to tell the others: who knows of a saved state, what collectives had given by then."""
        if membership.shelf is None:
            return NEW
        fetcher = Fetcher(self._channel)
        try:
            found = fetcher.fetch([ref for ref in membership.shelf.states if ref.place == 0], membership.epoch)
            return AGAIN + packed(found["objects"]["groups"]["setup"])
        except (StateTransferError, LookupError, TypeError, AttributeError):  # whoever loads it says what is wrong
            return NEW
        finally:
            fetcher.let_go()

    def wait_for(self, part: str, membership: Membership, value: bytes) -> list[bytes]:
        """Tell the others something, and return what each of them has told.

        Raises:
            GroupBrokenError: a newer membership came meanwhile.
        """
        store = self._waits = Rendezvous(membership, part)
        self._waits_in = membership.epoch
        try:
            self.interrupt(self._channel.newest)  # one that came before there was anything to cut
            store.set(f"{membership.rank}", value)
            return store.take([f"{rank}" for rank in range(membership.world_size)])
        finally:
            self._waits = None

    def interrupt(self, membership: Membership) -> bool:
        """Leave whatever a newer membership replaces; return whether there was anything."""
        if (waits := self._waits) is not None and membership.epoch > self._waits_in:
            waits.cut()
        script = self._groups is not None and self._groups.cut(membership.epoch)
        return (self.group is not None and self.group.abort_below(membership.epoch)) or script

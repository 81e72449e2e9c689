"""How a rank of a script that is healed in place joins the others outside of its loops."""

from unicron.contracts.worker import NOWHERE, Membership
from unicron.errors import GroupBrokenError, StateTransferError
from unicron.train.carry.files import Files
from unicron.train.groups.group import Group
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.inplace.groups import ScriptGroups, pack_setup
from unicron.train.snapshots.state import Fetcher
from unicron.train.worker.channel import AgentChannel

SCRIPT_PART, NEW, CONTINUES, RESTORES = "-stands", b"new", b"goes on", b"again"
"""Part of the rendezvous, and what ranks of a membership announce there to those that have just been started."""


class ScriptRendezvous:
    """The rank's part in it; a newer membership interrupts it wherever it waits for others.

    Args:
        channel: to the agent.
        files: that the script opens.

    Attributes:
        membership: that was joined before the loops.
        group: over which gradients are summed; None before the loops.
    """

    def __init__(self, channel: AgentChannel, files: Files) -> None:
        self.membership = NOWHERE
        self.group: Group | None = None
        self._channel, self._files = channel, files
        self._groups: ScriptGroups | None = None
        self._store: Rendezvous | None = None
        self._store_epoch = -1

    def join(self, groups: ScriptGroups) -> None:
        """Form the script's group, where all ranks are new; else have a ghost of it until its loops begin."""
        self._groups = groups
        self._channel.on_membership = self.interrupt
        above = -1
        while True:
            membership = self._channel.await_membership(above)
            above = membership.epoch
            try:
                self._join(membership, groups)
            except GroupBrokenError:  # somebody was lost, and there is a newer one soon
                continue
            self.membership = membership
            return

    def _join(self, membership: Membership, groups: ScriptGroups) -> None:
        announcements = self.exchange(SCRIPT_PART, membership, self._announcement(membership))
        others = [each for each in announcements if each.startswith(CONTINUES)]
        self._files.set_joins_late(late=any(each != NEW for each in announcements))
        if others:
            groups.replay_setup(others[0].removeprefix(CONTINUES))
            self._files.hide_made_since(groups.began_at)
        else:
            if again := next((each for each in announcements if each != NEW), None):
                groups.replay_setup_of_saved(again.removeprefix(RESTORES))
                self._files.hide_made_since(groups.began_at)
            else:
                self._files.begin_anew()
            groups.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            groups.strict = True

    def _announcement(self, membership: Membership) -> bytes:
        """Return what to announce: that this rank is new, or the results of collectives in a saved state."""
        if membership.shelf is None:
            return NEW
        fetcher = Fetcher(self._channel)
        try:
            found = fetcher.fetch([ref for ref in membership.shelf.states if ref.place == 0], membership.epoch)
            groups = found["objects"]["groups"]
            return RESTORES + pack_setup(groups["setup"], groups["first"], groups["began"])
        except (StateTransferError, LookupError, TypeError, AttributeError):  # loading it reports the error
            return NEW
        finally:
            fetcher.remove_files()

    def exchange(self, part: str, membership: Membership, value: bytes) -> list[bytes]:
        """Publish a value, and return the values of all ranks.

        Raises:
            GroupBrokenError: a newer membership came meanwhile.
        """
        store = self._store = Rendezvous(membership, part)
        self._store_epoch = membership.epoch
        try:
            self.interrupt(self._channel.newest)  # one that came before there was anything to cut
            store.set(f"{membership.rank}", value)
            return store.read([f"{rank}" for rank in range(membership.world_size)])
        finally:
            self._store = None

    def interrupt(self, membership: Membership) -> bool:
        """Interrupt all waits of memberships older than this one; return whether there were any."""
        if (waits := self._store) is not None and membership.epoch > self._store_epoch:
            waits.cut()
        script = self._groups is not None and self._groups.cut(membership.epoch)
        return (self.group is not None and self.group.abort_below(membership.epoch)) or script

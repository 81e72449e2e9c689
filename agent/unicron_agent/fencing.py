"""Which commands an agent obeys: those that carry the newest fencing token of the transition service's lease. Pure."""

from unicron.contracts.commands import Command
from unicron.errors import StaleTokenError
from unicron_agent.effects import Out, ReadToken, StoreToken


class Fencing:
    """The tokens that an agent knows, and the commands that wait until it has read the lease.

    An agent that accepted a forged high token would refuse every real command from then on.

    Args:
        token: that an earlier agent of this node stored.

    Attributes:
        token: of the last accepted command; never above the lease's once that has been read.
        in_force: the highest token that is accepted: the lease's, or the one that an earlier agent stored.
    """

    def __init__(self, token: int) -> None:
        self.token = self.in_force = token
        self._held: list[Command] = []
        self._deciding = 0

    def is_verified(self, command: Command) -> bool:
        """Return whether a command carries the known token, and no earlier one waits."""
        return command.token == self.token and not self._held

    def hold(self, command: Command) -> Out:
        """Keep a command until the lease has been read."""
        self._held.append(command)
        return [] if self._deciding else self.ask()

    def ask(self) -> Out:
        """Have the lease read if commands wait; those that come later may be of a sender who comes after the answer."""
        self._deciding = len(self._held)
        return [ReadToken()] if self._held else []

    def release(self, in_force: int) -> tuple[list[Command], Out]:
        """Return the commands that waited for the lease, now that its token is known, and what is to be stored."""
        ready, self._held = self._held[: self._deciding], self._held[self._deciding :]
        before, self._deciding = self.token, 0
        self.in_force, self.token = in_force, min(self.token, in_force)
        return ready, [] if self.token == before else [StoreToken(self.token)]

    def admit(self, command: Command) -> None:
        """Remember the token of a command that may be obeyed.

        Raises:
            StaleTokenError: a later instance of the sender has spoken already, or no instance has that token.
        """
        carries = f"{type(command).__name__} carries fencing token {command.token}"
        if command.token < self.token:
            raise StaleTokenError(f"{carries}; {self.token} has been seen")
        if command.token > self.in_force:
            raise StaleTokenError(f"{carries}, which nobody was given: the lease holds {self.in_force}")
        self.token = command.token

"""What a cluster of this machine is started with: what was given, else what it had the last time, else the usual."""

from collections.abc import Mapping
from typing import Self

import msgspec

from unicron.errors import InvalidInputError

Value = int | str
"""Of an option."""

PORT = 4222
"""Port of the NATS server, and the one that the other commands try first."""

CONSOLE_PORT = 8080
"""Port of the console; where it is taken, any that is free."""


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """How a cluster is started; each is an option of `unicron up`.

    Attributes:
        nodes: number of agents.
        slots: worker slots of each.
        port: of the NATS server, or of the first one.
        console_port: of the console's page.
        insecure: whether everybody is let in, without a key.
        ha: whether there are three NATS servers.
        metrics: whether each process answers Prometheus.
        pools: path of a file of pools, for the provisioner; empty: there is none.
        observe: whether the cluster only says what it would do by itself.
        host: address at which nodes of other machines reach this one; empty: they don't.
    """

    nodes: int = 3
    slots: int = 2
    port: int = PORT
    console_port: int = CONSOLE_PORT
    insecure: bool = False
    ha: bool = False
    metrics: bool = False
    pools: str = ""
    observe: bool = False
    host: str = ""

    def __post_init__(self) -> None:
        if self.host and self.insecure:
            raise InvalidInputError(
                "--host and --insecure: without keys none but this machine may reach it; leave one out"
            )

    @classmethod
    def settled(cls, given: Mapping[str, Value | None], before: Self | None) -> "tuple[Self, list[str]]":
        """Return how to start a cluster, and what of it is as before though it was not given and is not the usual.

        Args:
            given: by name; None: nothing was said of it.
            before: what this cluster was started with the last time.
        """
        said = {name: value for name, value in given.items() if value is not None}
        settled = msgspec.structs.replace(before or cls(), **said)
        usual = cls()
        kept = [name for name in cls.__struct_fields__ if name not in said and settled.of(name) != usual.of(name)]
        return settled, settled.words(kept)

    def contradicted(self, given: Mapping[str, Value | None]) -> list[str]:
        """Return which of these are otherwise here, as a person would type them."""
        return [
            word
            for name, value in given.items()
            if value is not None and value != self.of(name)
            for word in msgspec.structs.replace(self, **{name: value}).words([name])
        ]

    def of(self, name: str) -> Value:
        """Return the option `name`."""
        value: Value = getattr(self, name)
        return value

    def words(self, names: list[str]) -> list[str]:
        """Return options of these names as a person would type them."""
        return [_typed(name, self.of(name)) for name in names]


def _typed(name: str, value: Value) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"

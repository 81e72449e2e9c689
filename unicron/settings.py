"""Settings of every process: flags over environment variables (`UNICRON_…`) over defaults.

Secrets never stand here, only the paths of the files that hold them.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from unicron.addresses import Address
from unicron.contracts import time_limits
from unicron.errors import InvalidInputError

PREFIX = "UNICRON_"
MIN_LEASE_TTL_S = 0.1


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The settings that every process has; services add fields of their own by subclassing.

    Attributes:
        nats_url: address of the message bus; of several servers all, with commas between.
        nats_nkey: file with the seed of the process's key (mode 600).
        nats_creds: NATS credentials file (user JWT and key), instead of a key.
        nats_ca: CA certificate of the servers. Empty: the `ca.pem` beside the key's file, if there is one, else no TLS.
        nats_cert: client certificate, where the server asks for one.
        nats_key: private key of `nats_cert`.
        connect_timeout_s: seconds that a process waits for the bus before it gives up.
        lease_ttl_s: seconds after which another instance takes over from a service that is gone.
        log_level: debug, info, warning or error.
        metrics: a port of 127.0.0.1, or HOST:PORT, at which Prometheus is answered. Empty: none.
    """

    process: ClassVar[str] = "unicron"
    """Name of the process that these settings are for, as its errors begin."""

    nats_url: str = "nats://127.0.0.1:4222"
    nats_nkey: str = ""
    nats_creds: str = ""
    nats_ca: str = ""
    nats_cert: str = ""
    nats_key: str = ""
    connect_timeout_s: float = 10.0
    lease_ttl_s: float = time_limits.LEASE_S
    log_level: str = "info"
    metrics: str = ""

    def __post_init__(self) -> None:
        for name in ("nats_nkey", "nats_creds", "nats_ca", "nats_cert", "nats_key"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise InvalidInputError(
                    f"{PREFIX}{name.upper()}: no file at {path!r}; give the path of a readable file"
                )
        if not self.nats_servers:
            raise InvalidInputError(f"{PREFIX}NATS_URL: it names no address; give one, such as nats://127.0.0.1:4222")
        if self.nats_nkey and self.nats_creds:
            raise InvalidInputError(f"{PREFIX}NATS_NKEY and {PREFIX}NATS_CREDS are both set: give one of them")
        if not self.lease_ttl_s >= MIN_LEASE_TTL_S:  # not a number is no duration either
            raise InvalidInputError(f"{PREFIX}LEASE_TTL_S: {self.lease_ttl_s:g} s; use at least {MIN_LEASE_TTL_S:g} s")
        _ = self.metrics_address
        if bool(self.nats_cert) != bool(self.nats_key):
            raise InvalidInputError(f"{PREFIX}NATS_CERT and {PREFIX}NATS_KEY belong together: set both or neither")

    def check_seconds(self, *names: str, most: float = math.inf) -> None:
        """Refuse a duration that is none.

        Args:
            names: of the fields.
            most: that each may be.

        Raises:
            InvalidInputError: one is not finite, 0 or less, or more than that; names it.
        """
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= most):
                allowed = (
                    "a finite number of seconds above 0" if most == math.inf else f"seconds above 0, {most:g} at most"
                )
                raise InvalidInputError(f"{PREFIX}{name.upper()} {value:g}: give {allowed}")

    def check_order(self, shorter: str, longer: str, why: str) -> None:
        """Refuse two time limits that contradict each other.

        Args:
            shorter: the field that may not be more than `longer`.
            longer: the other one.
            why: what would come of it.

        Raises:
            InvalidInputError: it is more; names both.
        """
        less, more = getattr(self, shorter), getattr(self, longer)
        if less > more:
            one, other = PREFIX + shorter.upper(), PREFIX + longer.upper()
            raise InvalidInputError(
                f"{one} {less:g} is longer than {other} {more:g}: {why}; lower {one} or raise {other}"
            )

    @property
    def nats_servers(self) -> list[str]:
        """The addresses in `nats_url`."""
        return [each.strip() for each in self.nats_url.split(",") if each.strip()]

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port in `metrics`, None where that is empty.

        Raises:
            InvalidInputError: it holds no port.
        """
        if not self.metrics:
            return None
        try:
            host, port = Address.parse(self.metrics)
        except InvalidInputError as error:
            raise InvalidInputError(f"{PREFIX}METRICS {error}") from error
        return host or "127.0.0.1", port

    def texts(self) -> dict[str, str]:
        """Return all settings as they would stand in an environment; an address without a user's name and password."""
        texts = {name: str(getattr(self, name)) for name in self.__struct_fields__}
        texts["nats_url"] = re.sub(r"//[^@/,]*@", "//", self.nats_url)
        return {PREFIX + name.upper(): text for name, text in texts.items()}

    @property
    def log_name(self) -> str:
        """The name of the process in a log."""
        return self.process

    @classmethod
    def load(cls, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """Read settings from flags and environment.

        Raises:
            InvalidInputError: a value does not fit its field; the message names it.
        """
        environ = os.environ if environ is None else environ
        parser = argparse.ArgumentParser(description=(cls.__doc__ or "").partition("\n")[0])
        for field in msgspec.structs.fields(cls):
            name = field.name
            parser.add_argument(f"--{name.replace('_', '-')}", default=environ.get(PREFIX + name.upper()))
        given = {name: text for name, text in vars(parser.parse_args(argv)).items() if text is not None}
        return cls.parse(given)

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Self:
        """Make settings from texts.

        Raises:
            InvalidInputError: a value does not fit its field; the message names it.
        """
        try:
            return msgspec.convert(texts, cls, strict=False)
        except msgspec.ValidationError as error:
            what, _, name = str(error).rpartition(" - at `$.")
            name = name.rstrip("`")
            raise InvalidInputError(
                f"{PREFIX}{name.upper()} {texts.get(name, '')!r}: {what.lower()}; "
                f"set it by this variable or by --{name.replace('_', '-')}"
            ) from error

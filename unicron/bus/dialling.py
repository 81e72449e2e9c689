"""The first connection to the bus: the result of each attempt, when to give up, and the error to report."""

import asyncio
import socket
import ssl
import time
from typing import NamedTuple

import nats.errors

from unicron.bus import access
from unicron.bus.client import PlainError
from unicron.errors import BusUnavailableError
from unicron.settings import PREFIX, Settings

SETTLE_S = 0.3
"""How long to try although the caller does not wait: a server that restarts, or reloads its keys, needs a moment.
"""


class Reason(NamedTuple):
    """Why an attempt failed.

    Attributes:
        weight: the reason with the highest weight, over all servers, is the one that is reported.
        text: the reason, as text behind the address.
        cure: what to do.
    """

    weight: int
    text: str
    cure: str


class Dialling:
    """Attempts to connect to the servers that settings name.

    Args:
        settings: addresses of the servers, and the credentials.
        patient: whether to go on while all of them fail, until the time is up.

    Attributes:
        in_vain: done once each server has failed, and goes on to.
    """

    def __init__(self, settings: Settings, *, patient: bool) -> None:
        self._settings, self._patient = settings, patient
        self._began = time.monotonic()
        self._failed: dict[str, Exception] = {}
        self.in_vain: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def record_attempt(self, server: str, error: Exception, servers: int) -> None:
        """Take note of what an attempt came to.

        Args:
            server: its address.
            error: what went wrong.
            servers: how many there are.
        """
        known = self._failed.get(server)
        if known is None or not isinstance(error, OSError):
            self._failed[server] = error  # a server that refuses us says why, then hangs up: the first is what to know
        lasting = time.monotonic() - self._began >= SETTLE_S
        if lasting and not self._patient and len(self._failed) >= servers and not self.in_vain.done():
            self.in_vain.set_result(None)

    def failure(self) -> BusUnavailableError:
        """Return the error for an attempt that failed at every server: reason, server, a semicolon, and the cure."""
        settings, nothing = self._settings, Reason(_AWAY, "no answer", start_cure())
        reasons = [(_reason(error, settings), server) for server, error in self._failed.items()]
        reason, server = max(reasons, default=(nothing, ""), key=lambda each: each[0].weight)
        if reason.weight == _REFUSED:
            return BusUnavailableError(f"the NATS server at {server} turns us away {reason.text}; {reason.cure}")
        at = server if reason.weight else settings.nats_url
        within = "" if self.in_vain.done() else f" within {settings.connect_timeout_s:g} s"
        return BusUnavailableError(f"no NATS server answers at {at}{within}: {reason.text}; {reason.cure}")


_AWAY, _STRANGE, _TLS, _REFUSED = range(4)


def start_cure() -> str:
    """Return the cure where no server is found."""
    return (
        "start the server there (`unicron up` does on this machine, `docker-compose start` in containers), "
        f"or set {PREFIX}NATS_URL or --nats-url"
    )


def _reason(error: Exception, settings: Settings) -> Reason:
    """Return why an attempt failed, from the error of it."""
    text = str(error).removeprefix("nats: ").strip("'")
    found = Reason(_AWAY, text or repr(error), start_cure())
    match error:
        case ssl.SSLCertVerificationError():
            found = _unknown(error, settings)
        case ssl.SSLError():
            found = Reason(_TLS, f"it ends TLS ({error})", _SHOW)
        case TimeoutError() | asyncio.TimeoutError():  # a NATS server greets each connection
            found = Reason(_STRANGE, "the listener there sends nothing: it hangs, or is no NATS server", _ELSEWHERE)
        case ConnectionRefusedError():
            found = Reason(_AWAY, f"nothing listens there ({error})", start_cure())
        case ConnectionError():
            asked = access.ca_path(settings) and not settings.nats_cert
            found = Reason(_STRANGE, f"the listener there hangs up ({error})", _SHOW if asked else _ELSEWHERE)
        case socket.gaierror():
            found = Reason(_AWAY, f"no machine has that name ({error})", start_cure())
        case PlainError():
            cure = f"name a server of this key's cluster in {PREFIX}NATS_URL, or remove the ca.pem beside the key"
            found = Reason(_TLS, text, cure)
        case nats.errors.Error() if "authorization violation" in text.lower():
            found = _refused(text, settings)
        case nats.errors.Error():
            found = Reason(_STRANGE, f"the listener there is no NATS server ({text})", _ELSEWHERE)
    return found


_ELSEWHERE = f"see what has that port, and name the address of the NATS server in {PREFIX}NATS_URL or by --nats-url"
_SHOW = f"where it asks for a certificate of ours, name one in {PREFIX}NATS_CERT and its key in {PREFIX}NATS_KEY"


def _refused(text: str, settings: Settings) -> Reason:
    file = settings.nats_nkey or settings.nats_creds
    known = f"it does not know the key in {file}, which is another cluster's or was replaced"
    cure = (
        f"set {PREFIX}NATS_NKEY to the path of one that it knows, see `unicron credentials`; the commands find it by "
        "themselves in the folder where `unicron up` was run"
    )
    return Reason(_REFUSED, f"({text}): {known if file else 'it lets in nobody without a key'}", cure)


def _unknown(error: ssl.SSLCertVerificationError, settings: Settings) -> Reason:
    """Return why the server's certificate is not believed."""
    text, ca = f"certificate verify failed: {error.verify_message}", access.ca_path(settings)
    if "mismatch" in error.verify_message:  # OpenSSL's word for one that names other hosts
        return Reason(_TLS, text, f"name the server in {PREFIX}NATS_URL as its certificate does")
    if not (ca or settings.nats_nkey or settings.nats_creds):
        cure = (
            f"set {PREFIX}NATS_NKEY to the path of your key, with the ca.pem of that server's authority beside it, "
            "or, of containers, fetch both as docs/start/containers.md says"
        )
        return Reason(_TLS, text, cure)
    where = f"the authority in {ca} is another cluster's: " if ca else ""
    cure = f"{where}put the ca.pem of that server's authority beside your key, or name it in {PREFIX}NATS_CA"
    return Reason(_TLS, text, cure)

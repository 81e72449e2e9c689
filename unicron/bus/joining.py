"""How a machine that no one has named asks to become a node, and how a node asks for what else it needs."""

import asyncio
import contextlib
import ssl
import time
from pathlib import Path

import msgspec
import nats.errors

from unicron import subjects
from unicron.bus import access
from unicron.bus.client import KeyedClient
from unicron.bus.connection import RECONNECT_S
from unicron.bus.nats import connect
from unicron.contracts.enrolment import JoinReply, JoinRequest, Papers, PapersRequest
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.files import read_secret
from unicron.jointoken import CURE, JoinToken
from unicron.settings import Settings

ANSWER_S = 10.0
"""How long the enroller may take: servers read their configuration meanwhile."""

RETRY_S = 0.5

NOTHING: Exception = nats.errors.Error("no answer in time")


def token_in(path: Path) -> JoinToken:
    """Return the token in a file.

    Raises:
        InvalidInputError: there is none, or others than its owner may read it.
    """
    try:
        return JoinToken.parse(read_secret(path, CURE).decode("ascii", errors="replace"))
    except InvalidInputError as error:
        raise InvalidInputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


async def join(settings: Settings, token: JoinToken, request: JoinRequest) -> JoinReply:
    """Return the enroller's answer; the token goes to nobody whom the authority in it does not vouch for.

    Raises:
        BusUnavailableError: no server answers in time, none is the token's cluster's, or there is no enroller.
    """
    ends, trouble = time.monotonic() + settings.connect_timeout_s, NOTHING
    while True:
        try:
            return await _join(settings, token, request, max(ends - time.monotonic(), RETRY_S))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            trouble = error
        if time.monotonic() + RETRY_S > ends:
            raise BusUnavailableError(f"nobody at {settings.nats_url} lets this machine in: {_meaning(trouble)}")
        await asyncio.sleep(RETRY_S)


async def _join(settings: Settings, token: JoinToken, request: JoinRequest, within_s: float) -> JoinReply:
    nc, failed = KeyedClient(), [NOTHING]

    async def record_error(error: Exception) -> None:
        failed[0] = error

    connecting = nc.connect(
        settings.nats_servers,
        name="joining",
        user=access.JOINER,
        password=access.JOINER,
        inbox_prefix=access.inbox(access.JOINER),
        tls=ssl.create_default_context(cadata=token.authority),
        connect_timeout=2,
        reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
        max_reconnect_attempts=-1,
        error_cb=record_error,
    )
    try:
        async with asyncio.timeout(within_s):
            await connecting
        reply = await nc.request(subjects.JOIN, msgspec.msgpack.encode(request), timeout=ANSWER_S)
        return msgspec.msgpack.decode(reply.data, type=JoinReply)
    except TimeoutError:
        raise failed[0] from None
    except msgspec.MsgspecError as error:
        raise nats.errors.Error(f"an answer that can't be read: {error}") from error
    finally:
        closing = asyncio.ensure_future(nc.close())
        await asyncio.wait({closing}, timeout=2.0)
        closing.cancel()


def _meaning(error: Exception) -> str:
    """Return what went wrong, and the cure."""
    text = str(error).removeprefix("nats: ").strip("'") or repr(error)
    match error:
        case ssl.SSLCertVerificationError() if "mismatch" in error.verify_message:
            return f"{error.verify_message}: name the server in UNICRON_NATS_URL as in the cluster's --host"
        case ssl.SSLError():
            return f"it is not the cluster that the token is of ({text}); {MISTAKEN}"
        case nats.errors.NoRespondersError():
            return "the enroller does not run there; see `unicron up --host`"
        case nats.errors.Error() if "authorization violation" in text.lower():
            return "that cluster takes no join tokens; start it with `unicron up --host`"
    return f"{text}; {MISTAKEN}"


MISTAKEN = "see whether UNICRON_NATS_URL (--nats-url) names the cluster where the token was made"


async def papers(settings: Settings, node: str, request: PapersRequest) -> Papers:
    """Return the enroller's answer to a node that shows its key to the server.

    Raises:
        BusUnavailableError: the server does not know the key yet, or nobody answers.
        InvalidInputError: the enroller says no; says why, and the cure.
    """
    bus = await connect(settings, f"papers.{node}")
    try:
        asked = bus.client.request(subjects.papers(node), msgspec.msgpack.encode(request), timeout=ANSWER_S)
        found = msgspec.msgpack.decode((await asked).data, type=Papers)
    except nats.errors.Error as error:
        raise BusUnavailableError(f"no papers from the enroller: {_meaning(error)}") from error
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"papers that can't be read: {error}; use one version of Unicron everywhere") from error
    finally:
        with contextlib.suppress(BusUnavailableError):
            await bus.close()
    if found.error:
        raise InvalidInputError(found.error)
    return found

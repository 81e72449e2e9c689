"""Who we are to the NATS server, and how we know it: credentials and TLS from the files that the settings name."""

import ssl
from pathlib import Path

from unicron.errors import InvalidInputError
from unicron.settings import PREFIX, Settings


def tls(settings: Settings) -> ssl.SSLContext | None:
    """Return what TLS needs, or None where the settings name no CA.

    Raises:
        InvalidInputError: a file does not hold what it should.
    """
    if not settings.nats_ca:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.nats_ca)
        if settings.nats_cert:
            context.load_cert_chain(settings.nats_cert, settings.nats_key)
    except OSError as error:
        files = ", ".join(filter(None, (settings.nats_ca, settings.nats_cert, settings.nats_key)))
        raise InvalidInputError(
            f"can't use the TLS files {files}: {error}; give PEM files that fit together"
        ) from error
    return context


def credentials(settings: Settings) -> str | None:
    """Return the path of the credentials file, or None where the settings name none.

    Raises:
        InvalidInputError: it lacks one of its two parts, at which the client would read on for ever.
    """
    if not settings.nats_creds:
        return None
    text = Path(settings.nats_creds).read_text(errors="replace")
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise InvalidInputError(
            f"{PREFIX}NATS_CREDS: {settings.nats_creds} holds no user JWT and seed; "
            "give a file made by `nsc generate creds`"
        )
    return settings.nats_creds

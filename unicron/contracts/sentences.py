"""Parts of the sentences in which messages are read by people."""

from typing import Any


def where(message: Any) -> str:
    """Return of which worker a message is, and in which slot that runs."""
    return f"{message.worker} on {message.node}:{message.slot}"


def after(lead: str, text: str) -> str:
    """Return the text behind what leads to it; nothing where there is no text."""
    return f"{lead}{text}" if text else ""

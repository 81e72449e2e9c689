"""The commands `unicron notify`: try the channels of a file, list notices, and acknowledge incidents."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from unicron_notifier.config import load
from unicron_notifier.senders import DeliveryError, deliver

from unicron.contracts.notices import IncidentKind, Notice, NotificationsView, Phase
from unicron.errors import InvalidInputError
from unicron_cli.output import Json, Nats, console, done, needs, print_json, say, with_client
from unicron_cli.views import plain_table

app = typer.Typer(no_args_is_help=True)

File = Annotated[
    str, typer.Option("--file", envvar="UNICRON_NOTIFY", metavar="FILE", help="The file of rules and channels.")
]


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file of rules and channels.")],
    as_json: Json = False,
) -> None:
    """Check a file of rules and channels, and the secrets that it names; nobody is notified."""
    config = load(str(file))
    channels, rules = list(config.channels), list(config.routing.rules)
    named = {name for rule in config.routing.rules.values() for name in rule.channels}
    named |= {name for rule in config.routing.rules.values() if rule.escalate for name in rule.escalate.channels}
    unused = sorted(set(channels) - named)
    text = f"{file} is in order: rules {', '.join(rules)}; channels {', '.join(channels)}"
    more = f"; no rule names {', '.join(unused)}" if unused else ""
    done(text + more, as_json, file=str(file), rules=rules, channels=channels, unused=unused)


@app.command("test")
def trial(
    channel: Annotated[str, typer.Argument(metavar="[CHANNEL]", help="Only this one.")] = "",
    file: File = "",
    as_json: Json = False,
) -> None:
    """Send a message that is marked as a test through every channel, or one, and show what came back."""
    if not file:
        raise InvalidInputError("which file? give --file FILE, or set UNICRON_NOTIFY")
    config = load(file)
    if channel and channel not in config.channels:
        raise InvalidInputError(f"{file}: there is no channel {channel!r}; there are {', '.join(config.channels)}")
    names = [channel] if channel else list(config.channels)

    async def one(name: str) -> dict[str, object]:
        try:
            given, secrets = config.channels[name]
            return {"channel": name, "ok": True, "text": await deliver(_trial(name), given, secrets)}
        except DeliveryError as error:
            return {"channel": name, "ok": False, "text": str(error)}

    async def every() -> list[dict[str, object]]:
        return list(await asyncio.gather(*map(one, names)))

    with needs("unicron notify test", "notifier"):
        found = asyncio.run(every())
    if as_json:
        print_json(found)
    else:
        for each in found:
            say(f"{each['channel']}: {'ok' if each['ok'] else 'FAILED'}: {each['text']}")
    if not all(each["ok"] for each in found):
        raise typer.Exit(1)


@app.command("status")
def status(nats: Nats = None, as_json: Json = False) -> None:
    """Show the latest incidents, the channels that got them, and which channels have something to deliver."""
    view = with_client(nats, lambda client: client.notifications())
    if as_json:
        print_json(view)
        return
    if not view.channels:
        say("the notifier has no file of rules: nobody is notified (UNICRON_NOTIFY)")
        return
    console().print(_table(view))
    for channel in view.channels:
        waiting = f"{channel.waiting} being delivered" if channel.waiting else "nothing to deliver"
        say(f"{channel.name}: {waiting}{f'; does not deliver: {channel.broken}' if channel.broken else ''}")


@app.command("ack")
def ack(
    incident: Annotated[str, typer.Argument(metavar="ID", help="Of the incident, or how only that one begins.")],
    by: Annotated[str, typer.Option("--by", envvar="USER", metavar="NAME", help="Your name, as the others see it.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Acknowledge an incident: its channels get your name, and nobody else is called."""
    text = with_client(nats, lambda client: client.acknowledge(incident, by))
    done(text, as_json, incident=incident, by=by)


def _trial(channel: str) -> Notice:
    """Return a notice that says that nothing happened."""
    now = time.time()
    name = f"test-{now * 1000:.0f}"
    return Notice(
        id=f"{name}.1.{channel}",
        channel=channel,
        phase=Phase.TEST,
        incident=name,
        chain=name,
        kind=IncidentKind.ALERT,
        label=IncidentKind.ALERT,
        severity=3,
        first_severity=3,
        title="a test of Unicron's notifications: nothing happened",
        lines=[f"Channel {channel} works. Somebody has called `unicron notify test`."],
        began=now,
        decided=now,
    )


def _table(view: NotificationsView) -> Table:
    table = plain_table("INCIDENT", "SEV", "BEGAN", "STATE", "TOLD", "WHAT")
    for each in view.incidents:
        began = time.strftime("%m-%d %H:%M:%S", time.localtime(each.began))
        state = f"over after {each.ended - each.began:.0f} s" if each.ended else f"seen to by {each.by}" * bool(each.by)
        channels = ", ".join(each.told + [f"({name})" for name in each.held])
        words = (each.id, str(each.severity), began, state or "open", channels, each.title)
        table.add_row(*(Text(word) for word in words))
    return table

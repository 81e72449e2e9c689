"""Makes lies of real messages. Pure: storms in virtual time and attacks on real clusters use the same."""

import contextlib
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from unicron import codec
from unicron.contracts.commands import Command, StartWorker, StopWorker
from unicron.contracts.tasks import TaskSpec

FAR_AHEAD = ("Regrouped", "CollectiveFailed", "TaskStateChanged", "PlanDecided")
"""Messages whose epoch or number is also set far ahead."""

FAR_FROM = 10**7
"""So far at least."""

NUMBERS: tuple[Any, ...] = (0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 1e-320, 1e18, 1e308)
NOT_FINITE = (math.nan, math.inf, -math.inf)
TEXTS = ("", "x", "node-99", "../../etc/passwd", "a.b.>", "\0\x1b[2J", "x" * 5000, "\u202e")

STEPS = (1, -1, 7, -1000, 5000, 20_000)
"""How far a whole number is moved where a lie is to be likely."""

KNOWN = 40
"""Values of a field that are remembered."""

Spread = Callable[[str, Any], Any]
"""Returns another value for a field of that name that holds this one."""


def garbage(random: Random, data: bytes) -> bytes:
    """Return what is no message, and may begin like the one in `data`."""
    nested, cut = b"\x91" * random.randint(1, 5000), data[: random.randint(0, len(data))]
    return random.choice([random.randbytes(random.randint(0, 300)), nested, cut, b"\xc1" + cut, b""])


def impossible(random: Random, data: bytes) -> bytes:
    """Return the message in `data` with one value changed, most often into what no field of that name can hold."""
    while True:
        plain = _plain(data)
        if plain["type"] in FAR_AHEAD and random.random() < 0.3:
            inside = plain.get("plan", plain)
            inside["number" if "plan" in plain else "epoch"] = random.randint(FAR_FROM, 10**9)
        else:
            _change(random, plain, "", lambda _, value: _out_of_range(random, value))
        with contextlib.suppress(OverflowError):
            return msgspec.msgpack.encode(plain)


def forged(random: Random, number: int, node: str, task: str, worker: str) -> Command:
    """Return a command that nobody has the right to give: its token was never given out.

    Args:
        random: decides what it is.
        number: of such commands before; it makes ids and names unique.
        node: that it is for.
        task: of a worker that it names.
        worker: that one.
    """
    token = random.choice([2**53, 2**53 - number, 10**12 + number])
    head: dict[str, Any] = {"node": node, "token": token, "id": f"fuzz-forged-{number}", "source": "transition"}
    spec = TaskSpec(name="forged", command=["true"])
    start = StartWorker(**head, slot=1, worker=f"forged-{number}", task="forged", spec=spec)
    return random.choice([start, StopWorker(**head, slot=0, worker=worker, task=task)])


def spoilt(random: Random, commit: bytes) -> bytes:
    """Return what nobody can go on from in place of a commit, or one that its writer can't have written."""
    wrong = [
        {"state": b"\x07"},
        {"sequence": 10**9},
        {"token": 2**53},
        {"version": 99},
        {"timers": 7},
        {"parts": [[0, 1]]},
    ]
    changed = msgspec.msgpack.encode(msgspec.msgpack.decode(commit) | random.choice(wrong))
    return random.choice([changed, changed, garbage(random, commit)])


class Likely:
    """Makes lies that could be true: a value in the place of another of the same name, or a number near by.

    Args:
        random: decides which.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._known: dict[str, list[Any]] = {}

    def note(self, data: bytes) -> None:
        """Remember what is in a real message, field by field."""
        self._remember("", _plain(data))

    def _remember(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                self._remember(str(key), each)
        elif isinstance(value, list):
            for each in value:
                self._remember(name, each)
        known = self._known.setdefault(name, [])
        if value not in known:
            known.append(value)
            del known[:-KNOWN]

    def changed(self, data: bytes) -> bytes:
        """Return the message in `data` with one value changed."""
        plain = _plain(data)
        _change(self._random, plain, "", self._other)
        with contextlib.suppress(OverflowError):
            return msgspec.msgpack.encode(plain)
        return data

    def _other(self, name: str, value: Any) -> Any:
        random = self._random
        if isinstance(value, float):
            return value + random.choice([1e-3, -5.0, 60.0, 1000.0])
        if isinstance(value, int) and random.random() < 0.6:
            return value + random.choice(STEPS)
        return random.choice(self._known.get(name) or [value])


def _plain(data: bytes) -> dict[str, Any]:
    """Return a real message as maps and lists, with all of its fields."""
    message = codec.decode_message(data)
    plain: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,), str_keys=True)
    return plain


def _change(random: Random, inside: Any, name: str, other: Spread) -> None:
    """Change one value somewhere in a map or a list."""
    keys = [key for key in (inside if isinstance(inside, dict) else range(len(inside))) if key != "type"]
    if not keys:
        return
    key = random.choice(keys)
    value, name = inside[key], key if isinstance(key, str) else name
    if isinstance(value, dict | list) and value and random.random() < 0.8:
        _change(random, value, name, other)
    elif not isinstance(value, bool):
        inside[key] = other(name, value)


def _out_of_range(random: Random, value: Any) -> Any:
    if isinstance(value, int):
        return random.choice([*NUMBERS[:8], "7", None])
    if isinstance(value, float):
        return random.choice([*NUMBERS, *NOT_FINITE])
    if isinstance(value, list):
        return random.choice([[], value * 100, [None], "x"])
    return random.choice([*TEXTS, 7, None, [value]])

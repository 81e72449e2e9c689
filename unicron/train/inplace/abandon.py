"""How a process ends that can't go on with its script: at once, as one that is killed, wherever the script is.

An error of ours that went through the script could be caught there, as many scripts catch all errors of a batch, or of
their main function: it would go on without the others, write what it has not computed, or end as if all were well.
"""

import functools
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from unicron.contracts.worker import Drilled, printable_cause
from unicron.errors import InvalidInputError, UnicronError
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.restart.ending import flush
from unicron.train.worker import channel

Abandon = Callable[[Exception], NoReturn]
Method = TypeVar("Method", bound=Callable[..., Any])

MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What Python raises for a mistake in a program: raised by our own code, it says nothing about the script's."""

_OURS = str(Path(__file__).parents[2])
_LONG_S = 3600.0


def end_process(error: Exception) -> NoReturn:
    """Report an error to the agent, and end this process. Of one that says all by itself no way to it is printed."""
    if why := why_not_in_place(error):
        give_way(why)
    expected = isinstance(error, UnicronError | ConnectionError)
    channel.report_exception(type(error), error, error.__traceback__, line_only=expected)
    flush()
    os._exit(1)


def why_not_in_place(error: BaseException) -> str:
    """Return in one short line why a script is better run as torchrun would, where an error of ours says so; else none.

    A message with a longer one would not be sent, and this process would wait for ever.
    """
    if isinstance(error, InvalidInputError) and not isinstance(error, NotCarriedError):
        return printable_cause(str(error))
    if isinstance(error, MISTAKES):
        at = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" at {Path(each.filename).name}:{each.lineno}" for each in at)
        what = f"{type(error).__name__}{where}: {error}"
        return printable_cause(f"a fault of Unicron's own, please report it: {what}")
    return ""


def is_raised_by_us(error: BaseException) -> bool:
    """Return whether code of ours has raised an error, and none that it has called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


def give_way(why: str) -> None:
    """Have the script begin again as torchrun would run it, and wait for the end that all its ranks are given then.

    Where no agent has started this process, it returns at once.
    """
    if (line := channel.connect()) is None:
        return
    flush()
    rank = int(os.environ["UNICRON_PLACE"])
    line.send(Drilled(iteration=max(0, line.iteration), rank=rank, problem=why, as_is=True))
    while True:
        time.sleep(_LONG_S)


def abandons(*kinds: type[Exception]) -> Callable[[Method], Method]:
    """Return a decorator of a method that scripts call: no error of these kinds gets into the script.

    `self.abandon` is called with it.
    """

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except kinds as error:
                self.abandon(error)

        return cast("Method", called)

    return guard

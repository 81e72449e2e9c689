"""How a process ends that can't go on with its script: at once, as one that is killed, wherever the script is.

An error of ours that went through the script could be caught there, as many scripts catch all errors of a batch, or of
their main function: it would go on without the others, write what it has not computed, or end as if all were well.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from unicron.errors import UnicronError
from unicron.train.restart.ending import flush
from unicron.train.worker.channel import report_exception

Abandon = Callable[[Exception], NoReturn]
Method = TypeVar("Method", bound=Callable[..., Any])


def end_process(error: Exception) -> NoReturn:
    """Report an error to the agent, and end this process. Of one that says all by itself no way to it is printed."""
    expected = isinstance(error, UnicronError | ConnectionError)
    report_exception(type(error), error, error.__traceback__, line_only=expected)
    flush()
    os._exit(1)


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

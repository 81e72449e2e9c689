"""Chaos: what a worker does to itself when its agent says so."""

import builtins
import ctypes
import importlib
import threading
import time

from unicron.contracts.faults import EXCEPTIONS
from unicron.errors import InvalidInputError


class InjectedFault(Exception):  # noqa: N818 a fault, not an error of ours
    """Raised on purpose, by a chaos test, at whatever the script is doing."""

    def __init__(self) -> None:
        super().__init__("injected by a chaos test")


def exception(name: str) -> BaseException:
    """Return one of `EXCEPTIONS`.

    Raises:
        InvalidInputError: it is none of them.
    """
    if name not in EXCEPTIONS:
        raise InvalidInputError(f"no exception {name!r}; there are {', '.join(EXCEPTIONS)}")
    path, text = EXCEPTIONS[name]
    module, _, own = path.rpartition(".")
    found: BaseException = getattr(importlib.import_module(module or builtins.__name__), own)(text)
    return found


def raise_in_script() -> None:
    """Raise in the main thread: the only way to do so in one that is busy, wherever it is."""
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(InjectedFault))


class Injected:
    """The faults that are to happen in microbatches.

    Attributes:
        error: to raise once, as one ends: there torch would raise it. A rank that waits for others
            would take it for that of a peer.
        factor: how many times as long as it needs each is to take.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.factor = 1.0
        self._began = 0.0

    def begin(self) -> None:
        """Note that a microbatch begins."""
        if self.factor > 1.0:
            self._began = time.monotonic()

    def end(self) -> None:
        """Do what is to happen as one ends."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        if self.factor > 1.0 and self._began:
            import torch  # noqa: PLC0415 a channel needs none

            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # what it took is known once the GPU is through
            time.sleep((self.factor - 1.0) * (time.monotonic() - self._began))
        self._began = 0.0

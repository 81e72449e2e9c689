"""A limit to what the main thread may take for code of others, which may never return."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

LIMIT_S = 10.0
"""For a snapshot of a script; the largest takes a tenth of a second."""


class TooLongError(Exception):
    """The main thread's work took too long."""

    def __init__(self) -> None:
        super().__init__(f"copying it takes more than {LIMIT_S:g} s")


class TimeLimit:
    """Raises `TooLongError` in the main thread, every `LIMIT_S` for as long as it stays inside.

    Attributes:
        exceeded: it has done so.
    """

    def __init__(self) -> None:
        self.exceeded = False
        self._began: float | None = None
        self._lock, self._watches, self._raised = threading.Lock(), False, False

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """TimeLimit what is done inside."""
        if not self._watches:
            self._watches = True
            threading.Thread(target=self._watch, daemon=True).start()
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._stop()

    def _stop(self) -> None:
        while True:
            try:
                with self._lock:
                    self._began, raised = None, self._raised
                    self._raised = False
                break
            except TooLongError:
                continue
        if not raised:
            return
        try:  # it may be on its way yet, and is not for the script: this one takes its place, and is the last
            _raise_in_main()
            while True:
                time.sleep(0)
        except TooLongError:
            pass

    def _watch(self) -> None:
        while True:
            time.sleep(LIMIT_S / 10)
            with self._lock:
                if self._began is not None and time.monotonic() > self._began + LIMIT_S:
                    self.exceeded = self._raised = True
                    self._began = time.monotonic()
                    _raise_in_main()


def _raise_in_main() -> None:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(TooLongError))

"""How a rank gets out of a collective: whatever blocks in one is woken, and nobody waits for a timeout.

gloo has no abort. What wakes every call that is blocked, whether its peer died or only stopped, is shutting down the
group's own TCP connections from another thread. There is no interface that names them, so they are found as the
sockets that appeared while the groups were formed. Of NCCL see `unicron.train.groups.nccl`.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from unicron.errors import GroupBrokenError, explain_lack, explain_text
from unicron.train.groups import nccl
from unicron.train.groups.sockets import is_tcp, keep_alive, open_sockets, shut_down, wait_for_end
from unicron.train.worker.telling import tell

CONNECT = timedelta(seconds=10)
"""For gloo's mesh, once all ranks have met."""

POLL = timedelta(seconds=0.05)
GIVE_UP_S = 0.15
"""How long an interrupted call may take to come back, before it is abandoned."""


# A process that the script forks, to load data say, has none of our threads. Were garbage of ours collected there, gloo
# would take a group of an earlier membership down, and wait for its threads for ever.
os.register_at_fork(after_in_child=gc.freeze)

MOMENT_S = 0.03
"""Delay before a peer's leave is reported: a peer that moved to a newer membership has this rank informed by then."""


class Connections:
    """The connections of some process groups that are formed, used and interrupted together.

    Args:
        peer_left: is called with the epoch when a peer has left, by a thread.

    Attributes:
        epoch: of the membership that they were formed for; -1 before the first.
        cut_at: monotonic seconds when they were cut; None while they are in order.
        error: for which they were; empty where there was none.
    """

    def __init__(self, peer_left: Callable[[int], None] = lambda _: None) -> None:
        self._lock, self._peer_left = threading.Lock(), peer_left
        self._older: frozenset[str] = frozenset()
        self._own: frozenset[str] | None = frozenset()
        self._backends: list[Any] = []
        self._dropping: threading.Thread | None = None
        self._communicators: list[nccl.Communicator] = []
        self._to_abort: list[nccl.Communicator] = []
        self._watching: threading.Thread | None = None
        self._lifelines: dict[int, str] = {}
        self._formations = 0
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        atexit.register(self._close)
        self.epoch = -1
        self.cut_at: float | None = None
        self.error = ""

    @contextlib.contextmanager
    def forming(self, epoch: int) -> Iterator[None]:
        """Form the connections of an epoch inside; older ones are dropped.

        Where that fails they are cut: ranks that are through already would wait for this one.

        Raises:
            GroupBrokenError: the machine lacks what a connection takes, say.
        """
        try:
            with self._forming(epoch):
                yield
        except OSError as error:
            raise GroupBrokenError(f"no group can be formed: {explain_lack(error)}") from error

    @contextlib.contextmanager
    def _forming(self, epoch: int) -> Iterator[None]:
        with self._lock:
            self.epoch, self._formations = epoch, self._formations + 1
            self._older, self._own, self.cut_at, self.error = frozenset(open_sockets()), None, None, ""
            # gloo takes 20 ms to take a group down, which nobody needs to wait for
            self._drop(self._backends)
            self._backends = []
            self._to_abort += self._communicators
            self._communicators, self._lifelines = [], {}
            for each in self._to_abort:
                each.revoke()
        if self._to_abort:
            nccl.end_groups()
            nccl.synchronize()  # peers free what kernels of this rank may still use, once it says that it is here
        try:
            with self.extending():
                yield
        except Exception:
            self.cut_below(epoch + 1)
            raise
        finally:
            os.eventfd_write(self._changed, 1)

    @contextlib.contextmanager
    def freeing_older(self) -> Iterator[None]:
        """Free the communicators of older groups while inside, where no rank is within a collective of them any more.

        Where NCCL does not free them this process ends, and another takes its place.
        """
        with self._lock:
            left, self._to_abort = self._to_abort, []
        aborts = nccl.begin_aborts(left)
        try:
            yield
        finally:
            if not nccl.await_aborts(aborts):
                tell(f"unicron: NCCL did not abort in {nccl.ABORT_S:.0f} s, so this worker ends")
                os._exit(1)

    @contextlib.contextmanager
    def extending(self) -> Iterator[None]:
        """Add the connections made inside to those of this epoch."""
        older = frozenset(open_sockets())
        try:
            yield
        finally:
            there = open_sockets()
            own = frozenset(there) - older
            with self._lock:
                self._own = own | (self._own or frozenset())
            for inode in own:
                keep_alive(there[inode])

    def _drop(self, backends: list[Any]) -> None:
        if backends:
            self._dropping = threading.Thread(target=backends.clear, name="unicron-drop", daemon=True)
            self._dropping.start()

    def _close(self) -> None:
        """See the groups off before the interpreter ends: gloo's threads free Python's objects.

        NCCL's are left to the end of the process: peers may still be within a collective, and use memory of theirs.
        """
        for backends in ([], self._backends):  # those that are on their way, then the last
            self._drop(backends)
            if self._dropping is not None:
                self._dropping.join(CONNECT.total_seconds())

    def connect(self, store: Store, rank: int, size: int) -> Any:
        """Make a backend of gloo's, which sends what is in this machine's own memory.

        Raises:
            GroupBrokenError: interrupted by `cut_below`, or a peer was lost.
        """
        older = open_sockets()
        made = self._connect_interruptibly(lambda: backend(store, rank, size))
        self._backends.append(made)
        new = {descriptor: inode for inode, descriptor in open_sockets().items() if inode not in older}
        self._lifelines |= {descriptor: inode for descriptor, inode in new.items() if is_tcp(descriptor)}
        if self._watching is None and size > 1:
            self._watching = threading.Thread(target=self._watch, name="unicron-watch", daemon=True)
            self._watching.start()
        return made

    def connect_streams(self, device: torch.device, store: Store, rank: int, size: int) -> Any:
        """Make a backend of NCCL's, and watch over it.

        Raises:
            GroupBrokenError: interrupted by `cut_below`, or a peer was lost.
        """
        nccl.prepare()
        epoch = self.epoch
        os.eventfd_write(self._changed, 1)
        return self._connect_interruptibly(
            lambda: self._keep_unless_cut(nccl.Communicator(store, rank, size, device), epoch)
        ).group

    def _keep_unless_cut(self, made: nccl.Communicator, epoch: int) -> nccl.Communicator:
        """Have it freed in its turn, also where nobody waits for it any more.

        Else it would be garbage: whatever thread collects that, such as one that interrupts kernels, would wait for the
        end of all kernels there.
        """
        with self._lock:
            late = self.epoch != epoch
            (self._to_abort if late else self._communicators).append(made)
            if late or self.cut_at is not None:
                made.revoke()
        return made

    def _watch(self) -> None:
        """Report a peer that has left. Where one has, or NCCL meets an error, interrupt all that is on a GPU.

        gloo's calls break then by themselves, once somebody comes to one, while kernels would wait for ever.
        """
        reported = 0
        while True:
            with self._lock:
                formation, epoch, forming = self._formations, self.epoch, self._own is None
                idle = self.is_cut or reported == formation
                lifelines = {} if idle else dict(self._lifelines)
                communicators = [] if idle else list(self._communicators)
            often = communicators or forming  # connections come while they form
            has_left = wait_for_end(lifelines, self._changed, nccl.WATCH_S if often else None)
            error = next(filter(None, (each.error for each in communicators)), "")
            if has_left and not communicators:
                time.sleep(MOMENT_S)
            with self._lock:
                stale = self.is_cut or self._formations != formation
            if stale or not (has_left or error):
                continue
            reported = formation
            if communicators or forming:  # nothing else ends what NCCL waits for as it connects
                self.cut_below(epoch + 1, error or "a peer has left")
            self._peer_left(epoch)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all that was enqueued.

        Raises:
            GroupBrokenError: they were interrupted meanwhile, so it may not be what it should.
        """
        nccl.await_event(nccl.record_event(), lambda: self.is_cut)
        if self.is_cut:
            raise GroupBrokenError(self.error or "a collective was interrupted")

    @property
    def is_cut(self) -> bool:
        """Whether they were interrupted."""
        return self.cut_at is not None

    def _connect_interruptibly(self, connect: Callable[[], Any]) -> Any:
        """Connect in a thread, which is left behind if the formation is interrupted; return what was connected.

        A rank that waits for a peer to connect has no connection that could be shut down: once interrupted it goes on
        without it, and the thread ends with its timeout.
        """
        made: list[Any] = []
        failed: list[RuntimeError] = []

        def make() -> None:
            try:
                made.append(connect())
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=make, name="unicron-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL.total_seconds() / 4)
            if self.cut_at is not None:
                raise GroupBrokenError("interrupted while the group was being formed")
        if failed:
            raise GroupBrokenError(explain_text(str(failed[0]))) from failed[0]
        return made[0]

    def cut_below(self, epoch: int, error: str = "") -> bool:
        """Interrupt threads that are blocked in one older than `epoch`; return whether there is one. From any thread.

        Args:
            epoch: of the membership that they are left for.
            error: for which they are, if that is why.
        """
        with self._lock:
            if self.epoch < 0 or self.epoch >= epoch:
                return False
            if self.cut_at is None:
                self.cut_at, self.error = time.monotonic(), error
            for each in self._communicators:
                each.revoke()
            for inode, descriptor in open_sockets().items():
                # while they form their owner is unknown; later the program may have opened others
                if inode in self._own if self._own is not None else inode not in self._older:
                    shut_down(descriptor)
            return True

    def finish(self, work: Work, keep: Any) -> None:
        """Wait for a collective; where it was cut off and yet does not end, go on without it.

        gloo can lose a connection's end that coincides with a send, and would wait for its timeout then. What is to
        be kept (the group) is then kept for good, because its destructor would wait as well; its connections are
        closed, so nothing of it moves.

        Raises:
            GroupBrokenError: it failed.
        """
        try:
            while not self._has_ended(work):
                pass
        except BaseException as error:
            if not work.is_completed():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))
            if isinstance(error, RuntimeError):
                raise GroupBrokenError(str(error)) from error
            raise

    def _has_ended(self, work: Work) -> bool:
        try:
            work.wait(POLL)
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended just after the time-out: this raises only what really went wrong
            elif not self._is_overdue():
                return False
            else:
                raise
        return True

    def finish_transfer(self, work: Work, keep: Any) -> None:
        """Wait for a send or a receive: like `finish`, but a time limit on its wait would end all of gloo's pairs.

        Raises:
            GroupBrokenError: it failed.
        """
        failed: list[RuntimeError] = []
        ended = threading.Event()

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                failed.append(error)
            ended.set()

        threading.Thread(target=wait, name="unicron-transfer", daemon=True).start()
        while not ended.wait(POLL.total_seconds()):
            if self._is_overdue():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))
                raise GroupBrokenError("a transfer between two ranks was interrupted")
        if failed:
            raise GroupBrokenError(str(failed[0])) from failed[0]

    def _is_overdue(self) -> bool:
        return self.cut_at is not None and time.monotonic() - self.cut_at >= GIVE_UP_S


def backend(store: Store, rank: int, size: int) -> ProcessGroupGloo:
    """Return a backend of gloo for a group that meets at `store`.

    Raises:
        RuntimeError: a peer did not come, or left.
    """
    group = ProcessGroupGloo(store, rank, size, timeout=CONNECT)
    group._set_default_timeout(nccl.FOREVER)  # noqa: SLF001 torch has no other name for it
    return group

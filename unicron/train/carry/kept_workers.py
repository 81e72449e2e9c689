"""Loaders whose worker processes are kept over epochs: what those have become, for the workers of another process.

A worker that is begun anew with each epoch has what its process has then. One that is kept has its generators of random
numbers as it left them, and all of the data set that it has changed. Between epochs each worker is asked for that: it
knows what it had as it was forked, and answers with what has changed since. Workers of another process are begun with
the same seed, from the same data set, and are given that. Amid an epoch they load all of it once more.

What the process itself changes of the data set once it has workers these don't see, and others would: that is refused.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from unicron.exception_texts import brief
from unicron.train.carry.beside import Beside
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.objects import Resumable
from unicron.train.carry.own_snapshot import MOST_OBJECTS, Heap
from unicron.train.carry.randomness import generators, set_generators
from unicron.train.carry.read_names import variables_read_by
from unicron.train.carry.unchanged import describe
from unicron.train.carry.values import is_same
from unicron.train.carry.variables import Variables

MOST_BYTES = 1 << 20
"""Of what all workers of a loader have changed together: it goes along with each snapshot of an epoch."""

USERS: "list[Resumable]" = []
"""Positions that are just finding what they hand out: what is begun meanwhile is theirs."""


@contextmanager
def used_by(user: Resumable) -> Iterator[None]:
    """Note that iterators of loaders which are begun inside are this one's."""
    USERS.append(user)
    try:
        yield
    finally:
        USERS.pop()


class _Alone(Beside):
    """Large tensors of a worker, that no other one can give."""

    def _may_be_marked(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return False


class _Data(Heap):
    """The objects that workers load from."""

    def changed(self, spaces: dict[str, Variables]) -> str:
        """Return the name of a variable or object that has changed since it was numbered; empty if none has.

        Raises:
            NotCarriedError: one has that no other process can have.
        """
        for name, space in spaces.items():
            now, first = space.values(), self._first_values[name]
            for each in {**first, **now}:
                if each not in now or each not in first or not is_same(now[each], first[each]):
                    return f"`{each}` of {name}"
        return next(map(describe, self._find_changed()), "")

    @property
    def left_out(self) -> str:
        """The name of a variable that no snapshot has, as it can't be pickled; empty where there is none."""
        return next((name for _, name in self._unbound), "")


class Loaded:
    """What a loader's workers load from, as it was before they were forked.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        own = {"dataset": loader.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn}
        self._spaces = {"the loader": Variables(own), **variables_read_by(own.values(), MOST_OBJECTS)}
        self._heap, self.first_states = _Data((), _Alone()), b""
        self._heap.number_objects(self._spaces)

    def changed(self) -> str:
        """Return the name of something that has changed since; empty if nothing has.

        Raises:
            NotCarriedError: that is something whose change can't be undone elsewhere.
        """
        return self._heap.changed(self._spaces)

    def state(self) -> bytes:
        """Return what has changed since, with the generators; nothing where nothing has.

        Raises:
            NotCarriedError: another process can't have it.
        """
        if not self.changed() and generators() == self.first_states:
            return b""
        found = self._heap.snapshot(self._spaces, {})
        if missing := self._heap.left_out:
            raise NotCarriedError(f"`{missing}` has changed, and can't be pickled")
        return found

    def set_state(self, data: bytes) -> None:
        """Have what another worker had.

        Raises:
            NotCarriedError: this one has something else by itself.
        """
        if data:
            self._heap.restore(self._spaces, data)
            return
        set_generators(self.first_states)
        if name := self.changed():
            raise NotCarriedError(f"{name} has changed here, and not there")


# --- in a worker ------------------------------------------------------------------------------------------------------

_LOADED: list[Loaded] = []
"""What this process loads from, if it is a worker."""


def _begin_worker(loaded: Loaded | None, begin: Callable[[int], None] | None, number: int) -> None:
    """Begin a worker, as the script has it, and note what it had then."""
    if begin is not None:
        begin(number)
    if loaded is not None:
        loaded.first_states = generators()
        _LOADED.append(loaded)


class _Question(worker._ResumeIteration):  # noqa: SLF001
    """Asks a worker what it has become, or tells it: torch's own message between two epochs, with more in it."""

    def __init__(self, given: bytes | None) -> None:
        super().__init__()
        object.__setattr__(self, "given", given)

    def __reduce__(self) -> Any:
        """Be the answer where it is read, which is before the worker goes on."""
        return _answer, (self.given,)  # type: ignore[attr-defined]


class _Answer(worker._ResumeIteration):  # noqa: SLF001
    """What a worker has become, or why nobody else can become that."""

    def __init__(self, number: int, state: bytes, refusal: str) -> None:
        super().__init__()
        for name, value in (("number", number), ("state", state), ("refusal", refusal)):
            object.__setattr__(self, name, value)

    number: int
    state: bytes
    refusal: str

    def __reduce__(self) -> Any:
        """Be the same where it is read."""
        return _Answer, (self.number, self.state, self.refusal)


def _answer(given: bytes | None) -> _Answer:
    number = getattr(get_worker_info(), "id", 0)
    try:
        if given is not None:
            _LOADED[0].set_state(given)
        return _Answer(number, _LOADED[0].state() if given is None else given, "")
    except Exception as error:  # noqa: BLE001 whatever a script's objects raise: the worker goes on
        return _Answer(number, b"", str(error) if isinstance(error, NotCarriedError) else brief(error))


# --- in a rank --------------------------------------------------------------------------------------------------------


class KeptWorkers(_MultiProcessingDataLoaderIter, Resumable):
    """A loader's iterator, whose workers go on with the next epoch.

    Args:
        loader: its loader.
        seed: of its workers; None to draw one.

    Attributes:
        abandon: is called with an error that the script is not to see, which asks for batches.
        iterable: the loader.
        count: grows with all that it does.
    """

    _shutdown, iterable, count = True, None, 0  # until it is begun

    abandon: ClassVar[Callable[[Exception], object]] = staticmethod(lambda _: None)

    def __init__(self, loader: DataLoader[Any], seed: int | None = None) -> None:
        self.iterable, self.count, self._seed = loader, 0, seed
        self._epoch, self._is_through, self._is_made, self._user = 0, False, False, None
        self._before = self._states = None
        try:
            self._loaded, self._refusal = Loaded(loader), ""
        except NotCarriedError as error:
            self._loaded, self._refusal = None, str(error)
        super().__init__(loader)

    _user: "weakref.ref[Resumable] | None"
    _before: list[bytes] | None
    _states: list[bytes] | None
    _loaded: Loaded | None

    @property
    def _base_seed(self) -> int:
        return int(self.__dict__["_base_seed"])

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self.__dict__["_base_seed"] = drawn if self._seed is None else self._seed

    @property
    def _worker_init_fn(self) -> Any:
        return functools.partial(_begin_worker, self._loaded, self.__dict__["_worker_init_fn"])

    @_worker_init_fn.setter
    def _worker_init_fn(self, begin: Any) -> None:
        self.__dict__["_worker_init_fn"] = begin

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not self._is_begun:
            self._begin_expected(loader, _EXPECTED.pop(loader, (self, {}))[1])
            return
        if not first_iter:
            with suppress(NotCarriedError):
                self._states_now()
        prefetched = self._prefetch_factor
        if first_iter and self._seed is not None:
            self._prefetch_factor = 0  # it is between two epochs
        super()._reset(loader, first_iter)
        self._prefetch_factor = prefetched
        self._epoch, self._before, self._states = self._epoch + 1, None if self._refusal else self._states, None
        self._is_through, self._is_made, self._user = False, False, weakref.ref(USERS[-1]) if USERS else None
        self.count += 1

    def _next_data(self) -> Any:
        self.count += 1
        self._user = weakref.ref(USERS[-1]) if USERS else None
        if self._states is not None and not self._is_through:  # somebody had it yet
            self._refusal = "a DataLoader's iterator that is begun once for several epochs"
        if self._is_made:
            error = NotCarriedError("a DataLoader's iterator that is asked for batches, and was between two epochs")
            type(self).abandon(error)
            raise error
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._is_through = True
            raise

    @property
    def _is_begun(self) -> bool:
        return "_epoch" in vars(self)

    @property
    def _is_idle(self) -> bool:
        """Whether the next that is done with it is to begin an epoch: nobody goes over this one any more."""
        user = None if self._user is None else self._user()
        return self._is_through or (self._user is not None and (user is None or user.is_left))

    def _ask(self, given: Sequence[bytes] | None = None) -> tuple[list[bytes], str]:
        """Return what the workers have become once all is done that they had to, and why no other can, if so.

        Args:
            given: what they have to become; None to ask.
        """
        for number, each in enumerate(self._index_queues):
            each.put(_Question(None if given is None else given[number]))
        found = dict[int, _Answer]()
        while len(found) < self._num_workers:
            index, data = self._get_data()  # type: ignore[no-untyped-call]
            if isinstance(index, _Answer):
                found[index.number] = index
            else:  # as torch keeps what comes before its turn
                self._tasks_outstanding -= 1
                self._task_info[index] += (data,)
        states = [found[number].state for number in range(self._num_workers)]
        refusal, size = next((each.refusal for each in found.values() if each.refusal), ""), sum(map(len, states))
        if size > MOST_BYTES:
            refusal = f"all have changed {size >> 10} KiB, which is more than {MOST_BYTES >> 10}"
        return states, f"a DataLoader's worker, which is kept over epochs: {refusal}" if refusal else ""

    def _states_now(self) -> list[bytes]:
        """Return what the workers have become, as they wait for the next epoch.

        Raises:
            NotCarriedError: another process can't have such.
        """
        if self._loaded is None or self._refusal:
            raise NotCarriedError(self._refusal)
        if name := self._loaded.changed():
            raise NotCarriedError(f"{name} has changed since a DataLoader has workers, which are kept and don't see it")
        if self._states is None:
            self._states, self._refusal = self._ask()
        if self._refusal:  # for good: none is asked twice for what it can't give
            raise NotCarriedError(self._refusal)
        return self._states

    # --- its position ------------------------------------------------------------------------------------------------

    def whole_position(self) -> dict[str, Any]:
        """Return which epoch it is in, or behind, and what its workers were, or are, between two."""
        if not self._is_begun:
            raise NotCarriedError("a DataLoader's iterator that was never begun")
        if not self._is_idle and self._user is None:
            raise NotCarriedError("a DataLoader's iterator that is under way, and asked for items by another library")
        if self._states is not None and not self._is_idle:
            raise NotCarriedError(self._refusal)  # it goes on with what was asked for between two epochs
        now, before = self._states_now() if self._is_idle else None, None
        with suppress(NotCarriedError):
            before = None if now or self._loaded is None or self._loaded.changed() else self._before
        return {"seed": self._base_seed, "epoch": self._epoch, "now": now, "before": before}

    position = whole_position

    def advance_to(self, saved: dict[str, Any]) -> None:
        """Have workers that are what another one's are, or were as its epoch began: what goes over it begins that.

        Raises:
            NotCarriedError: these can't become that.
        """
        amid = saved["now"] is None
        if amid and self._epoch == saved["epoch"]:
            return
        states = saved["before"] if amid else saved["now"]
        if states is None or self._base_seed != saved["seed"]:
            raise NotCarriedError("the workers of a DataLoader, that are kept, have begun otherwise here")
        self._states, refusal = self._ask(states)
        if refusal:
            raise NotCarriedError(refusal)
        self._epoch, self._before = saved["epoch"] - amid, None
        self._is_through = self._is_made = True
        self.count += 1

    def expect(self, iterable: Any, saved: dict[str, Any]) -> None:
        """Be what the loader makes next: a generator may go over it on its way to where another one is."""
        if not self._is_begun:
            _EXPECTED[iterable] = self, saved

    def _begin_expected(self, loader: DataLoader[Any], saved: Mapping[str, Any]) -> None:
        """Begin workers where a generator goes over the loader, from its first epoch on, or where it is entered."""
        if saved.get("before") is None or not any(getattr(each, "entering", None) is not None for each in USERS):
            self.__init__(loader)  # type: ignore[misc]
            return
        states = generators()
        self.begin_anew(loader, dict(saved))
        set_generators(states)  # that has drawn what was drawn long before
        self._reset(loader)

    def begin_anew(self, iterable: Any, saved: dict[str, Any]) -> None:
        """Begin workers, unless it has them, and have them be what another one's are."""
        _EXPECTED.pop(iterable, None)
        if not self._is_begun:
            if saved["now"] is None and saved["before"] is None:
                return  # what goes over it begins its first epoch
            self.__init__(iterable, saved["seed"])  # type: ignore[misc]
        self.advance_to(saved)

    @classmethod
    def found_in(cls, iterable: Any) -> "KeptWorkers | None":
        """Return the loader's own, if it has one."""
        there = getattr(iterable, "__dict__", {}).get("_iterator")
        return there if isinstance(there, KeptWorkers) else None


_EXPECTED = weakref.WeakKeyDictionary[Any, tuple[KeptWorkers, dict[str, Any]]]()
"""Those that are yet to be begun, by their loaders, each with the position of another process's."""

_make_iterator: Callable[[Any], Any] = DataLoader._get_iterator  # noqa: SLF001


def make_iterator(loader: Any) -> Any:
    """Make a loader's iterator, as torch does; one whose workers are kept is ours where those can be followed."""
    if not (loader.num_workers and loader.persistent_workers and loader.in_order):
        return _make_iterator(loader)
    context = loader.multiprocessing_context or torch.multiprocessing
    is_map = not isinstance(loader.dataset, IterableDataset | MapDataPipe)
    if not is_map or context.get_start_method() != "fork":
        return _make_iterator(loader)
    loader.check_worker_number_rationality()
    expected, saved = _EXPECTED.pop(loader, (None, {}))
    if expected is None:
        return KeptWorkers(loader)
    expected._begin_expected(loader, saved)  # noqa: SLF001
    return expected

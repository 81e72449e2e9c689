"""A rank's own snapshot of its script: all that has changed since its loops began, for the process that replaces it.

A new process runs the script up to the loop by itself, so it has all that this makes. What is there then is numbered:
each object has the path by which it is reached as its key, the same on both. A snapshot has the state of those objects
that have changed, with references to numbered ones as their keys. The new process puts that into its own objects, so
closures, aliases, and what libraries hold stay what they are.
"""

import io
from collections import ChainMap, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from unicron.exception_texts import brief
from unicron.train.carry.aliases import Memories, alias_in, memories_of, moments_of
from unicron.train.carry.beside import MARK, Beside, evidence_of
from unicron.train.carry.by_value import Opaque
from unicron.train.carry.gradients import gradients_of, restore_gradients
from unicron.train.carry.hooks import Hooks
from unicron.train.carry.kinds import (
    ATTACHED,
    ATTRIBUTES,
    OPTIMIZER,
    GraphKeptError,
    Kind,
    NotCarriedError,
)
from unicron.train.carry.objects import INLINE, OPAQUE, POSITION, TENSOR, Stateful, is_moving, kind_of
from unicron.train.carry.pickling import LARGE_BYTES, LARGEST_BYTES, Key, Limited, Pickler, TooLargeError, Unpickler
from unicron.train.carry.randomness import drawn_beside, generators, set_generators, thread_that_may_draw
from unicron.train.carry.tensors import Given
from unicron.train.carry.unchanged import Changes, Numbered, describe, number_object
from unicron.train.carry.values import is_plain, is_same
from unicron.train.carry.variables import Variables, space_name
from unicron.train.snapshots.shards import local
from unicron.train.worker.injected import InjectedFault

NOT_MADE = "has not been made by the process that takes over"
MOST_OBJECTS = 200_000
"""Numbered; a script with more holds data in many small objects, and looking at each in each iteration takes long."""


class Heap:
    """The objects that a script's variables lead to, as far as a new process makes them by itself.

    Args:
        carried: objects that go another way, such as models and optimizers' moments: they are left alone.
        beside: large tensors that another rank gives.

    Attributes:
        missing_gradients: parameters that had a gradient when the snapshot restored last was taken, which that left
            out. They have NaN as gradient: if more is added to it that shows, and nothing is where it is made zero.
        lacking: why a snapshot could not have variables that are not here since it was restored, by name.
    """

    def __init__(self, carried: Iterable[Any], beside: Beside | None = None) -> None:
        self._beside = beside or Beside()
        self._carried = list(carried)
        self._carried_ids = {id(each) for each in self._carried}
        optimizers = [each for each in self._carried if isinstance(each, torch.optim.Optimizer)]
        self._updated = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        self._parameters = [each for each in self._carried if isinstance(each, torch.nn.Parameter)]
        self._beside.limit_to(sum(local(each).nbytes for each in self._parameters))
        self._numbered, self._last_number = dict[Key, Numbered](), 0
        self._changes = Changes()
        self._keys: dict[int, Key] = {}
        self._first_values: dict[str, dict[str, Any]] = {}
        self._present: dict[int, Any] = {}
        self._unbound, self.lacking = dict[tuple[str, str], str](), dict[str, str]()
        self._kept_states, self._given_keys, self._memories = dict[Key, Any](), set[Key](), Memories()
        self._last_states, self._drawn_beside = generators(), False
        self._hooks, self._copies = Hooks(), set[Key]()
        self.missing_gradients = list[torch.nn.Parameter]()

    # --- numbering ---------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> int:
        """The sum of the parameters' versions, which grows as a script changes them without an optimizer."""
        return sum(each._version for each in self._parameters)  # noqa: SLF001 there is no other way to it

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that there are."""
        there = (local(each.grad) for each in self._parameters if each.grad is not None)
        return sum(each.numel() * each.element_size() for each in there)  # of a sparse one, too

    def number_objects(self, spaces: Mapping[str, Variables], level: str = "") -> None:
        """Give a key to each object that is reachable and has none: what the script has made before a loop begins.

        Args:
            spaces: the variables that lead to it.
            level: which loop that is; empty for the first of all.
        """
        if not level:
            self._first_values = {name: each.values() for name, each in spaces.items()}
            self._memories = memories_of(self._carried)
        new = dict[Key, Numbered]()
        for path, thing, kind in self._walk(spaces):
            if id(thing) in self._keys or (level and id(thing) in self._present and not isinstance(kind, Opaque)):
                continue
            key = (level, *path)
            if key in self._numbered or key in new:  # keys that look alike, in a dictionary
                key = (*key, self._last_number)
            always = level or kind is OPTIMIZER or (id(thing) in self._updated and kind is not ATTACHED)
            self._last_number += 1
            new[key] = (Numbered if always else number_object)(self._last_number, thing, kind)
            self._keys[id(thing)] = key
        self._changes.add(level, new)
        self._numbered |= new
        if not level:
            self._hooks.number((key, one.thing) for key, one in self._numbered.items())

    def keep_states(self, things: Iterable[Any]) -> None:
        """Keep the states that objects have now; `restore` gives them back to those that the snapshot says nothing of.

        Args:
            things: the objects. What is `Given` keeps the state that is loaded.

        Raises:
            NotCarriedError: there is one that can't be kept.
        """
        for each in things:
            key = self._keys.get(id(each.thing if isinstance(each, Given) else each))
            if key is None or isinstance(self._numbered[key].kind, Opaque):
                continue
            if isinstance(each, Given):
                self._given_keys.add(key)
            else:
                self._kept_states[key] = self._numbered[key].kind.state(each)

    def carry_copies(self, evidence: Collection[str]) -> None:
        """Carry what has the numbers of tensors that no process makes by itself, whether or not it ever changes.

        Args:
            evidence: of those, as of `evidence_of`.
        """
        there = self._numbered.items() if evidence else ()
        self._copies = {
            key
            for key, one in there
            if one.kind is TENSOR and key not in self._given_keys and evidence_of(one.thing) in evidence
        }

    def record_present(self, spaces: Mapping[str, Variables]) -> None:
        """Record which objects are reachable now: they get no key later, as no new process makes them by itself."""
        self._present = {id(thing): thing for _, thing, _ in self._walk(spaces)}

    def forget_levels(self, levels: Iterable[str]) -> None:
        """Forget the keys of objects made before loops that have ended, by the beginnings of their levels."""
        over = tuple(levels)
        keys = [key for key in self._numbered if key[0].startswith(over)]
        for key in keys:
            del self._keys[id(self._numbered.pop(key).thing)]
        self._changes.forget(keys)

    def _walk(self, spaces: Mapping[str, Variables]) -> Iterator[tuple[Key, Any, Kind]]:
        seen, inline = set[int](), list[Any]()
        memories, moments = memories_of(self._carried), moments_of(self._carried)
        todo: deque[tuple[Key, Any]] = deque(
            ((name, each), value) for name, space in spaces.items() for each, value in space.values().items()
        )
        later = deque[
            tuple[Key, Any]
        ]()  # what has an object as its name in a dict: the way to that is no part of itself
        while todo or later:
            path, thing = (todo or later).popleft()
            kind = kind_of(thing)
            if kind is None or id(thing) in seen or isinstance(thing, Heap):
                continue
            seen.add(id(thing))
            if id(thing) in self._carried_ids:
                kind = OPTIMIZER if kind is OPTIMIZER else ATTACHED if isinstance(thing, torch.Tensor) else OPAQUE
            elif (alias := moments.get(id(thing)) or alias_in(thing, memories)) is not None:
                kind = alias
            elif kind is OPTIMIZER:  # one that was made later, whose moments go with nothing else
                kind = ATTRIBUTES
            if kind is INLINE:
                inline.append(thing)  # its parts may have no other owner, and their numbers would be given anew
            else:
                yield path, thing, kind
            if len(seen) > MOST_OBJECTS:
                raise NotCarriedError(f"the script's variables lead to more than {MOST_OBJECTS} objects")
            for name, each in kind.parts(thing):
                (todo if is_plain(type(name)) else later).append(((*path, name), each))

    def find_written(self) -> None:
        """Look at all large arrays and tensors, which takes long, so that no change of one goes unseen.

        Raises:
            NotCarriedError: one was written to.
        """
        self._changes.find_written()

    @property
    def given_has_changed(self) -> bool:
        """Whether what is `Given` is no more what it was when it was numbered."""
        return not self._given_keys.isdisjoint(self._changes.find())

    # --- a snapshot --------------------------------------------------------------------------------------------------

    def _find_changed(self) -> list[Key]:
        found = {*self._changes.find(), *self._hooks.find(self._keys.keys()), *self._copies}
        return sorted(found, key=lambda key: self._numbered[key].number)

    def snapshot(
        self,
        spaces: Mapping[str, Variables],
        dead: Mapping[str, set[str]],
        *,
        gradients: bool = False,
        zeroed: bool = False,
        ends: bool = True,
        at: Any = None,
    ) -> bytes:
        """Return the variables, and the states of the objects that have changed since they were numbered, pickled.

        Args:
            spaces: the variables there are.
            dead: those of them that are set before they are read.
            gradients: those of the models are part of it: more is added to them before an update.
            zeroed: the script makes them zero where they are, so those that are there may be nothing.
            ends: a process goes on from here; else it restores another snapshot later.
            at: the place in the script.

        Raises:
            NotCarriedError: it can't be had by another process; the text names it.
        """
        self._beside.begin(certain=ends, at=at)
        entries = [(key, self._state_of(key)) for key in self._find_changed()]
        variables = []
        for name, space in spaces.items():
            values, first = space.values(), self._first_values.get(name, {})
            live = {each: value for each, value in values.items() if each not in dead.get(name, ())}
            known = {
                each: value
                for each, value in live.items()
                if (name, each) not in self._unbound
                and (each not in first or not is_same(value, first[each]) or is_moving(value))
            }
            names = [each for each in values if (name, each) not in self._unbound or each not in live]
            # what is as it was first may have become something else on the other process's way to here
            as_first = [each for each in names if each in live and each not in known]
            unbound = {each: why for (space, each), why in self._unbound.items() if space == name}
            variables.append((name, known, names, as_first, unbound))
        summed = gradients_of(self._parameters, whole=gradients, zeroed=zeroed)
        states, copies = self._certain_generators(), [*self._copies]
        whole = variables, entries, states, gradients, summed, self._hooks.registered, copies
        try:
            packed = self._pack(whole, entries)  # a variable's new value may be left out, an object's may not
        except InjectedFault:
            raise
        except TooLargeError as error:
            if self._beside.include_smaller():
                return self.snapshot(spaces, dead, gradients=gradients, zeroed=zeroed, ends=ends, at=at)
            raise NotCarriedError(str(error)) from None
        except GraphKeptError as error:  # it is no variable to do without: who lacks it trains something else
            named = ((each, name, value) for name, values, *_ in variables for each, value in values.items())
            where = next((f"`{each}` of {name}" for each, name, value in named if self._packing_error(value)), "")
            said = f"{where or 'a tensor'} {error}"
            raise NotCarriedError(said if where else self._blame(entries) or said) from None
        except Exception as error:
            if self._exclude_unpicklable(variables):
                return self.snapshot(spaces, dead, gradients=gradients, zeroed=zeroed, ends=ends, at=at)
            raise NotCarriedError(self._blame(entries) or str(error)) from error
        self._beside.end()
        return packed

    def _certain_generators(self) -> bytes:
        """Return the states of all generators of random numbers.

        Raises:
            NotCarriedError: numbers are drawn while another thread runs, that may be the one that draws: at no certain
                time, so that no other process would draw the same.
        """
        states = generators()
        if not (thread := thread_that_may_draw()):
            self._drawn_beside = False
        elif states != self._last_states:
            self._drawn_beside = True
        self._last_states = states
        if self._drawn_beside:
            raise NotCarriedError(drawn_beside(thread))
        return states

    def _state_of(self, key: Key) -> Any:
        one = self._numbered[key]
        try:
            if one.kind is TENSOR:
                return TENSOR.state_with(one.thing, self._beside.raw(one.thing, describe(key)))
            if isinstance(one.thing, Stateful):
                one.thing.check()
            return one.kind.state(one.thing)
        except NotCarriedError as error:
            raise type(error)(f"{describe(key)}: {error}") from error

    def pack(self, value: Any, own: Mapping[Key, Any] = MappingProxyType({})) -> bytes:
        """Return a value as another process can have it, with references to what is numbered, or has a key in `own`."""
        stream = Limited()
        keys = ChainMap(self._keys, {id(each): key for key, each in own.items()}) if own else self._keys
        Pickler(stream, keys, self._memories).dump(value)
        return stream.getvalue()

    def _pack(self, value: Any, marked: object) -> bytes:
        """Return a value packed, with marks in place of large tensors from one of its parts on."""
        stream = Limited(LARGEST_BYTES if self._beside.includes_smaller else LARGE_BYTES)
        Pickler(stream, self._keys, self._memories, self._beside.raw, marked).dump(value)
        return stream.getvalue()

    def _packing_error(self, value: Any, marked: object = None) -> str:
        self._beside.begin(certain=False)
        try:
            self._pack(value, marked)
        except Exception as error:  # noqa: BLE001 whatever a script's objects raise
            return str(error) or type(error).__name__
        return ""

    def _exclude_unpicklable(self, variables: Sequence[tuple[str, dict[str, Any], Any, Any, Any]]) -> bool:
        """Leave out variables that can't be carried: a script that reads one before it sets it gets a NameError."""
        before = len(self._unbound)
        for name, values, *_ in variables:
            errors = {(name, each): self._packing_error(value) for each, value in values.items()}
            self._unbound |= {each: why for each, why in errors.items() if why}
        return len(self._unbound) > before

    def _blame(self, entries: Iterable[tuple[Key, Any]]) -> str:
        for key, state in entries:
            if why := self._packing_error(state, state):
                parts = self._numbered[key].kind.parts(self._numbered[key].thing)
                worst = next(((name,) for name, each in parts if self._packing_error(each)), ())
                return f"{describe((*key, *worst))}: {why}"
        return ""

    # --- becoming another rank ---------------------------------------------------------------------------------------

    def unpack(self, data: bytes, own: Mapping[Key, Any] = MappingProxyType({})) -> Any:
        """Return what another process has packed, given what has the keys here that it had in `own`."""
        unpickler = Unpickler(io.BytesIO(data), lambda key: own[key] if key in own else self._object_of(key))
        value = unpickler.load()
        unpickler.begin_unbegun(lambda: None)
        return value

    def _object_of(self, key: Key) -> Any:
        if key not in self._numbered:
            raise NotCarriedError(f"{describe(key)} {NOT_MADE}")
        return self._numbered[key].thing

    def _given(self, key: Key, *, ends: bool) -> Any:
        """Return what has a key here, or the tensor that a mark stands for; None where a later snapshot has it."""
        if key[0] != MARK:
            return self._object_of(key)
        return self._beside.take(*key[1:]) if ends else None

    def restore(self, spaces: Mapping[str, Variables], data: bytes, *, ends: bool = True) -> bool:
        """Set variables and objects to a snapshot of another process, which has numbered the same objects.

        Args:
            spaces: variables of this process.
            data: the snapshot.
            ends: this process goes on from here; else it restores another snapshot later.

        Returns:
            whether that has gradients, to which more is added before an update.

        Raises:
            NotCarriedError: this process has made something else before the loop.
        """
        self._beside.begin(certain=ends)
        unpickler = Unpickler(io.BytesIO(data), partial(self._given, ends=ends))
        try:
            variables, entries, states, gradients, summed, hooks, copies = unpickler.load()
        except NotCarriedError:
            raise
        except Exception as error:
            raise NotCarriedError(f"a snapshot can't be read here: {brief(error)}") from error
        known = {key for key, _ in entries}
        entries = [*((key, state) for key, state in self._kept_states.items() if key not in known), *entries]
        known |= {key for key, _ in entries}
        made_before = [key for key in self._find_changed() if not (key[0] or self._numbered[key].is_moving)]
        if ends:
            self._copies |= {*copies}
            self._changes.accept(self._given_keys - known)
        if more := [key for key in made_before if key not in known | self._given_keys]:
            raise NotCarriedError(
                f"{describe(more[0])} has changed here on the way to the loop, and not on the other rank"
            )
        if missing := [key for key, _ in entries if key not in self._numbered]:
            raise NotCarriedError(f"{describe(missing[0])} {NOT_MADE}")
        now = [(key, state) for key, state in entries if ends or not _comes_last(self._numbered[key].thing)]
        unpickler.expect_unbegun()
        self._restore_objects(now)
        still = [(key, state) for key, state in now if self._numbered[key].kind is not POSITION]
        unpickler.begin_unbegun(lambda: self._restore_objects(still))
        for name, values, names, as_first, unbound in variables:
            if name not in spaces:
                raise NotCarriedError(f"{space_name(name)} is not running in the process that takes over")
            self.lacking |= unbound
            spaces[name].assign(self._moved_on(name, spaces[name], as_first) | values, names)
        set_generators(states)
        self._last_states = states
        if hooks:
            self._hooks.skip_to(hooks)
        self.missing_gradients = restore_gradients(self._parameters, summed, whole=gradients)
        if ends:
            pairs = ((self._numbered[key], state) for key, state in entries)
            self._beside.end_taking((state[0], one.thing) for one, state in pairs if _is_taken(one.kind, state))
        return bool(gradients)

    def _moved_on(self, space: str, variables: Variables, as_first: Iterable[str]) -> dict[str, Any]:
        """Return the first values of those variables that have other ones by now."""
        first, now = self._first_values.get(space, {}), variables.values()
        if missing := next((each for each in as_first if each not in first), ""):
            raise NotCarriedError(f"`{missing}` of {space_name(space)} {NOT_MADE}")
        return {each: first[each] for each in as_first if now.get(each, self) is not first[each]}

    def _restore_objects(self, entries: Iterable[tuple[Key, Any]]) -> None:
        # what is gone over first: that changes what it is made of, which then is put right
        for key, state in sorted(entries, key=lambda entry: self._numbered[entry[0]].kind is not POSITION):
            _, thing, kind, *_ = self._numbered[key]
            try:
                if key not in self._kept_states and kind is not POSITION and not _is_taken(kind, state):
                    self._kept_states[key] = kind.state(thing)
                kind.set_state(thing, state)
            except Exception as error:
                why = str(error) if isinstance(error, NotCarriedError) else brief(error)
                raise NotCarriedError(f"{describe(key)} can't be made what it was: {why}") from error


def _comes_last(thing: Any) -> bool:
    return isinstance(thing, Stateful) and thing.comes_last


def _is_taken(kind: Kind, state: Any) -> bool:
    """Return whether a tensor's state has another rank's in place of bytes, or none."""
    return kind is TENSOR and (state[0] is None or isinstance(state[0], torch.Tensor))

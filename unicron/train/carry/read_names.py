"""The variables of a script's modules that some of its objects read: what their code depends on beside themselves."""

import dis
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from unicron.train.carry.kinds import FUNCTION
from unicron.train.carry.objects import kind_of
from unicron.train.carry.variables import NAME, Variables


class Read(Variables):
    """Some variables of a module.

    Args:
        scope: the module's variables.
        names: of those.
    """

    def __init__(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(scope)
        self._names, self._scope = frozenset(names), scope

    def values(self) -> dict[str, Any]:
        """Return their values by name, of those that there are."""
        return {name: self._scope[name] for name in sorted(self._names) if name in self._scope}

    def assign(self, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Have these values, and of them no variables but `names`."""
        for name in self.values().keys() - {*names}:
            del self._scope[name]
        self._scope.update(values)


def variables_read_by(things: Iterable[Any], most: int) -> dict[str, Variables]:
    """Return the variables of modules that are read by the code of these objects, and of all that they lead to.

    Args:
        things: the objects.
        most: objects that are looked at.
    """
    scopes, names, seen, todo = dict[str, dict[str, Any]](), dict[str, set[str]](), dict[int, Any](), [*things]
    while todo and len(seen) <= most:
        thing = todo.pop()
        kind = kind_of(thing)
        if kind is None or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        todo += (each for _, each in kind.parts(thing))
        for function in _functions_of(thing):
            if id(function) in seen and function is not thing:
                continue
            seen[id(function)] = function
            for scope, name in _names_read(function):
                place = scope["__name__"]
                if name not in names.setdefault(place, set()):
                    scopes[place] = scope
                    names[place].add(name)
                    todo.append(scope.get(name))
    return {place: Read(scope, names[place]) for place, scope in scopes.items()}


def _functions_of(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions of the script that an object is, or that its class has."""
    cls = thing if isinstance(thing, type) else type(thing)
    found = [thing] if kind_of(thing) is FUNCTION else [each for one in cls.__mro__ for each in vars(one).values()]
    for each in found:
        inside = getattr(each, "fget", None) or getattr(each, "__func__", each)
        while isinstance(inside, FunctionType):
            if NAME in inside.__globals__:
                yield inside
            inside = getattr(inside, "__wrapped__", None)


def _names_read(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the variables of modules that a function's code may read, or set, each with its module's."""
    scope, todo = function.__globals__, [function.__code__]
    while todo:
        code = todo.pop()
        todo += (each for each in code.co_consts if isinstance(each, CodeType))
        read = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
        yield from ((scope, name) for name in read)
        modules = [scope[name] for name in read if isinstance(scope.get(name), ModuleType)]
        for module in modules:
            if NAME in vars(module):
                yield from ((vars(module), name) for name in code.co_names if name in vars(module))

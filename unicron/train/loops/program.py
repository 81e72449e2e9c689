"""The files of a program, and how they are imported: instrumented (`unicron.train.loops.instrument`), if they train.

So are modules of libraries whose loops train for a script.
"""

import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from unicron.flight import INSTALLED
from unicron.train.carry.variables import NAME
from unicron.train.loops.functions import Facts, Functions, facts_of, functions_of
from unicron.train.loops.instrument import instrument
from unicron.train.loops.kept import load_or_make
from unicron.train.loops.trees import parse, uncollected

FOREIGN = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
FOREIGN.append(Path(__file__).resolve().parents[2])
"""Folders whose files are no program's, though a script may lie above them."""

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
LIGHTNING_TRAINS = {
    "fit_loop": frozenset({"run", "advance"}),
    "training_epoch_loop": frozenset({"run", "advance"}),
    "fetchers": frozenset({"__iter__"}),
}
LIBRARIES: dict[str, frozenset[str] | None] = {
    "transformers.trainer": None,
    **{f"{each}.loops.{name}": trains for each in LIGHTNING for name, trains in LIGHTNING_TRAINS.items()},
}
"""Modules whose loops train for a script; with the functions that do, where their own files don't show it."""


class ScriptProgram:
    """The files of a program: its first one, and those in the same folder that it imports, or these do.

    Of a program that was installed, as a library is, only the files of its own package are.

    Args:
        folder: that its modules are imported from.
        first: file that is run.
    """

    def __init__(self, folder: Path, first: Path) -> None:
        self._folder, first = folder.resolve(), first.resolve()
        self._own = self._folder
        if not INSTALLED.isdisjoint(first.parts) and first.is_relative_to(self._folder):
            self._own /= first.relative_to(self._folder).parts[0]
        with uncollected():
            self._functions = functions_of(self._facts_from(first).values())
        self._digest = repr([sorted(each) for each in self._functions]).encode()

    def _facts_from(self, first: Path) -> dict[Path, Facts]:
        """Return what is known of a file and of those that it imports, or these do."""
        found, new = dict[Path, Facts](), [first] * first.is_file()
        while new:
            path = new.pop()
            if path not in found:
                try:
                    found[path] = _facts_of(path)
                except (SyntaxError, ValueError):
                    continue  # the import of it raises
                new += self._imported_files(path, found[path])
        return found

    def owns(self, path: Path) -> bool:
        """Return whether a file belongs to the program and not to a library."""
        if not path.is_relative_to(self._own):
            return False
        foreign = any(path.is_relative_to(each) and not self._own.is_relative_to(each) for each in FOREIGN)
        return not foreign and INSTALLED.isdisjoint(path.relative_to(self._own).parts)

    def compile_file(self, source: bytes | str, path: Path) -> CodeType:
        """Return the instrumented code of one of its files.

        Raises:
            SyntaxError: it is no Python.
        """
        where = path.resolve()
        name = str(where.relative_to(self._folder)) if where.is_relative_to(self._folder) else where.name
        return _compile(source, path, name, self._digest, lambda: self._functions)

    def _imported_files(self, path: Path, facts: Facts) -> Iterable[Path]:
        """Yield the files of the program that one of it imports, be it as late as it may."""
        for module, level, names in facts.imports:
            above = path.parents[level - 1] if 0 < level <= len(path.parents) else self._folder
            for name in names:
                parts = [*module.split(".") * bool(module), *name.split(".")]
                found = (above.joinpath(*parts[:count]) for count in range(len(parts) + 1))
                for each in found:
                    files = (each.with_name(f"{each.name}.py"), each / "__init__.py")
                    yield from (file for file in files if self.owns(file) and file.is_file())


def locate_module(name: str) -> tuple[Path, Path]:
    """Return the folder that a module is imported from, and its file: of a package, its `__main__.py`.

    No package is imported for that: its files may train, too.
    """
    first, *rest = name.split(".")
    spec = PathFinder.find_spec(first)
    places = [*(spec.submodule_search_locations or ()), spec.origin or first] if spec is not None else [first]
    top = Path(places[0]).resolve()
    path = top.joinpath(*rest)
    if path.is_dir():
        return top.parent, path / "__main__.py"
    return top.parent, path if path == top else path.with_suffix(".py")


def _facts_of(path: Path) -> Facts:
    """Return what is known of a file.

    Raises:
        SyntaxError: it is no Python.
    """
    source = path.read_bytes()
    return Facts(*load_or_make(lambda: tuple(facts_of(parse(source, path))), b"facts", source))


def _of_library(source: bytes, name: str) -> Functions:
    facts, trains = facts_of(parse(source)), LIBRARIES[name]
    found = functions_of([facts], trains or ())
    return found if trains is None else found._replace(training=trains)


def _compile(source: bytes | str, path: Path, name: str, known: bytes, functions: Callable[[], Functions]) -> CodeType:
    """Return the instrumented code of a file.

    Args:
        source: of it.
        path: of it.
        name: of it, for the names of its loops.
        known: a digest of what is known of functions.
        functions: returns that.
    """
    whole = source.encode() if isinstance(source, str) else source
    is_library = name in LIBRARIES

    def make() -> CodeType:
        return compile(instrument(source, str(path), name, functions(), library=is_library), path, "exec")

    code: CodeType = load_or_make(make, b"code", whole, str(path).encode(), name.encode(), known)
    return code


class InstrumentingFinder(MetaPathFinder):
    """Has files of a program, and libraries that train, imported with these calls.

    Args:
        program: that runs.
        loops: what they are methods of.
    """

    def __init__(self, program: ScriptProgram, loops: Any) -> None:
        self._program, self._loops = program, loops

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as Python does; have it loaded by ours, where it may train."""
        own = path is None or any(self._program.owns(Path(each).resolve()) for each in path)
        if fullname not in LIBRARIES and not own:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        program = self._program if self._program.owns(Path(spec.loader.path).resolve()) else None
        if program is not None or fullname in LIBRARIES:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, program, self._loops)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, program: ScriptProgram | None, loops: Any) -> None:
        super().__init__(name, path)
        self._program, self._loops = program, loops

    def get_code(self, fullname: str) -> CodeType:
        """Compile it; what Python keeps of modules is without our calls."""
        source = self.get_data(self.path)
        if self._program is not None:
            return self._program.compile_file(source, Path(self.path))
        known = repr(LIBRARIES[fullname] and sorted(LIBRARIES[fullname] or ())).encode()
        return _compile(source, Path(self.path), fullname, known, lambda: _of_library(source, fullname))

    def exec_module(self, module: ModuleType) -> None:
        """Run it."""
        vars(module)[NAME] = self._loops
        super().exec_module(module)

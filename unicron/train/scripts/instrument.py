"""Programs whose training loops tell where they are: what is compiled of their files, and of libraries that train.

Nothing of their source is touched; what is compiled of it has calls more in each loop that trains: one that hands out
what the loop goes over, one at the head of its body, one at its end, and one behind each statement that may have made
an update. A process that takes a lost one's place there leaves out what comes before.
"""

import ast
import itertools
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypeVar

from unicron.train.scripts.liveness import FUNCTIONS, Liveness

_Scope = TypeVar("_Scope", ast.Module, ast.FunctionDef)

NAME = "__unicron__"
"""What these calls are methods of; it is a variable of each module that has some."""

TRAINS = "backward"
COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "barrier", "gather", "reduce"}
COLLECTIVES |= {"broadcast", "broadcast_object_list", "gather_object", "gather_for_metrics", "monitored_barrier"}
COLLECTIVES |= {"reduce_scatter"}
LOOK_AT_GRADIENTS = frozenset({"clip_grad_norm_", "clip_grad_value_", "get_total_norm"})
FOREIGN = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
FOREIGN.append(Path(__file__).resolve().parents[2])
"""Folders whose files are no program's, though a script may lie above them."""

SEVERAL = 2
"""Statements of a function that train: from one call to the next it makes more than one update."""

Told = ast.For | ast.While | ast.FunctionDef
INSTALLED = frozenset({"site-packages", "dist-packages"})
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


class Program:
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
        trees, new = dict[Path, ast.Module](), [first] * first.is_file()
        while new:
            path = new.pop()
            if path not in trees:
                try:
                    trees[path] = ast.parse(path.read_bytes(), path)
                except (SyntaxError, ValueError):
                    continue  # whoever imports it is told
                new += self._imported(path, trees[path])
        self._functions = functions_of(trees.values())

    def has(self, path: Path) -> bool:
        """Return whether a file is the program's own, and no library's."""
        if not path.is_relative_to(self._own):
            return False
        foreign = any(path.is_relative_to(each) and not self._own.is_relative_to(each) for each in FOREIGN)
        return not foreign and INSTALLED.isdisjoint(path.relative_to(self._own).parts)

    def compiled(self, source: bytes | str, path: Path) -> CodeType:
        """Return what is to be run of one of its files.

        Raises:
            SyntaxError: it is no Python.
        """
        where = path.resolve()
        name = str(where.relative_to(self._folder)) if where.is_relative_to(self._folder) else where.name
        return compile(instrument(source, str(path), name, self._functions), path, "exec")

    def _imported(self, path: Path, tree: ast.Module) -> Iterable[Path]:
        """Yield the files of the program that one of it imports, be it as late as it may."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [(self._folder, each.name.split(".")) for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else self._folder
                parts = node.module.split(".") if node.module else []
                names = [(above, [*parts, each.name]) for each in node.names]
            else:
                continue
            for folder, parts in names:
                found = (folder.joinpath(*parts[:count]) for count in range(len(parts) + 1))
                for each in found:
                    files = (each.with_name(f"{each.name}.py"), each / "__init__.py")
                    yield from (file for file in files if self.has(file) and file.is_file())


def found(name: str) -> tuple[Path, Path]:
    """Return where a module that is run is imported from, and the file that it is, or, of a package, what is run of it.

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


def instrument(source: bytes | str, path: str, name: str, functions: "Functions | None" = None) -> ast.Module:
    """Return what is to be run instead of a file.

    Args:
        source: of it.
        path: of it.
        name: of it, for the names of its loops.
        functions: what is known of functions, where not all of that is seen in this file.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source, path)
    _Instrument(name, functions or functions_of([tree])).visit(tree)
    return ast.fix_missing_locations(tree)


class Functions(NamedTuple):
    """Names of functions: that train, that look at gradients, and that may take long; or that call one which does.

    Attributes:
        repeated: that are called in loops that train.
    """

    training: frozenset[str]
    gradients: frozenset[str]
    long: frozenset[str]
    repeated: frozenset[str]


def functions_of(trees: Iterable[ast.Module], trains: Iterable[str] = ()) -> Functions:
    """Return what is known of the functions of a program.

    Args:
        trees: of its files.
        trains: names of functions that train, where these files don't show it.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    loops = {each.name for each in functions if any(isinstance(one, ast.For | ast.While) for one in ast.walk(each))}
    looking = {each.name for each in functions if _has_gradients(each)} | LOOK_AT_GRADIENTS
    calls = [(each.name, called(each.body)) for each in functions]
    training = _closed(calls, {TRAINS, *trains})
    repeated = {
        name
        for each in nodes
        if isinstance(each, ast.For | ast.While) and (names := called(each.body)) & training
        for name in names
    }
    while more := {name for caller, names in calls if caller in repeated for name in names} - repeated:
        repeated |= more
    return Functions(training, _closed(calls, looking), _closed(calls, loops | COLLECTIVES), frozenset(repeated))


def _closed(calls: Sequence[tuple[str, set[str]]], found: set[str]) -> frozenset[str]:
    while more := {name for name, called in calls if name not in found and called & found}:
        found |= more
    return frozenset(found)


def called(body: Iterable[ast.AST]) -> set[str]:
    """Return the names of all that is called in it."""
    calls = (node.func for each in body for node in ast.walk(each) if isinstance(node, ast.Call))
    return {getattr(each, "attr", getattr(each, "id", "")) for each in calls}


def _hands_out(node: ast.FunctionDef) -> bool:
    """Return whether a function is a generator that is only gone over."""
    inner = {
        id(one) for each in ast.walk(node) if isinstance(each, FUNCTIONS) and each is not node for one in ast.walk(each)
    }
    own = [each for each in ast.walk(node) if id(each) not in inner]
    yields = {id(each) for each in own if isinstance(each, ast.Yield | ast.YieldFrom)}
    alone = {id(each.value) for each in own if isinstance(each, ast.Expr)}
    return bool(yields) and yields <= alone and not node.decorator_list and not node.name.startswith("__")


def _names(body: Iterable[ast.AST]) -> Iterable[ast.Name]:
    """Yield the names that are set in it."""
    nodes = (node for each in body for node in ast.walk(each))
    return (each for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))


def _has_gradients(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in {"grad", "main_grad"} for each in ast.walk(node))


def _yields(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))


def _parts(node: ast.FunctionDef) -> tuple[list[ast.stmt], list[ast.stmt], list[ast.stmt]]:
    """Return what a function begins with (its docstring, what is not its own), does, and returns."""
    begins = itertools.takewhile(
        lambda each: (
            isinstance(each, ast.Global | ast.Nonlocal)
            or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ),
        node.body,
    )
    first, last = len(list(begins)), len(node.body) - isinstance(node.body[-1], ast.Return)
    return node.body[:first], node.body[first:last], node.body[last:]


class _Instrument(ast.NodeTransformer):
    def __init__(self, name: str, found: "Functions") -> None:
        self._name, self._training, self._gradients, self._long, self._repeated = name, *found
        self._scopes: list[Liveness] = []

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """See which variables are read where."""
        return self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Leave functions alone that do not train, but have those that are generators know how far they are."""
        if _hands_out(node):
            node.decorator_list = [ast.Attribute(ast.Name(NAME, ast.Load()), "counted", ast.Load())]
            return ast.copy_location(node, node)
        if node.name not in self._training:
            return node
        begins, body, ending = _parts(node)
        trains = [
            each for each in body if called([each]) & self._training and not isinstance(each, ast.For | ast.While)
        ]
        if len(trains) < SEVERAL or node.name not in self._repeated or _yields(node):
            return self._within(node)
        self._scopes.append(Liveness(node))
        told = self._told(node, body, ast.Constant(node.end_lineno), set())
        self.generic_visit(node)
        node.body = [*begins, *told(body), *ending]
        self._scopes.pop()
        return node

    def _within(self, node: _Scope) -> _Scope:
        self._scopes.append(Liveness(node))
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Have iterators know how far they are."""
        if getattr(node.func, "id", "") == "iter" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Attribute(ast.Name(NAME, ast.Load()), "iterate", ast.Load()), node.func)
        self.generic_visit(node)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        """Have a loop go over what is handed out."""
        if called(node.body) & self._training:
            numbered, over = False, node.iter
            if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate" and len(over.args) == 1:
                numbered, over = not over.keywords, over.args[0] if not over.keywords else over
            names = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
            body = self._told(node, node.body, ast.Constant(None), names)
            node.iter = self._call("over", node, over, ast.Constant(numbered))
            self.generic_visit(node)
            node.body = body(node.body)
            return node
        self.generic_visit(node)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        """Have a loop say where it is."""
        if called(node.body) & self._training:
            body = self._told(node, node.body, ast.Constant(node.end_lineno), set())
            self.generic_visit(node)
            node.body = body(node.body)
            entered = ast.BoolOp(ast.Or(), [self._call("enters", node), node.test])
            node.test = ast.copy_location(ast.BoolOp(ast.And(), [self._call("still", node), entered]), node.test)
            return node
        self.generic_visit(node)
        return node

    def _told(
        self, node: Told, whole: list[ast.stmt], last: ast.Constant, targets: set[str]
    ) -> Callable[[list[ast.stmt]], list[ast.stmt]]:
        """Return what makes of a body one that tells where it is, and can be begun behind an update.

        Args:
            node: the loop, or function.
            whole: its body.
            last: line at which it ends, if it does not say so by itself.
            targets: variables that it sets as it begins.
        """
        dead = self._scopes[-1].dead
        begins = self._tells("head", node, [last], targets | dead(node, 0))
        points = list[tuple[int, ast.stmt]]()
        for count, each in enumerate(whole, 1):
            ends, rest = count == len(whole), whole[count:]
            updates = called([each]) & (self._training | {"step"})
            if ends or (updates and not self._look_back(rest)):
                same = targets - {one.id for one in _names(whole[:count])}
                how, long = ("end", []) if ends else ("behind_update", [ast.Constant(self._takes_long(rest))])
                points.append((count, self._tells(how, node, [ast.Constant(count), *long], same | dead(node, count))))

        def body(statements: list[ast.stmt]) -> list[ast.stmt]:
            found, done = [begins], 0
            for count, tells in points:
                due = self._call("due", node, ast.Constant(count))
                found.append(ast.copy_location(ast.If(due, statements[done:count], []), statements[done]))
                found.append(tells)
                done = count
            return found

        return body

    def _takes_long(self, rest: Sequence[ast.stmt]) -> bool:
        """Return whether statements may take long, or make another update: by a loop, a collective, or training."""
        loops = any(isinstance(each, ast.For | ast.While) for one in rest for each in ast.walk(one))
        return loops or bool(called(rest) & (self._training | self._long))

    def _look_back(self, rest: Sequence[ast.stmt]) -> bool:
        """Return whether statements look at gradients before they make others."""
        looks = itertools.takewhile(lambda each: not called([each]) & self._training, rest)
        return any(_has_gradients(each) or called([each]) & self._gradients for each in looks)

    def _tells(self, how: str, node: Told, first: list[ast.Constant], dead: Iterable[str]) -> ast.stmt:
        names = [ast.Constant(each) for each in sorted(dead)]
        return ast.copy_location(ast.Expr(self._call(how, node, *first, *names)), node)

    def _call(self, name: str, loop: Told, *arguments: ast.expr) -> ast.expr:
        function = ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())
        place = ast.Constant(f"{self._name}:{loop.lineno}")
        return ast.copy_location(ast.Call(function, [place, *arguments], []), loop)


def _of_library(source: bytes, name: str) -> Functions:
    tree, trains = ast.parse(source), LIBRARIES[name]
    found = functions_of([tree], trains or ())
    return found if trains is None else found._replace(training=trains)


class Importing(MetaPathFinder):
    """Has files of a program, and libraries that train, imported with these calls.

    Args:
        program: that runs.
        loops: what they are methods of.
    """

    def __init__(self, program: Program, loops: Any) -> None:
        self._program, self._loops = program, loops

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as Python does; have it loaded by ours, where it may train."""
        own = path is None or any(self._program.has(Path(each).resolve()) for each in path)
        if fullname not in LIBRARIES and not own:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        program = self._program if self._program.has(Path(spec.loader.path).resolve()) else None
        if program is not None or fullname in LIBRARIES:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, program, self._loops)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, program: Program | None, loops: Any) -> None:
        super().__init__(name, path)
        self._program, self._loops = program, loops

    def get_code(self, fullname: str) -> CodeType:
        """Compile it; what Python keeps of modules is without our calls."""
        source = self.get_data(self.path)
        if self._program is not None:
            return self._program.compiled(source, Path(self.path))
        return compile(instrument(source, self.path, fullname, _of_library(source, fullname)), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        """Run it."""
        vars(module)[NAME] = self._loops
        super().exec_module(module)

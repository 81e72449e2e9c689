"""A script's text, its syntax tree, and edits of pieces of it: what is not edited stays as it was written."""

import ast
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

Scope = ast.Module | ast.FunctionDef
Loop = ast.For | ast.While
LOOPS = (ast.For, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class UnusualError(Exception):
    """The script is not of the shape that can be converted.

    Attributes:
        line: where it is not; 0: nowhere in particular.
    """

    def __init__(self, node: ast.AST | None, text: str) -> None:
        super().__init__(text)
        self.line: int = getattr(node, "lineno", 0)


class Source:
    """A script, and what is to be changed of it.

    Args:
        text: of it.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = list(io.StringIO(text, newline=""))
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.paths = dict(self._imported())
        self._edits: dict[tuple[int, int], str] = {}
        self._removed: set[ast.stmt] = set()
        self._shifts: dict[int, int] = {}
        self._unit = ""
        self._inside_text = set(self._continued())

    # --- reading -----------------------------------------------------------------------------------------------------

    def _imported(self) -> Iterator[tuple[str, str]]:
        """Yield what each imported name stands for."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    yield (
                        each.asname or each.name.partition(".")[0],
                        each.name if each.asname else each.name.partition(".")[0],
                    )
            elif isinstance(node, ast.ImportFrom):
                for each in node.names:
                    yield each.asname or each.name, "." * node.level + f"{node.module or ''}.{each.name}".lstrip(".")

    def _continued(self) -> Iterator[int]:
        """Yield the lines that begin inside of a text of several lines: their spaces are content."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                yield from range(node.lineno + 1, (node.end_lineno or 0) + 1)

    def path(self, node: ast.AST) -> str:
        """Return what an expression such as `nn.Linear` stands for, `torch.nn.Linear`; empty where it is no name."""
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return f"{base}.{node.attr}" if base else ""
        return self.paths.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that a node stands in, the nearest first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module that a node stands in."""
        return next(each for each in self.around(node) if isinstance(each, (ast.Module, ast.ClassDef, *FUNCTIONS)))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is part of."""
        return next(each for each in (node, *self.around(node)) if isinstance(each, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements that a statement stands among."""
        fields = (getattr(self.parents[statement], name, []) for name in ("body", "orelse", "finalbody"))
        return next(each for each in fields if isinstance(each, list) and statement in each)

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops of its own scope that a node stands in, the outermost first."""
        found: list[Loop] = []
        for each in self.around(node):
            if isinstance(each, (ast.ClassDef, *FUNCTIONS)):
                break
            if isinstance(each, LOOPS):
                found.insert(0, each)
        return found

    def assigned(self, name: str, scope: ast.AST) -> list[ast.stmt]:
        """Return the statements that bind a variable which a scope sees."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == name)
        stores = [node for node in nodes if isinstance(node.ctx, ast.Store) and self.scope(node) in {scope, self.tree}]
        local = [node for node in stores if self.scope(node) is scope]
        return [self.statement(node) for node in local or stores]

    def value(self, node: ast.AST, scope: ast.AST) -> ast.AST:
        """Return the expression that a variable is bound to, where that is done once; else the expression itself."""
        if isinstance(node, ast.Name):
            statements = self.assigned(node.id, scope)
            if len(statements) == 1 and isinstance(statements[0], ast.Assign):
                target = statements[0].targets[0]
                if isinstance(target, ast.Name) and len(statements[0].targets) == 1:
                    return statements[0].value
        return node

    def fresh(self, name: str) -> str:
        """Return a name that the script does not have."""
        nodes = [*ast.walk(self.tree)]
        taken = {getattr(node, "id", getattr(node, "arg", None)) for node in nodes} | {*self.paths}
        taken |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        while name in taken:
            name += "_"
        return name

    # --- places ------------------------------------------------------------------------------------------------------

    def at(self, line: int, column: int = 0) -> int:
        """Return the place of a line, and of a column as syntax trees count them: in bytes."""
        if not column:
            return self._starts[min(line, len(self._starts)) - 1]
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node's text begins and ends."""
        return (
            self.at(getattr(node, "lineno"), getattr(node, "col_offset")),  # noqa: B009 not all nodes have them
            self.at(getattr(node, "end_lineno"), getattr(node, "end_col_offset")),  # noqa: B009
        )

    def of(self, node: ast.AST) -> str:
        """Return a node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def operand(self, node: ast.AST) -> str:
        """Return an expression's text, for a product."""
        text = self.of(node)
        return text if isinstance(node, ast.Name | ast.Constant | ast.Attribute | ast.Call) else f"({text})"

    def line(self, place: int) -> int:
        """Return the line that a place is on."""
        return bisect_right(self._starts, place)

    def margin(self, statement: ast.stmt) -> str:
        """Return what stands before a statement on its line."""
        return self.text[self.at(statement.lineno) : self.span(statement)[0]]

    # --- editing -----------------------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, text: str) -> None:
        """Have other text for a node.

        Raises:
            UnusualError: this Python, older than 3.12, does not know where in an f-string it stands.
        """
        if any(isinstance(each, ast.JoinedStr) for each in self.around(node)) and not _is(self.of(node), node):
            raise UnusualError(
                node, "this f-string can't be taken apart by this Python: take 3.12, or bind its parts before"
            )
        self.replace_span(*self.span(node), text)

    def replace_span(self, start: int, end: int, text: str) -> None:
        """Have other text from one place to another; at one place, what is inserted later follows."""
        self._edits[start, end] = self._edits.get((start, end), "") * (start == end) + text

    def insert(self, line: int, margin: str, lines: Iterable[str]) -> None:
        """Have more lines before a line."""
        text = "".join(f"{margin}{each}".rstrip() + self.newline for each in lines)
        if line > len(self._lines) and self._lines and not self._lines[-1].endswith(("\n", "\r")):
            text = self.newline + text
        self.replace_span(self.at(line), self.at(line), text)

    def remove(self, statement: ast.stmt) -> None:
        """Have no such statement."""
        self._removed.add(statement)

    def shift(self, first: int, last: int, unit: str, steps: int) -> None:
        """Indent lines by one step more, or less."""
        for line in range(first, last + 1):
            if line not in self._inside_text and self._lines[line - 1].strip():
                self._shifts[line] = self._shifts.get(line, 0) + steps
        self._unit = unit

    def live(self, node: ast.AST) -> bool:
        """Return whether a node's text is to stay."""
        start, end = self.span(node)
        if any(each in self._removed for each in (node, *self.around(node))):
            return False
        return not any(low <= start and end <= high for low, high in self._edits if low < high)

    def uses(self, name: str) -> bool:
        """Return whether a variable is still read, by what stays or by what is new."""
        loads = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == name)
        if any(isinstance(node.ctx, ast.Load) and self.live(node) for node in loads):
            return True
        return any(re.search(rf"(?<![\w.]){name}(?!\w|=[^=])", text) for text in self._edits.values())

    def result(self) -> str:
        """Return the text with all edits."""
        for statement in self._removed:
            if any(each in self._removed for each in self.around(statement)):
                continue
            first, last = self.at(statement.lineno), self.at((statement.end_lineno or 0) + 1)
            alone = not self.margin(statement).strip() and len(self._on_lines(statement)) == 1
            if alone:
                self.replace_span(first, last, "")
                for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
                    self._shifts.pop(line, None)
            else:
                self.replace(statement, "pass")
        for line, steps in self._shifts.items():
            start, taken = self._starts[line - 1], self._unit * -steps
            if steps > 0:
                self.replace_span(start, start, self._unit * steps)
            elif self._lines[line - 1].startswith(taken):
                self.replace_span(start, start + len(taken), "")
        text, end = [], len(self.text) + 1
        kept = [span for span in self._edits if not self._covered(*span)]
        for low, high in sorted(kept, reverse=True):
            text += [self.text[high:end], self._edits[low, high]]
            end = low
        return "".join(reversed([*text, self.text[:end]]))

    def _covered(self, low: int, high: int) -> bool:
        wider = ((a, b) for a, b in self._edits if (a, b) != (low, high) and a < b)
        return any((a < low < b) if low == high else (a <= low and high <= b) for a, b in wider)

    def _on_lines(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of a block that have a line with one of them in common."""
        first, last = statement.lineno, statement.end_lineno or 0
        return [each for each in self.block(statement) if each.lineno <= last and (each.end_lineno or 0) >= first]

    def settle(self) -> None:
        """Have no block empty of which all is removed: an `if` goes along, else something is to stand there."""
        removed: set[ast.stmt] = set()
        while removed != self._removed:
            removed = set(self._removed)
            for statement in removed:
                owner, block = self.parents[statement], self.block(statement)
                if isinstance(owner, ast.Module) or owner in removed or not removed.issuperset(block):
                    continue
                if isinstance(owner, ast.If) and not owner.orelse and block is owner.body and _plain(owner.test):
                    self._removed.add(owner)
                elif statement is block[0]:
                    self._removed.discard(statement)
                    self.replace(statement, "pass")


def _is(text: str, node: ast.AST) -> bool:
    try:
        return ast.dump(ast.parse(text, mode="eval").body) == ast.dump(node)
    except SyntaxError:
        return False


def _plain(test: ast.expr) -> bool:
    """Return whether to look at a condition has no effect."""
    return not any(isinstance(each, ast.Call | ast.NamedExpr | ast.Await) for each in ast.walk(test))

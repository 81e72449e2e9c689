"""Mutants: the code with one small change in it, a comparison turned or a statement left out, as somebody might err.

cosmic-ray makes them; here is which of its kinds are wanted, two more of the same make, and where no mutant is of use.
"""

import difflib
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

DOING = {"expr_stmt", "atom_expr", "raise_stmt", "del_stmt", "keyword"}


class LeaveOut(Operator):
    """Leaves out a statement, unless all that follows fails without it: a name that is set, a last return."""

    def mutation_positions(self, node):
        if node.type != "simple_stmt":
            return
        what = node.children[0]
        if what.type == "expr_stmt" and what.children[0].type in {"name", "testlist_star_expr"}:
            leaves = what.children[1].type == "operator" and what.children[1] != "="  # as in `count += 1`
        elif what.type == "return_stmt":
            leaves = node.parent.parent.type != "funcdef"
        else:
            leaves = what.type in DOING and what not in ("pass", "break", "continue")
        if leaves:
            yield node.start_pos, node.end_pos

    def mutate(self, node, _):
        node.children[:-1] = [Keyword("pass", node.start_pos, node.get_first_leaf().prefix)]
        return node

    @classmethod
    def examples(cls):
        return ()


class TurnIn(Operator):
    """Makes `not in` of `in`, and `in` of `not in`."""

    def mutation_positions(self, node):
        if node.type == "comparison" and node.children[1].get_code().split() in (["in"], ["not", "in"]):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node, _):
        node.children[1] = Keyword("not in" if node.children[1].type == "keyword" else "in", (1, 0), " ")
        return node

    @classmethod
    def examples(cls):
        return ()


# Of the others most are no Python, or fail wherever they are reached, as a product of two sets does.
BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul BitOr_BitAnd BitAnd_BitOr"
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE LtE_Gt Gt_LtE GtE_Lt Is_IsNot IsNot_Is"
OTHERS = """AddNot NumberReplacer ZeroIterationForLoop ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub
ReplaceAndWithOr ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue
ReplaceBreakWithContinue ReplaceContinueWithBreak"""
NAMES = [
    *(f"ReplaceBinaryOperator_{each}" for each in BINARY.split()),
    *(f"ReplaceComparisonOperator_{each}" for each in COMPARISON.split()),
    *OTHERS.split(),
]
KINDS = {name: get_operator(f"core/{name}")() for name in NAMES} | {"LeaveOut": LeaveOut(), "TurnIn": TurnIn()}


@dataclass(frozen=True)
class Mutant:
    """One mutant; `code` is that of the whole file."""

    file: str
    line: int
    kind: str
    diff: str
    code: str


def drawn(root: Path, files: list[str], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of these files, each of another place; which, a change elsewhere in the code leaves so."""
    places = sorted(
        (hashlib.blake2b(f"{seed} {file} {text} {again}".encode()).hexdigest(), file, start, kinds)
        for file in files
        for text, again, start, kinds in places_of((root / file).read_text())
    )
    found = []
    for key, file, start, kinds in places:
        kind, occurrence = kinds[int(key, 16) % len(kinds)]
        before = (root / file).read_text()
        after = mutate_code(before, KINDS[kind], occurrence)
        try:
            compile(after, file, "exec")
        except SyntaxError:  # as of patterns, which are joined with |, too
            continue
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), file, file, lineterm="", n=2)
        found.append(Mutant(file, start[0], kind, "\n".join(lines), after))
        if len(found) == count:
            break
    return found


def places_of(code):
    """Yield each place where the code can be changed: its line, which of such lines' places it is, and the kinds."""
    nodes = list(ast_nodes(get_ast(code)))
    places = defaultdict(list)
    for name, kind in KINDS.items():
        occurrence = 0
        for node in nodes:
            for start, _ in kind.mutation_positions(node):
                if of_use(node, name):
                    places[start].append((name, occurrence))
                occurrence += 1
    lines = code.splitlines()
    seen = defaultdict(int)
    for start in sorted(places):
        text = lines[start[0] - 1].strip()
        seen[text] += 1
        yield text, seen[text], start, places[start]


def of_use(node, kind):
    """Return whether a change there can be noticed, and not merely by Python or a reader of messages."""
    in_function, inside = False, node
    if kind == "LeaveOut" and node.get_code().strip().startswith("log."):
        return False
    while (parent := inside.parent) is not None:
        if (
            parent.type in {"decorator", "fstring", "assert_stmt", "import_from", "tfpdef"}
            or (parent.type == "parameters" and inside.type != "param")
            or (parent.type == "annassign" and inside is parent.children[1])
            or (parent.type == "funcdef" and inside is parent.annotation)
            or (parent.type == "funcdef" and parent.name.value == "__init__" and kind == "LeaveOut")
            or (parent.type == "classdef" and inside.type in {"arglist", "argument"})
            or (parent.type == "argument" and parent.children[0].get_code().strip() == "strict")
            or (parent.type == "simple_stmt" and inside.get_code().strip().startswith(("log.", "raise ")))
        ):
            return False
        in_function |= parent.type == "funcdef"
        inside = parent
    return in_function or not kind.startswith("ReplaceBinaryOperator_Bit")  # types are joined with | there

"""No test depends on time: it sleeps no longer than a look takes, sets no limits and asserts no durations.

What waits, waits for a condition (helpers/waiting.py), and what is to happen after a while happens in virtual time.
"""

import ast
import re

import pytest
from helpers import ROOT

LONGEST_S = 0.05

CLOCKS = {"monotonic", "perf_counter", "time", "thread_time", "monotonic_ns", "perf_counter_ns", "time_ns"}

LIMITS = {"timeout", "timeout_at", "wait_for"}

LEFT_OUT = (
    "helpers/",
    "unit/docs/test_waiting.py",
    "unit/service/test_clock.py",  # virtual time itself is what it tests
)


def name_of(call):
    """Return the last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def reads_a_clock(node):
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and isinstance(each.func.value, ast.Name)
        and (each.func.value.id, each.func.attr) in {("time", clock) for clock in CLOCKS}
        for each in ast.walk(node)
    )


class Looking(ast.NodeVisitor):
    """Notes what depends on time in a module, and in the scripts that stand in its strings."""

    def __init__(self, tree):
        self.found = []
        assigned = [
            (name.id, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for name in ast.walk(ast.Tuple(node.targets))
            if isinstance(name, ast.Name)
        ]
        self._numbers = {name: value.value for name, value in assigned if isinstance(value, ast.Constant)}
        self._read = {name for name, value in assigned if reads_a_clock(value)}

    def note(self, node, what):
        self.found.append((node.lineno, what))

    def seconds(self, node):
        """Return the longest time that an expression may stand for; what is no number is endless."""
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                return self._numbers.get(name, float("inf"))
            case ast.IfExp(body=body, orelse=orelse):
                return max(self.seconds(body), self.seconds(orelse))
        return float("inf")

    def visit_Call(self, node):
        self.generic_visit(node)
        name = name_of(node)
        if name in {"sleep", "usleep"} and not self.is_a_scene(node) and self.seconds(node.args[0]) > LONGEST_S:
            self.note(node, "sleeps")
        if name in LIMITS and ast.unparse(node.func).startswith(("asyncio.", *LIMITS)):
            self.note(node, "sets a limit")
        if any(each.arg == "timeout" and ast.unparse(each.value) != "PATIENT_S" for each in node.keywords):
            self.note(node, "sets a limit")

    @staticmethod
    def is_a_scene(call):
        """Whether `sleep` is a method of something of the test's own."""
        return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in {"time", "asyncio"}

    def measures(self, node):
        """Whether an expression is a time that went by, or now itself."""
        if reads_a_clock(node) and "time.time()" not in ast.unparse(node):
            return True
        differences = [each for each in ast.walk(node) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub)]
        return any(
            reads_a_clock(side) or (isinstance(side, ast.Name) and side.id in self._read)
            for each in differences
            for side in (each.left, each.right)
        )

    def visit_Compare(self, node):
        self.generic_visit(node)
        if any(self.measures(side) for side in (node.left, *node.comparators)):
            self.note(node, "asserts how long it takes")

    def visit_Constant(self, node):
        text = node.value if isinstance(node.value, str) else ""
        if any(float(seconds) > LONGEST_S for seconds in re.findall(r"sleep[ (\"',]+(\d+\.?\d*|\.\d+)", text)):
            self.note(node, "sleeps in a script")


def look(text):
    if not re.search(r"sleep|timeout|wait_for|\btime\.", text):
        return []
    tree = ast.parse(text)
    looking = Looking(tree)
    looking.visit(tree)
    return sorted({f"{line}: {what}" for line, what in looking.found})


def test_no_test_depends_on_time():
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT / "tests"))
        if not name.startswith(LEFT_OUT) and (there := look(path.read_text())):
            found[name] = there
    assert found == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("await asyncio.sleep(0.06)", "sleeps"),
        ("time.sleep(1)", "sleeps"),
        ("PAUSE_S = 2.0\ntime.sleep(PAUSE_S)", "sleeps"),
        ("time.sleep(3 * TTL_S)", "sleeps"),
        ("time.sleep(0.08 if slow else 0.04)", "sleeps"),
        ("SCRIPT = '''\nimport time\ntime.sleep(600)\n'''", "sleeps in a script"),
        ("run(['sh', '-c', 'sleep 5; echo'])", "sleeps in a script"),
        ("async def test():\n    async with asyncio.timeout(30): pass", "sets a limit"),
        ("await asyncio.wait_for(job, 20)", "sets a limit"),
        ("subprocess.run(command, timeout=60)", "sets a limit"),
        ("process.wait(timeout=WAIT_S)", "sets a limit"),
        ("began = time.monotonic()\nassert time.monotonic() - began < 3", "asserts how long it takes"),
        ("began, x = time.time(), 1\nassert after - began >= 0.5", "asserts how long it takes"),
        ("while time.monotonic() < deadline: pass", "asserts how long it takes"),
    ],
)
def test_what_depends_on_time_is_seen(text, what):
    assert what in [each.partition(": ")[2] for each in look(text)]


@pytest.mark.parametrize(
    "text",
    [
        "await asyncio.sleep(0.05)",
        "time.sleep(0)",
        "scene.sleep('w1')",
        "client.connect(timeout=PATIENT_S)",
        "now = time.time()\nassert message.at >= now",
        "parse('sleep 0.01')",
    ],
)
def test_what_does_not_is_let_be(text):
    assert look(text) == []

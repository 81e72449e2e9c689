"""The pages for people name only what exists: files, functions, types, commands, links, settings."""

import ast
import builtins
import importlib.util
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer.main
import yaml
from helpers import ROOT, standby
from helpers.pages import FENCED, MARK, PAGES, Line, prose, typed
from helpers.ports import free_port
from rich.console import Console
from unicron_cli.main import app
from unicron_cli.report import DemoReport, FaultReport, TaskReport, report_view

from unicron import taskfile

pytestmark = pytest.mark.slow

README, ARCHITECTURE, REFERENCE = ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "reference"
SESSION = ROOT / "docs" / "howto" / "session.md"
NAMING = [README, ARCHITECTURE, SESSION, *(REFERENCE / f"{name}.md" for name in ("limits", "security", "session"))]

TOPS = [path for path in ROOT.iterdir() if not path.name.startswith(".") and path.suffix != ".egg-info"]

SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml|yaml|yml|conf|json))")
FUNCTION = re.compile(r"((?:\w+\.)*\w+)\(\)")
TYPE = re.compile(r"([A-Z][a-z]+)+")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """Return what is in the blocks of a language, without what these are indented by."""
    found = [match for match in FENCED.finditer(page.read_text()) if match[2] == language]
    return [re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE) for match in found]


def sections(text):
    """Return the pieces of a page between its headings."""
    return re.split(r"^#+ .*$", text, flags=re.MULTILINE)


@cache
def definitions(path):
    """Return what a Python file defines: functions, classes, methods as Class.method, and constants."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def sources():
    tops = ("unicron", "agent", "services")
    return [path for top in tops for path in (ROOT / top).rglob("*.py")]


# --- files, functions, types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", NAMING, ids=name_of)
def test_each_path_exists(page):
    paths = {span for span in SPAN.findall(prose(page)) if PATH.fullmatch(span) and "/" in span}
    assert page is not ARCHITECTURE or len(paths) > 30, "the pattern finds the paths of the page"
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_each_function_of_the_walk_stands_in_a_file_named_in_its_section():
    missing, checked = [], 0
    for section in sections(prose(ARCHITECTURE)):
        spans = SPAN.findall(section)
        files = [ROOT / span for span in spans if span.endswith(".py") and (ROOT / span).exists()]
        defined = set().union(*(definitions(path) for path in files))
        for span in spans:
            if (match := FUNCTION.fullmatch(span)) and span != "step()":
                checked += 1
                missing += [] if match[1] in defined else [span]
    assert missing == [], "name the file before the function, in the same section"
    assert checked > 30


def test_each_type_that_the_architecture_names_exists():
    known = set().union(*(definitions(path) for path in sources()))
    named = {span for span in SPAN.findall(prose(ARCHITECTURE)) if TYPE.fullmatch(span)}
    assert len(named) > 15
    assert named - known - set(dir(builtins)) == set()


# --- commands --------------------------------------------------------------------------------------------------------


def calls(page):
    """Return each command that the page has in a block or in a sentence, where that is, and whether it is a mention.

    A mention is of the command, and may leave out its arguments.
    """
    found = [(line.where, words, False) for line in typed(page) for words in line.commands()]
    spans = [span for span in SPAN.findall(prose(page)) if re.match(r"(unicron|make|python) (?!-m MODULE)", span)]
    return found + [(page.name, shlex.split(span), True) for span in spans]


def check_command(words, *, mentioned=False):
    """Raise if `unicron WORDS` is no command with these options and arguments; these may be left out of a mention."""
    command, context = typer.main.get_command(app), None
    while hasattr(command, "commands"):
        context = type(command).context_class(command, parent=context)
        _, words, _ = command.make_parser(context).parse_args(list(words))
        if not words:
            return  # only a group was named
        assert words[0] in command.commands, f"no command {words[0]}"
        name, command, words = command.resolve_command(context, words)
    if words or not mentioned:
        command.make_context(name, list(words), parent=context)


def check_make(words):
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets, "no such target"


HARNESS = ROOT / "benchmarks/harness/command.py"
"""Declares the option that all benchmarks have."""


def check_python(words):
    """Raise where the module or script is none, or where an option stands nowhere in it."""
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None, "no such module"
        sources = [Path(spec.origin), *([HARNESS] if words[1].startswith("benchmarks.") else [])]
        words = words[2:]
    elif words[0].endswith(".py"):
        words, sources = words[1:], [ROOT / words[0]]
    else:
        return
    options = {word for word in words if word.startswith("--")}
    missing = {word for word in options if not any(f'"{word}"' in source.read_text() for source in sources)}
    assert missing == set(), f"{sources[0].name} has no such option"


def check_compose(words):
    """Raise where something is done with services that there are not."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    while words[0].startswith("-"):
        words = words[2:]
    if words[0] in {"up", "ps", "restart"}:
        named = {word for word in words[1:] if not word.startswith("-")}
        assert named <= services.keys(), "no such service"


TOOLS = {
    "docker",
    "sudo",
    "mkdir",
    "rm",
    "touch",
    "ln",
    "export",
    ".",
    "grep",
    "tail",
    "scp",
    "srun",
    "stat",
    "prometheus",
}
"""What needs no check: of these only files of ours are looked for."""


def check(words, *, mentioned=False):
    """Raise if a command is none, has an option that there is not, or names a file of this repository that is none."""
    words = words[1:] if words[0] == "docker" and words[1] == "compose" else words
    program, rest = words[0].removeprefix(".venv/bin/"), list(words[1:])
    match program:
        case "unicron":
            check_command(rest, mentioned=mentioned)
        case "make":
            check_make(rest)
        case "python":
            check_python(rest)
        case "docker-compose" | "compose":
            check_compose(rest)
        case _:
            assert program in TOOLS, "no such program"
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    files = [word for word in rest if "/" in word and word.partition("/")[0] in tops]
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_command_exists_with_its_options_and_files(page, monkeypatch):
    monkeypatch.setenv("UNICRON_CHECKPOINTS", "/where/the/page/says")
    for where, words, mentioned in calls(page):
        try:
            check(words, mentioned=mentioned)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, name the command
            pytest.fail(f"{where}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize(
    "text",
    [
        *("unicron nosuch", "unicron submit", "unicron events --nosuch", "unicron up --nodes many"),
        *("unicron chaos nosuch gpt:1", "uniron status", "make nosuch", "python -m benchmarks.nosuch"),
        *("python -m benchmarks.evaluation --nosuch", "unicron submit examples/nosuch/task.yaml"),
        *("docker-compose up -d nosuch", "docker compose --env-file deploy/nosuch up", "true && unicron status"),
        *('docker kill "$(docker-compose ps -q nosuch)"', "for node in a b; do unicron chaos nosuch $node; done"),
        *("UNICRON_DIR=/x unicron nosuch", "unicron events | uniq"),
    ],
)
def test_the_check_of_commands_finds_what_is_wrong(text):
    with pytest.raises(Exception, match=r"\w"):
        [check(words) for words in Line("", text, "").commands()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_is_a_block_that_says_why(page):
    text = prose(page)
    reasons = [line.why_not for line in typed(page) if line.why_not]
    assert sorted(set(MARK.findall(text)) - {"REASON"}) == sorted(set(reasons)), "a mark stands right above its block"


# --- links -----------------------------------------------------------------------------------------------------------


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    assert broken == []


def test_each_page_that_a_file_names_exists():
    named = {}
    for path in (path for top in TOPS for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()):
        if path.suffix in {".py", ".md", ".yml", ".yaml", ".toml", ".env", ".conf", ".html", ".js", ""}:
            found = re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text(errors="replace"))
            named |= {name: name_of(path) for name in found}
    assert len(named) > 10
    assert {name: where for name, where in named.items() if not (ROOT / name).exists()} == {}


# --- what the pages explain ------------------------------------------------------------------------------------------


def header(text):
    """Return the columns of the report's first table."""
    return next(line for line in text.splitlines() if line.startswith("fault ")).split()


def test_readme_is_two_screens_long_and_the_architecture_250_lines():
    assert len(README.read_text().splitlines()) <= 105
    assert len(ARCHITECTURE.read_text().splitlines()) <= 250


SHORT = [page for page in PAGES if page.parent.name in {"start", "howto"}]


@pytest.mark.parametrize("page", PAGES[1:], ids=name_of)
def test_a_page_says_first_what_it_is_for(page):
    title, purpose, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[A-Z][\w`']+ ", purpose), "begin with a sentence or two: what for, and who reads it"
    assert page not in SHORT or purpose.startswith("For ")


@pytest.mark.parametrize("page", SHORT, ids=name_of)
def test_a_page_for_one_question_is_short(page):
    assert len(page.read_text().split()) < 1500, "what is left belongs into docs/reference"


def test_the_list_of_pages_has_each_page():
    listed = set(re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs" / "README.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - listed == {"README.md"}


def test_the_page_of_the_demo_explains_the_columns_of_its_report():
    text = (REFERENCE / "demo.md").read_text()
    screen = Console(width=160, file=io.StringIO())
    fault = FaultReport(kind="raise", target="gpt:1")
    losses = {"first_loss": 1, "final_loss": 1, "max_rel_diff": 0.0}
    task = TaskReport(name="gpt", weight=1, state="finished", iterations=1, **losses)
    screen.print(report_view(DemoReport(ok=True, faults=[fault], tasks=[task], seconds=1.0, machine="one")))
    columns = header(screen.file.getvalue())
    assert header(text) == columns, "the report in docs/reference/demo.md is one of this version"
    explained = re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)
    assert set(columns) - {"fault", "target"} <= set(explained)


def test_the_pages_on_task_files_and_sessions_name_each_field_and_each_call():
    text = (REFERENCE / "task-file.md").read_text()
    assert [field for field in taskfile.FIELDS if f"| `{field}` |" not in text] == []
    text = (REFERENCE / "session.md").read_text()
    module = ast.parse((ROOT / "unicron" / "train" / "session" / "session.py").read_text())
    [session] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Session"]
    methods = [node for node in session.body if isinstance(node, ast.FunctionDef)]
    public = {node.name for node in methods if not node.name.startswith("_")}
    arguments = {each.arg for node in methods if node.name == "__init__" for each in node.args.kwonlyargs}
    named = set(re.findall(r"\w+", " ".join(SPAN.findall(text))))
    assert (public | arguments) - named == set()


def test_the_task_files_of_the_pages_can_be_submitted():
    texts = [text for page in PAGES for text in blocks(page, "yaml") if text.startswith("name:")]
    assert len(texts) >= 3
    for text in texts:
        assert taskfile.parse(text, Path("task.yaml")).warnings == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_the_pages_is_python(page):
    for text in blocks(page, "python"):
        compile(text, name_of(page), "exec")


def changes():
    """Return each script of the page before and after it got a session: two blocks first, then one with both each."""
    yield [text for text in blocks(SESSION, "python") if text.startswith("import torch\n")]
    for text in blocks(SESSION, "diff"):
        lines = text.splitlines(keepends=True)
        yield ["".join(line[1:] or line for line in lines if line[0] in f"{side} \n") for side in "-+"]


@pytest.mark.parametrize("at", range(3))
def test_a_script_trains_after_the_change_to_what_it_trained_to_before(at, tmp_path):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    printed = []
    for name, text in zip(("before", "after"), [*changes()][at], strict=True):
        path = tmp_path / f"{name}.py"
        path.write_text(text.replace("SIZE = 200,", "SIZE = 12,").replace("RANKS = 5, 8, 2", "RANKS = 5, 8, 1"))
        code, written = standby.run(path, **alone)
        assert code == 0, written
        printed.append([line for line in written.splitlines() if " loss " in line])
    before, after = [[float(line.split()[-1]) for line in lines] for lines in printed]
    assert len(after) == len(before) >= 5
    assert after[-1] < after[0]
    if at:  # else data is drawn, from other seeds than before
        assert after == pytest.approx(before, abs=2e-4)


def test_the_tables_of_settings_are_what_the_classes_say():
    spec = importlib.util.spec_from_file_location("docs_settings", ROOT / "docs" / "settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in module.PAGES:
        assert (REFERENCE / f"{name}.md").read_text() == module.page(name), "run: .venv/bin/python docs/settings.py"
    assert "| `UNICRON_SLOTS` | `--slots` | `0` |" in module.page("settings")


def test_nobody_is_told_to_install_what_somebody_else_may_publish():
    tools = (
        ROOT / each for each in ("agent", "benchmarks", "chaos", "cli", "deploy", "services", "simulator", "unicron")
    )
    texts = [*PAGES, *(path for tool in tools for path in tool.rglob("*.py"))]
    told = re.compile(r"pip install (-\S+ )*['\"]?unicron\b")
    assert [name_of(path) for path in texts if told.search(path.read_text())] == []

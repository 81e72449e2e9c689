"""The files of a program that are instrumented, and their instrumented loops."""

import importlib
import sys
from pathlib import Path

import pytest

from unicron.contracts.worker import CODE
from unicron.train.carry.variables import NAME
from unicron.train.loops import instrument, trees
from unicron.train.loops import program as program_module
from unicron.train.loops.program import InstrumentingFinder, ScriptProgram, locate_module

FILES = {
    "train.py": "from tools import engine\nimport plain\nfor epoch in range(2):\n    engine.one_epoch(epoch)\n",
    "tools/__init__.py": "",
    "tools/engine.py": "from .steps import step\ndef one_epoch(_):\n    for batch in range(3):\n        step(batch)\n",
    "tools/steps.py": "def step(batch):\n    loss.backward()\ndef other():\n    iter([1])\nother()\n",
    "plain.py": "class Meter:\n    pass\n",
    "unused.py": "def one_epoch(epoch):\n    pass\nthis is no Python",
    "venv/lib/site-packages/other.py": "for each in x:\n    loss.backward()\n",
}


class Noting:
    def __init__(self):
        self.heads = []

    begun = True

    def hand_out_items(self, place, iterable, numbered, certain):
        return iter(iterable)

    def at_head(self, place, *_):
        self.heads.append(place)

    def __getattr__(self, name):
        return lambda *_: True


@pytest.fixture
def program(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    loops, made = Noting(), ScriptProgram(tmp_path, tmp_path / "train.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [InstrumentingFinder(made, loops), *sys.meta_path])
    for name in ("tools", "tools.engine", "tools.steps", "plain", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield made, loops
    for name in ("tools", "tools.engine", "tools.steps", "plain", "other"):
        sys.modules.pop(name, None)


def test_loops_of_all_files_say_where_they_are_though_the_backward_pass_is_in_another(program, tmp_path):
    made, loops = program
    steps = importlib.import_module("tools.steps")
    steps.loss = type("Loss", (), {"backward": staticmethod(lambda: None)})
    variables = {NAME: loops, "__name__": "__main__"}
    exec(made.compile_file((tmp_path / "train.py").read_bytes(), tmp_path / "train.py"), variables)
    assert loops.heads == ["train.py:3", *["tools/engine.py:3"] * 3] * 2


def test_a_later_process_has_what_was_made_of_files_and_nothing_of_what_has_changed(program, tmp_path, monkeypatch):
    monkeypatch.setenv(CODE, str(tmp_path / "code"))
    parsed, (first, steps) = [], (tmp_path / "train.py", tmp_path / "tools/steps.py")
    for module in (program_module, instrument):
        monkeypatch.setattr(module, "parse", lambda source, path: parsed.append(path) or trees.parse(source, path))

    def made():
        parsed.clear()
        code = ScriptProgram(tmp_path, first).compile_file(first.read_bytes(), first)
        return code, {Path(each).name for each in parsed}

    (code, _), (again, looked_at) = made(), made()
    assert looked_at == set()
    assert (again == code) is True, "the same"
    steps.write_text(steps.read_text().replace("backward", "forward"))
    changed, looked_at = made()
    assert looked_at == {"steps.py", "train.py"}, "the one, and what trained by it"
    assert (changed != code) is True
    for each in (tmp_path / "code").iterdir():
        each.write_bytes(each.read_bytes()[:9])
    assert (made()[0] == changed) is True, "what is cut off is made anew"


def test_files_of_other_folders_are_left_alone(program, tmp_path, monkeypatch):
    made, _ = program
    monkeypatch.syspath_prepend(tmp_path / "venv/lib/site-packages")
    other = importlib.util.find_spec("other")
    assert type(other.loader).__module__ != "unicron.train.loops.program"
    assert not made.owns(Path(other.origin))


def test_a_script_that_lies_above_all_else_has_no_librarys_files():
    program = ScriptProgram(Path("/"), Path("/train.py"))
    for library in ("json", "unicron.codec", "torch"):
        assert not program.owns(Path(importlib.util.find_spec(library).origin).resolve())


def test_a_program_that_was_installed_has_the_files_of_its_own_package(tmp_path, monkeypatch):
    folder = tmp_path / "lib/python3/site-packages"
    for name in ("trains/__init__.py", "trains/deep/main.py", "trains/engine.py", "library.py", "alone.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = "import library\nfrom trains import engine\nraise ImportError('it is not to be run')"
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    where = folder.resolve()
    assert locate_module("trains.deep.main") == (where, where / "trains/deep/main.py")
    assert locate_module("trains.deep") == (where, where / "trains/deep/__main__.py")
    assert locate_module("alone") == (where, where / "alone.py")
    program = ScriptProgram(*locate_module("trains.deep.main"))
    assert program.owns(where / "trains/engine.py")
    assert not program.owns(where / "library.py")
    assert not ScriptProgram(*locate_module("alone")).owns(where / "library.py")

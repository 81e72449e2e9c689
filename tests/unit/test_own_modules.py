"""What a process of the cluster imports, and what a script does, in a folder with modules of the same names."""

import os
import subprocess
import sys

from unicron.own_modules import forget_others

LOOKS = """
import os
from unicron.own_modules import find_own_first
find_own_first()
import pynvml, secrets, their_own
print(pynvml.__file__, secrets.__file__, their_own.__file__, os.environ["PYTHONPATH"], sep="|")
"""


def test_a_process_finds_what_it_was_installed_with_first_and_what_is_a_users_last(tmp_path):
    folder, path = tmp_path / "folder", tmp_path / "path"
    for place, names in ((folder, ("secrets", "their_own")), (path, ("pynvml", "their_own"))):
        place.mkdir()
        for name in names:
            (place / f"{name}.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(path)}
    asked = [sys.executable, "-c", LOOKS]
    told = subprocess.run(asked, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    pynvml, secrets, own, given = told.strip().split("|")
    assert str(tmp_path) not in pynvml + secrets
    assert own == f"{folder}/their_own.py", "in their order"
    assert given == str(path)


def test_a_script_has_the_modules_of_its_folder_though_others_of_their_names_were_imported(tmp_path, monkeypatch):
    modules = {name: type(sys)(name) for name in ("alone", "kept", "package", "torch", "other")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("alone", "kept", "torch", "not_imported"):
        (tmp_path / f"{name}.py").touch()
    for name in ("package", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    forget_others(str(tmp_path), frozenset({"kept"}))
    assert [name for name in modules if name not in sys.modules] == ["alone", "package"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    import alone  # noqa: PLC0415 the one of the folder

    forget_others(str(tmp_path), frozenset())
    assert sys.modules["alone"] is alone
    forget_others(str(tmp_path / "gone"), frozenset())

"""One distribution, small images: what the package declares, installs and imports agrees with itself."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ROOMS = {
    "unicron_registry": [],
    "unicron_detector": ["detector"],
    "unicron_planner": ["planner"],
    "unicron_transition": [],
    "unicron_straggler": ["straggler"],
    "unicron_console": ["web", "otel"],
    "unicron_notifier": ["notifier"],
    "unicron_agent": ["agent", "train"],
    "unicron_simulator": ["planner", "train", "console"],
    "unicron_deploy": ["console"],
    "unicron_chaos": ["console"],
    "unicron.train": ["train", "megatron", "hf", "lightning"],
    "unicron.costmodel": ["planner"],
    "unicron.storage": ["storage"],
    "unicron_cli": ["console"],
    "unicron_convert": [],
    "unicron_goodput": [],
    "unicron_narration": [],
    "unicron_taskfile": ["console"],
}
"""Packages, and the extras with which they must work."""

IMAGES = {
    "control": [
        "unicron_registry",
        "unicron_detector",
        "unicron_transition",
        "unicron_straggler",
        "unicron_notifier",
        "unicron_console",
    ],
    "planner": ["unicron_planner"],
    "node": ["unicron_agent"],
}
"""The images, and the packages that run in them."""

IMPORT_ALL = """
import importlib, json, pkgutil, re, sys
from importlib.machinery import PathFinder

room, hidden, allowed = sys.argv[1], set(json.loads(sys.argv[2])), set(json.loads(sys.argv[3]))

class Hide(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

    # some look whether a distribution is there before they import it
    @classmethod
    def find_distributions(cls, *context):
        return (
            each for each in super().find_distributions(*context)
            if re.sub("[-_.]+", "-", each.name).lower() in allowed
        )

sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
package = importlib.import_module(room)
for module in pkgutil.walk_packages(package.__path__, room + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
"""Imports every module of a package as if some others were not installed."""


def closure(extras: list[str]) -> set[str]:
    """Return the names of all distributions that `pip install unicron[extras]` brings on this machine."""
    found: set[str] = set()
    waiting = [Requirement(f"unicron[{','.join(extras)}]")]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            chosen = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
            wanted = needed.marker is None or any(needed.marker.evaluate(each) for each in chosen)
            if wanted and not (canonicalize_name(needed.name) in found and not needed.extras):
                waiting.append(needed)
    return found


def pins() -> dict[str, str]:
    """Return the versions in constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.exhaustive("an interpreter for each package, of what import-linter and the locks show")
@pytest.mark.parametrize("room", ROOMS)
def test_each_package_imports_with_its_own_extras_alone(room):
    allowed = closure(ROOMS[room])
    owners = importlib.metadata.packages_distributions()
    # setuptools, which torch needs, has packages of its own inside, and makes them visible where it is imported
    allowed |= {
        canonicalize_name(each.name)
        for each in importlib.metadata.distributions()
        if "_vendor" in str(each.locate_file(""))
    }
    hidden = [top for top, names in owners.items() if not {canonicalize_name(name) for name in names} & allowed]
    assert "torch" in hidden or "torch" in allowed
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, room, json.dumps(hidden), json.dumps(sorted(allowed))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_only_the_node_has_torch():
    assert "torch" not in closure(["planner", "detector", "console"])
    assert "torch" in closure(["agent"])


def test_dev_has_every_extra():
    extras = {extra for text in EXTRAS["dev"] for extra in Requirement(text).extras}
    assert extras == set(EXTRAS) - {"dev"}


def test_constraints_are_plain_versions_each_once():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(pins()) == len(lines), "a package stands there twice"
    assert "torch==2.13.0" in lines


def test_constraints_pin_everything_that_setup_installs():
    needed = closure(["dev"]) - {"unicron"}
    assert needed - set(pins()) == set()
    different = {
        name: (importlib.metadata.version(name), pins()[name])
        for name in needed
        if importlib.metadata.version(name).partition("+")[0] != pins()[name]
    }
    assert different == {}


def test_every_package_is_in_the_wheel_and_in_every_list():
    folders = sorted(
        str(path.parent.relative_to(ROOT))
        for parent in ("services/*", "agent", "cli", "deploy", "chaos", "simulator")
        for path in ROOT.glob(f"{parent}/unicron_*/__init__.py")
    )
    roots = sorted({str(Path(folder).parent) for folder in folders})
    build = PROJECT["tool"]["hatch"]["build"]
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(["unicron", *folders])
    assert sorted(build["dev-mode-dirs"]) == sorted([".", *roots])
    assert sorted(PROJECT["tool"]["mypy"]["mypy_path"].split(":")) == sorted(
        ["$MYPY_CONFIG_FILE_DIR", *(f"$MYPY_CONFIG_FILE_DIR/{root}" for root in roots)]
    )
    names = {"unicron", *(Path(folder).name for folder in folders)}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == names
    assert set(ROOMS) >= names - {"unicron"}


def test_the_editable_install_is_one_pth():
    files = importlib.metadata.distribution("unicron").files or []
    (pth,) = [file for file in files if file.suffix == ".pth"]
    listed = {Path(line).resolve() for line in Path(str(pth.locate())).read_text().split()}
    assert listed == {(ROOT / folder).resolve() for folder in PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]}


def locked(image: str) -> dict[str, str]:
    """Return the versions that an image is made of by name; each has hashes."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "deploy" / "lock" / f"{image}.txt").read_text().rstrip("\n")):
        first, *hashes = entry.split(" \\\n")
        name, _, version = first.partition("==")
        assert hashes, f"{name} has no hash in the lock of {image}"
        assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}", each) for each in hashes), entry
        found[canonicalize_name(name)] = version
    return found


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the images have Python 3.11, which needs other packages")
@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_holds_what_the_services_of_its_image_need(image):
    extras = {extra for room in IMAGES[image] for extra in ROOMS[room]} | {"metrics"}
    extras |= {"keys"} if image == "control" else set()
    needed = closure(sorted(extras)) - {"unicron", "torch"}
    assert locked(image) == {name: pins()[name] for name in needed}, "run `make lock`"


def test_the_lock_of_what_builds_holds_versions_of_the_constraints():
    assert {"hatchling", "setuptools"} <= set(locked("build"))
    assert locked("build").items() <= pins().items(), "run `make lock`"


def services() -> dict[str, dict]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def test_each_service_runs_in_an_image_with_its_packages():
    runs = {
        (command[2], service["image"].removeprefix("unicron-"))
        for service in services().values()
        if (command := service.get("command", []))[1:2] == ["-m"]
    }
    agents = {service["image"] for name, service in services().items() if name.startswith("node-")}
    assert agents == {"unicron-node"}
    assert runs == {(room, image) for image, rooms in IMAGES.items() if image != "node" for room in rooms}


def test_each_container_is_confined():
    for name, service in services().items():
        confined = [
            service["read_only"],
            service["cap_drop"],
            service["security_opt"],
            set(service["logging"]["options"]),
        ]
        assert confined == [True, ["ALL"], ["no-new-privileges:true"], {"max-size", "max-file"}], name
    more = {name: service["cap_add"] for name, service in services().items() if "cap_add" in service}
    assert more == {"keys": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
    assert services()["keys"]["network_mode"] == "none"


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    # not as a part of the make that may run these tests
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL"}}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_make_says_which_python_it_needs(tmp_path):
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(tmp_path, "demo", f"PYTHON={old} no-such-python")
    assert done.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert f"{old} no-such-python" in done.stderr
    assert "make demo PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_demo_passes_its_options_on(tmp_path):
    plain = make(tmp_path, "-n", "demo").stdout.splitlines()[-1].split()
    assert plain == [".venv/bin/unicron", "demo"]
    given = make(tmp_path, "-n", "demo", "JSON=report.json", "CORPUS=texts").stdout.splitlines()[-1].split()
    assert given == [".venv/bin/unicron", "demo", "--json", "report.json", "--corpus", "texts"]

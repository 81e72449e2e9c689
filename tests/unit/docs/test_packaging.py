"""One distribution, small images: what the package declares, installs and imports agrees with itself."""

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from unicron_deploy.keys import Keyring

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ROOMS = {
    "unicron_registry": [],
    "unicron_detector": ["detector"],
    "unicron_planner": ["planner"],
    "unicron_transition": [],
    "unicron_straggler": ["straggler"],
    "unicron_console": ["web", "otel"],
    "unicron_provisioner": ["docker"],
    "unicron_notifier": ["notifier"],
    "unicron_agent": ["agent", "train"],
    "unicron_simulator": ["planner", "train", "console"],
    "unicron_deploy": ["console"],
    "unicron_chaos": ["console"],
    "unicron.train": ["train", "megatron", "hf", "lightning"],
    "unicron.costmodel": ["planner"],
    "unicron.snapshots.storage": ["storage"],
    "unicron_cli": ["console"],
    "unicron.observe": [],
    "unicron.taskfile": ["console"],
}
"""Packages, and the extras with which they must work."""

CONTROL = ("registry", "detector", "transition", "straggler", "notifier", "provisioner", "console")
IMAGES = {
    "control": [f"unicron_{service}" for service in CONTROL],
    "planner": ["unicron_planner"],
    "node": ["unicron_agent"],
}
"""The images, and the packages that run in them."""

FOLDERS = [ROOT / folder for folder in PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]


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


def file_of(module: str) -> Path | None:
    """Return the file of a module, if it is one of ours."""
    path = module.replace(".", "/")
    files = (folder / name for folder in FOLDERS for name in (f"{path}.py", f"{path}/__init__.py"))
    return next((file for file in files if file.is_file()), None)


def imported(node: ast.AST) -> Iterator[str]:
    """Yield what is imported as a module is: not in functions, nor for types, nor where it may be missing."""
    match node:
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield module
            yield from (f"{module}.{each.name}" for each in names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Try(handlers=handlers) if any("ImportError" in ast.unparse(each) for each in handlers):
            return
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


@functools.cache
def imports(module: str) -> set[str]:
    file = file_of(module)
    found = set(imported(ast.parse(file.read_text()))) if file else set()
    return found | {module.rpartition(".")[0]} - {""}  # packages are imported before what is in them


def needed_by(room: str) -> set[str]:
    """Return what of others is imported with any module of a package."""
    folder, seen = (file_of(room) or ROOT).parent, set()
    inside = [file.relative_to(folder).with_suffix("").parts for file in folder.rglob("*.py")]
    waiting = {".".join([room, *parts]).removesuffix(".__init__") for parts in inside if parts[-1] != "__main__"}
    while waiting:
        seen |= waiting
        waiting = {each for name in waiting if file_of(name) for each in imports(name)} - seen
    return {name.partition(".")[0] for name in seen if not file_of(name.partition(".")[0])} - sys.stdlib_module_names


@functools.cache
def distributions() -> dict[str, list[str]]:
    """Return the names of the distributions that bring each package."""
    return dict(importlib.metadata.packages_distributions())


@pytest.mark.xdist_group("distributions")  # which are read once, in 5 s
@pytest.mark.parametrize("room", ROOMS)
def test_each_package_imports_with_its_own_extras_alone(room):
    allowed, owners = closure(ROOMS[room]), distributions()
    missing = {top for top in needed_by(room) if not {canonicalize_name(name) for name in owners[top]} & allowed}
    assert missing == set()


def test_only_the_node_has_torch():
    assert "torch" not in closure(["planner", "detector", "console"])
    assert "torch" in closure(["agent"])


def test_dev_has_every_extra():
    extras = {extra for text in EXTRAS["dev"] + EXTRAS["user"] for extra in Requirement(text).extras}
    assert extras == set(EXTRAS) - {"dev"}


def test_constraints_are_plain_versions_each_once():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(pins()) == len(lines), "a package stands there twice"
    assert "torch==2.13.0" in lines


def test_constraints_pin_everything_that_setup_installs():
    needed = closure(["dev"]) - {"unicron"}
    assert needed - set(pins()) == set()
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in needed}
    assert installed == {name: pins()[name] for name in needed}


def test_every_package_is_in_the_wheel_and_in_every_list():
    folders = sorted(
        str(path.parent.relative_to(ROOT))
        for parent in ("services/*", "agent", "cli", "deploy", "chaos", "simulator")
        for path in ROOT.glob(f"{parent}/unicron_*/__init__.py")
    )
    roots = sorted({str(Path(folder).parent) for folder in folders})
    build, checked = PROJECT["tool"]["hatch"]["build"], PROJECT["tool"]["mypy"]["mypy_path"].split(":")
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(["unicron", *folders])
    assert sorted(build["dev-mode-dirs"]) == sorted([".", *roots])
    assert sorted(checked) == ["$MYPY_CONFIG_FILE_DIR", *(f"$MYPY_CONFIG_FILE_DIR/{root}" for root in roots)]
    names = {"unicron", *(Path(folder).name for folder in folders)}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == names
    assert set(ROOMS) >= names - {"unicron"}


def test_the_editable_install_is_one_pth():
    files = importlib.metadata.distribution("unicron").files or []
    (pth,) = [file for file in files if file.suffix == ".pth"]
    listed = {Path(line).resolve() for line in Path(str(pth.locate())).read_text().split()}
    assert listed == {folder.resolve() for folder in FOLDERS}


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
    rooms = {(room, image) for image, rooms in IMAGES.items() if image != "node" for room in rooms}
    assert runs == rooms | {("unicron_deploy.enrolment", "control")}


def test_each_container_is_confined():
    for name, service in services().items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
    more = {name: service["cap_add"] for name, service in services().items() if "cap_add" in service}
    assert more == {"keys": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
    assert services()["keys"]["network_mode"] == "none"


def test_who_has_a_right_on_the_engine_or_sees_more_than_its_own_key_is_asked_for_by_name():
    mounts = {
        name: [volume.split(":")[0] for volume in service.get("volumes", []) if ":" in volume]
        for name, service in services().items()
    }
    assert [name for name, sources in mounts.items() if any("docker.sock" in each for each in sources)] == [
        "provisioner"
    ]
    assert services()["provisioner"]["profiles"] == ["pools"]
    several = {name for name, sources in mounts.items() if sum(each.startswith("key-") for each in sources) > 1}
    assert several == {"keys", "enroller"}
    assert services()["enroller"]["profiles"] == ["enrol"]
    written = [each.split(":")[1] for each in services()["enroller"]["volumes"] if not each.endswith(":ro")]
    assert written == ["/keys", "/keys/server", "/keys/enroller"]


def test_all_nodes_write_checkpoints_to_one_volume_that_is_given_to_their_user():
    pools = tomllib.loads((ROOT / "deploy/pools/pools.toml").read_text())["pool"]
    mounts = {name: each["docker"]["volumes"] for name, each in pools.items()}
    mounts |= {name: each["volumes"] for name, each in services().items() if name.startswith("node-")}
    found = {name: [each for each in there if ":/checkpoints" in each] for name, there in mounts.items()}
    assert len(found) >= 4
    assert {name: len(there) for name, there in found.items()} == dict.fromkeys(found, 1)
    sources = {there[0].removeprefix("unicron_").partition(":")[0] for there in found.values()}
    assert [f"{source}:/stores/{source}" in services()["keys"]["volumes"] for source in sources] == [True]


def test_each_folder_of_keys_is_a_volume_that_their_container_may_write(tmp_path):
    keyring = Keyring(tmp_path)
    nodes = [word for word in services()["keys"]["entrypoint"] if word.startswith("box-")]
    keyring.ensure([*services()["keys"]["command"], *nodes], enrols="--enrol" in services()["keys"]["entrypoint"])
    keyring.certify(["nats"])
    volumes = dict(volume.split(":") for volume in services()["keys"]["volumes"])
    made = {f"/keys/{path.name}" for path in tmp_path.iterdir()}
    assert {path for name, path in volumes.items() if name.startswith("key-")} == made


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

"""Gather what an image holds besides its Python packages: an interpreter, the libraries that it and they are linked to.

Run where an image is built, as `python deploy/image.py ENVIRONMENT TREE`. ENVIRONMENT is the virtual environment with
the packages, which is made smaller in its place; TREE becomes the root of the image. There is no shell, no package
manager and no compiler in either.
"""

import compileall
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path
from py_compile import PycInvalidationMode

UID = 10001
"""Who the processes run as, and who owns what they write."""

WRITABLE = ("home/unicron", "run/unicron", "var/cache/unicron")
"""Where they write, besides /tmp."""

NOT_AT_RUN_TIME = (
    "**/tests",
    "torch/test",
    "torch/include",
    "torch/share",
    "torch/bin/[!t]*",
    "torch/bin/test*",
    "torch/lib/*test*",
    "numpy/_core/include",
    "**/*.[ach]",
    "**/*.cpp",
    "**/*.p[xy][dxi]",
)
"""Of the packages: tests, and what only compilers and type checkers read."""

NOT_OF_THE_LIBRARY = shutil.ignore_patterns(
    "__pycache__", "config-*", "dist-packages", "site-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "test", "tests", "tkinter", "turtle*", "venv", "_test*", "_ctypes_test*", "xx*", "_tkinter*", "_curses*",
    "readline*", "_dbm*", "_gdbm*", "nis.*", "*.exe",
)  # fmt: skip
"""Of the standard library: what installs, edits, draws or tests."""


def prune(packages: Path) -> None:
    """Remove from a folder of packages what nothing needs at run time."""
    for pattern in NOT_AT_RUN_TIME:
        for path in [*packages.glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for path in packages.rglob("*.so*"):
        strip(path)


def strip(path: Path) -> None:
    """Cut off what stands behind the last segment of a shared object: tables that only linkers and debuggers read.

    A fifth of torch's is such; the image that this runs in has no tool for it.
    """
    with path.open("r+b") as file:
        header = bytearray(file.read(64))
        if header[:6] != b"\x7fELF\x02\x01":  # of 64 bits, the lower bytes first
            return
        (start,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        file.seek(start)
        segments = [struct.unpack("<IIQQQQ", file.read(size)[:40]) for _ in range(count)]
        end = max(offset + length for _, _, offset, _, _, length in segments)
        struct.pack_into("<Q", header, 40, 0)  # there is no table of sections any more,
        struct.pack_into("<HH", header, 60, 0, 0)  # of no length
        file.seek(0)
        file.write(header)
        file.truncate(max(end, start + size * count))


def library(tree: Path) -> Path:
    """Copy the standard library, and return where it is in the image."""
    source = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    copy = tree / source.relative_to("/")
    shutil.copytree(source, copy, ignore=NOT_OF_THE_LIBRARY, ignore_dangling_symlinks=True)
    return copy


def linked(files: list[Path]) -> set[Path]:
    """Return the system's libraries that these files are linked to, directly or not."""
    said = subprocess.run(["ldd", *files], stdout=subprocess.PIPE, text=True, check=False).stdout  # noqa: S607
    found = {Path(path) for path in re.findall(r"^\t(?:.* => )?(/\S+) \(0x", said, re.MULTILINE)}
    return {path.parent.resolve() / path.name for path in found}


def copy_libraries(tree: Path, folders: list[Path], more: list[Path]) -> list[Path]:
    """Copy what the shared objects in `folders`, and `more`, are linked to; return where it was."""
    objects = [path for folder in folders for path in folder.rglob("*.so*") if path.is_file()]
    outside = [path for path in linked([*objects, *more]) if not any(path.is_relative_to(each) for each in folders)]
    for path in outside:
        to = tree / path.relative_to("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    return outside


def describe(tree: Path, files: list[Path]) -> None:
    """Say in the image which packages of Debian these files are of, where scanners look for it, with their licences."""
    # in its lists a library is where it was before /lib became a link
    asked = [*files, *(Path("/") / path.relative_to("/usr") for path in files if path.is_relative_to("/usr"))]
    said = subprocess.run(["dpkg-query", "-S", *asked], capture_output=True, text=True, check=False).stdout  # noqa: S607
    for name in {line.partition(":")[0] for line in said.splitlines()}:
        status = tree / "var/lib/dpkg/status.d" / name
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_bytes(subprocess.check_output(["dpkg-query", "-s", name]))  # noqa: S607
        licence = Path("usr/share/doc") / name / "copyright"
        (tree / licence).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path("/") / licence, tree / licence)


def system(tree: Path, folders: set[Path]) -> None:
    """Write the few files that every process expects, with where libraries are, and make the folders to write to."""
    for name in ("lib", "lib64", "bin"):
        if (Path("/") / name).is_symlink():
            (tree / name).symlink_to((Path("/") / name).readlink())
    for name in ("ssl/certs/ca-certificates.crt", "os-release", "debian_version"):
        (tree / "etc" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path("/etc") / name, tree / "etc" / name)
    (tree / "etc/passwd").write_text(
        f"root:x:0:0:root:/:/nologin\nunicron:x:{UID}:{UID}:unicron:/home/unicron:/nologin\n"
    )
    (tree / "etc/group").write_text(f"root:x:0:\nunicron:x:{UID}:\n")
    (tree / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in sorted(folders)))
    (tree / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (tree / "tmp").mkdir(mode=0o1777)
    (tree / "tmp").chmod(0o1777)
    for name in WRITABLE:
        (tree / name).mkdir(parents=True)
        shutil.chown(tree / name, UID, UID)
    subprocess.check_call(["ldconfig", "-r", tree])  # noqa: S607


def main() -> None:
    """Do it, and compile all modules once, for good."""
    environment, tree = (Path(word) for word in sys.argv[1:])
    (packages,) = environment.glob("lib/python*/site-packages")
    prune(packages)
    interpreter = Path(sys.executable).resolve()
    copied = library(tree)
    to = tree / interpreter.relative_to("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(interpreter, to)
    for path in (environment / "bin").iterdir():  # scripts for shells, and of packages
        path.unlink()
    (environment / "bin/python").symlink_to(interpreter)
    shutil.rmtree(packages / "bin", ignore_errors=True)
    libraries = copy_libraries(tree, [packages, copied], [interpreter])
    describe(tree, [interpreter, *libraries])
    system(tree, {path.parent for path in libraries})
    for folder in (packages, copied):
        compileall.compile_dir(
            folder,
            quiet=2,
            workers=os.cpu_count() or 1,
            stripdir=str(tree),
            invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        )


if __name__ == "__main__":
    main()

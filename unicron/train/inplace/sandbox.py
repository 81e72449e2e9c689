"""Confines a process by Linux's Landlock: it writes to no file outside of some folders, and connects to nobody.

It needs no rights, can't be undone, and holds for all that the process starts
(https://docs.kernel.org/userspace-api/landlock.html). Where the kernel has none, nothing is confined.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

CREATE, ADD_RULE, RESTRICT = 444, 445, 446
"""Numbers of the system calls, the same on all processors."""

VERSION = 1
RULE_PATH = 1
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
CHANGES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""To write to a file, and to make and remove files and folders of all kinds."""

REFER, REFER_SINCE, TRUNCATE_SINCE, NETWORK_SINCE = 1 << 13, 2, 3, 4
BIND, CONNECT = 1, 2
NO_NEW_PRIVILEGES = 38


def confine_writes(folders: Iterable[Path]) -> bool:
    """Have this thread, and what it starts, write to files in these folders only; return whether the kernel does."""
    version = _version()
    if version < 1:
        return False
    handled = CHANGES | (REFER if version >= REFER_SINCE else 0) | (TRUNCATE if version >= TRUNCATE_SINCE else 0)
    rules = _ruleset(handled, 0)
    try:
        for folder in folders:
            _allow(rules, handled, folder)
        return _restrict(rules)
    finally:
        os.close(rules)


def confine_connections() -> bool:
    """Have this thread, and what it starts, neither connect to nor listen on TCP from now on; return whether so."""
    if _version() < NETWORK_SINCE:
        return False
    rules = _ruleset(0, BIND | CONNECT)
    try:
        return _restrict(rules)
    finally:
        os.close(rules)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def _version() -> int:
    return _call(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION))


def _ruleset(files: int, network: int) -> int:
    attributes = struct.pack("=QQ", files, network) if network else struct.pack("=Q", files)
    return _call(CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))


def _allow(rules: int, access: int, path: Path) -> None:
    if not path.exists():
        return
    access &= ~0 if path.is_dir() else WRITE_FILE | TRUNCATE
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _call(ADD_RULE, rules, RULE_PATH, struct.pack("=Qi", access, opened), ctypes.c_uint32(0))
    finally:
        os.close(opened)


def _restrict(rules: int) -> bool:
    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return _call(RESTRICT, rules, ctypes.c_uint32(0)) == 0

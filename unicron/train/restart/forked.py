"""Makes a forked process like one whose interpreter has just started."""

import os
import random
import sys
import time
from collections.abc import Sequence


def begin_anew(argv: Sequence[str], cwd: str) -> None:
    """Take from the environment what an interpreter takes from it as it starts, and seed what it seeds by chance.

    Args:
        argv: the script and its arguments.
        cwd: folder in which it is started.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    users = {os.path.normpath(os.path.join(cwd, each)): None for each in named if each}  # noqa: PTH118 as Python does
    sys.path[:] = [*users, *(each for each in sys.path if each not in users)]
    sys.orig_argv[:] = [sys.executable, *argv]
    time.tzset()
    seed_anew()


def seed_anew() -> None:
    """Have generators that an interpreter seeds by chance be so seeded: else all that were forked draw the same.

    That of torch is not: it begins with the same number everywhere.
    """
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()

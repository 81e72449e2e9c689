"""Makes a forked process like one whose interpreter has just started."""

import random
import sys


def seed_anew() -> None:
    """Have generators that an interpreter seeds by chance be so seeded: else all that were forked draw the same.

    That of torch is not: it begins with the same number everywhere.
    """
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()

"""How the standby runs a worker whose script is healed in place."""

import os
from collections.abc import Callable
from typing import Any

from unicron.train.inplace import run
from unicron.train.inplace.ghost import report_failure
from unicron.train.inplace.seed import GHOST, plant_if_due
from unicron.train.worker import channel


def launch(request: dict[str, Any], run_script: Callable[..., int]) -> int:
    """Run a script in place; return its exit code."""
    is_ghost = GHOST in os.environ
    seed = None if is_ghost else plant_if_due(lambda: launch(request, run_script))
    execute_as_is = run.execute_module if request["module"] else run.execute

    def execute(what: str) -> object:
        try:
            return execute_as_is(channel.connect(), what, seed)
        except SystemExit as ending:
            if is_ghost and ending.code and isinstance(ending.__context__, Exception):
                report_failure(ending.__context__)  # as hydra and others end, with a word of their own
            raise
        except BaseException as error:
            if is_ghost:
                report_failure(error)
            raise

    return run_script(request, execute)

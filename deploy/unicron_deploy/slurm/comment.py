"""The comment of a job, in which `squeue -o "%i %j %T %k"` shows what its task does."""

from collections.abc import Callable

from unicron.contracts.answers import TaskView
from unicron.contracts.tasks import TaskState
from unicron.printable import one_line
from unicron.slurm import tools

MARK = "unicron "
"""How a comment begins that is ours."""

MOST = 200


def state_of(view: TaskView) -> str:
    """Return what a task does, in words that change as rarely as its workers do: each change is a call to Slurm."""
    if view.state == TaskState.WAITING and view.reason:
        return f"{view.spec.name}: waiting: {view.reason}"
    return f"{view.spec.name}: {view.state}, {len(view.members)} of {view.spec.max_workers} workers"


class Comment:
    """Changes the comment of a job, unless it is somebody else's.

    Args:
        job: its number.
        log: shows a line to a person.
        ours: whether it is, whatever it says; None: as it looks.
    """

    def __init__(self, job: str, log: Callable[[str], None], *, ours: bool | None = None) -> None:
        self._job, self._log = job, log
        self._said = ""
        self._ours = ours

    def see(self, comment: str) -> None:
        """Take note of what it is: what a user has given stays."""
        self._ours = self._ours is not False and (not comment or comment.startswith(MARK))

    def say(self, text: str) -> None:
        """Have it say something, where that is new. Blocks."""
        text = MARK + one_line(text)[:MOST]
        if not self._ours or text == self._said:
            return
        self._said = text
        try:
            tools.run(["scontrol", "update", f"JobId={self._job}", f"Comment={text}"])
        except tools.UnreachableError:
            self._said = ""  # and is tried again
        except tools.SlurmError as error:  # a comment is for people: nothing depends on it
            self._ours = False
            self._log(f"unicron: job {self._job} keeps its comment: {error}")

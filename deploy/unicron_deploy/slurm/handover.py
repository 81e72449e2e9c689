"""The end of a job: what its folder keeps for the next one, who that is, and what Slurm is told.

Slurm takes any exit status but 0 for a failure, and mails it. A hand-over that somebody takes up is none; where nobody
does, the user has to hear of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from unicron.errors import UnicronError
from unicron.slurm import tools
from unicron_deploy.slurm import outcome as outcomes
from unicron_deploy.slurm import queue
from unicron_deploy.slurm.allocation import Allocation
from unicron_deploy.slurm.comment import Comment
from unicron_deploy.slurm.outcome import FINISHED, Outcome
from unicron_deploy.slurm.ownership import Claim


class Ending(NamedTuple):
    """A job that is over.

    Attributes:
        task: its name.
        until_done: the job is requeued as long as its task is not done and comes further.
        log: shows a line to a person.
    """

    allocation: Allocation
    claim: Claim
    task: str
    until_done: bool
    comment: Comment
    log: Callable[[str], None]

    def tell(self, ended: Outcome) -> int:
        """Keep how the job ended, have it requeued or find who goes on; return its exit status."""
        outcomes.write(self.claim.root, ended)
        if not ended.unfinished:
            self._say(ended.status, f"{ended.reason}")
            self.comment.say(f"{self.task}: {'finished' if ended.status == FINISHED else f'failed: {ended.reason}'}")
            return ended.status
        cancelled = False
        try:
            jobs = queue.own_jobs()
            own = queue.this_job(jobs, self.allocation)
            cancelled = own.state != "RUNNING"
            if cancelled and queue.restarts(self.allocation.job) > self.allocation.restarts:
                return self._leave_to(ended, self.allocation.job, "Slurm has requeued this job, which goes on with it")
            heir = queue.heir(jobs, own)
            goes_on = self.until_done or (ended.lacks_nodes and not heir)
            if goes_on and not cancelled and self._requeue(ended):
                return FINISHED
        except UnicronError as error:
            self.log(f"unicron: Slurm does not say whether a job waits to go on with {self.task}: {error}")
            heir = ""
        if heir:
            return self._leave_to(ended, heir, f"job {heir} goes on with it")
        outcomes.write(self.claim.root, ended)
        cure = "submit it again" + " (with --until-done a job requeues itself at its limit)" * (
            not (self.until_done or cancelled or ended.lacks_nodes)
        )
        self._say(ended.status, f"{ended.reason}; {self.task} is not done and no job waits to go on with it: {cure}")
        if not cancelled:  # else nobody may change that of the job any more
            self.comment.say(f"{self.task}: not done, submit it again")
        return ended.status

    def _leave_to(self, ended: Outcome, heir: str, words: str) -> int:
        outcomes.write(self.claim.root, replace(ended, heir=heir))  # before the heir looks
        self._say(FINISHED, f"{ended.reason}; {self.task} is not done, {words}")
        self.comment.say(f"{self.task}: not done, {words}")
        return FINISHED

    def _requeue(self, ended: Outcome) -> bool:
        """Have Slurm requeue this job; return whether it does."""
        before = self.claim.before
        if ended.iteration <= (before.iteration if before else -1) and not ended.blind:
            self.log(
                f"unicron: {self.task} came no further in this job, which is not requeued: give it a longer --time"
            )
            return False
        self._leave_to(ended, self.allocation.job, "this job is requeued and goes on with it")
        try:
            tools.run(["scontrol", "requeue", self.allocation.job])
        except UnicronError as error:
            self.log(f"unicron: it can't be requeued: {error}")
            return False
        return True

    def _say(self, status: int, words: str) -> None:
        self.log(f"unicron: job {self.allocation.job} ends with status {status}: {words}")

"""Process supervision, exception propagation, and the part of online statistics that concerns one process."""

import re
import signal
from hashlib import blake2b

from unicron.contracts.base import Message
from unicron.contracts.commands import StartWorker
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    WorkerAsleep,
    WorkerExited,
    WorkerFinished,
    WorkerGrows,
    WorkerRaised,
    WorkerReady,
    WorkerStalled,
)
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.worker import NO_SNAPSHOT_NOW, SNAPSHOT_AGAIN
from unicron.errors import tells_lack
from unicron.healing import way_of
from unicron.rules import Rules
from unicron_detector.report import Reporter
from unicron_detector.state import OrderedWorker, WatchedWorker, worker_number

REPLACED_S = 300.0
"""After a worker was replaced whose memory grows, its task goes on for so long before another is: it has recovered
then. Where all its workers grow alike, not all of them are replaced at once."""

SLEEPS_S = 5.0
"""How long an idle report counts at least; the worker's time-out, where that is longer."""

WHERE = 300
"""Characters of a stack, or of a collective, that a failure's reason holds; the fact behind it has all."""

SIGNATURES = 64
"""Possible user's errors that are remembered per task."""

OWN_ERRORS = {FailureStatus.OTHER_SOFTWARE_ERROR, FailureStatus.ADDRESS_IN_USE}
"""Statuses that may be the user's own error."""

PROVABLE = OWN_ERRORS | {FailureStatus.UNEXPLAINED}
"""Statuses that are the user's own error, if the same happens in the same place elsewhere."""

REPEATS, REPEATS_UNEXPLAINED = 2, 4
"""So often in a row a slot's workers end by the same, in one line and one iteration, until that is proof enough where
nobody else computes the same; more often what no rule knows, as some of that passes."""

CERTAIN = {FailureStatus.GRADIENT_NOT_FINITE, FailureStatus.RANK_ENDED}
"""Statuses that all ranks share, or bring about together: a retry would end the same."""

TAKE_ANOTHER = "another program on that node has this port; let the script take MASTER_PORT, which is free, or port 0"

NOT_STARTED = 127
"""Exit code of a process that its agent could not start, with the reason for its last line."""

_FRAME = re.compile(r'^  File "([^"<]+)", line (\d+)', re.MULTILINE)

OWN_FAULTS = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
"""Signals that a program brings upon itself; others come from outside."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""In the text of an exception they differ from rank to rank, as addresses and bytes do."""


class Processes:
    """Watches worker processes."""

    def __init__(self, reporter: Reporter, rules: Rules) -> None:
        self._reporter = reporter
        self._state = reporter.state
        self._rules = rules

    def expect(self, order: StartWorker) -> list[Message]:
        """Record a process that was ordered, unless its node has joined anew since; no other process is believed."""
        task, node = self._reporter.task(order.task), self._state.nodes.get(order.node)
        task.restarts |= way_of(order.spec).runs_again  # also of a script that turns out not to be had in place
        if task.started is not None:
            task.started = max(task.started, worker_number(order.worker, order.task))
        if node is None or order.incarnation in {"", node.incarnation}:
            there = self._state.starting.setdefault(order.node, {})
            if order.slot not in there or order.token >= there[order.slot].token:
                there[order.slot] = OrderedWorker(worker=order.worker, task=order.task, token=order.token)
        return []

    def record_ready(self, _: WorkerReady) -> list[Message]:
        """Report nothing: a ready process is watched already."""
        return []

    def record_finished(self, finished: WorkerFinished) -> list[Message]:
        """Record that a process has finished."""
        self._reporter.worker(finished.worker, finished.task, finished.node, finished.slot).finished = True
        return []

    def report_missing(self, node: str, living: set[str]) -> list[Message]:
        """Report the workers that an agent which came back did not find: nobody saw them exit."""
        out: list[Message] = []
        for name in self._reporter.books.watched_on(node):
            if name not in living:
                out += self._abnormal(
                    name, self._state.workers[name], "was gone when its node's agent came back", forced=True
                )
        return out

    def judge_exit(self, exited: WorkerExited) -> list[Message]:
        """Classify the end of a process, and report a failure where it is one."""
        worker = self._reporter.worker(exited.worker, exited.task, exited.node, exited.slot)
        if worker.gone_at is not None:
            return []  # its exception, say, was reported already
        how = describe_end(exited)
        if exited.expected or exited.finished or worker.finished:
            self._reporter.books.close(exited.worker)
            if exited.expected or exited.exit_code == 0:
                return []
            return [Alert(text=f"{exited.worker} {how}, after its last iteration", node=exited.node, task=exited.task)]
        tail = "\n".join(exited.stderr)
        if exited.exit_code == NOT_STARTED and tells_lack(tail):
            return self._abnormal(exited.worker, worker, how, status=FailureStatus.OUT_OF_RESOURCES)
        verdict = self._rules.classify("", tail) if may_be_own_fault(exited) else None
        own = verdict is not None and verdict.status in OWN_ERRORS
        if verdict is not None and verdict.status in PROVABLE:
            code = f"signal {exited.signal}" if exited.signal else f"exit code {exited.exit_code}"
            broken = self._user_error(exited, code, f"{exited.worker} {how}", tail, own=own)
            if broken:
                return broken
        echo = verdict is not None and verdict.echo
        return self._abnormal(
            exited.worker,
            worker,
            how,
            exited.iteration,
            echo=echo,
            own=own,
            unexplained=verdict is not None and verdict.status is FailureStatus.UNEXPLAINED,
            traceback=tail if own else "",
            outside=verdict is not None and verdict.outside,
            forced=not may_be_own_fault(exited),
        )

    def _abnormal(
        self,
        name: str,
        worker: WatchedWorker,
        how: str,
        iteration: int = -1,
        *,
        echo: bool = False,
        own: bool = False,
        unexplained: bool = False,
        outside: bool = False,
        forced: bool = False,
        traceback: str = "",
        status: FailureStatus = FailureStatus.EXITED_ABNORMALLY,
    ) -> list[Message]:
        return self._reporter.fail(
            FailureDetected(
                severity=Severity.SEV2,
                method=DetectionMethod.PROCESS_SUPERVISION,
                status=status,
                task=worker.task,
                node=worker.node,
                slot=worker.slot,
                worker=name,
                reason=f"{name} {how}",
            ),
            iteration,
            echo=echo,
            own=own,
            unexplained=unexplained,
            outside=outside,
            forced=forced,
            traceback=traceback,
        )

    def classify_exception(self, raised: WorkerRaised) -> list[Message]:
        """Classify an exception.

        Reattempting in place needs a process, and this one is about to end: severity 3 becomes severity 2 here.
        """
        if self._reporter.worker(raised.worker, raised.task, raised.node, raised.slot).gone_at is not None:
            return []
        verdict = self._rules.classify(raised.exception, raised.text, raised.traceback)
        what = f"{raised.exception}: {raised.text}" if raised.text else raised.exception
        if verdict.status in CERTAIN:
            closed = self._reporter.task(raised.task).closed
            reason = f"{raised.worker} raised {what}"
            return [] if closed else self._reporter.break_task(raised.task, reason, raised.traceback)
        if verdict.status is FailureStatus.ADDRESS_IN_USE:
            what = f"{what}; in {script_line(raised.traceback)}: {TAKE_ANOTHER}"
        own = verdict.status in OWN_ERRORS
        # a machine that runs out of memory ends processes, or lets none begin; what a program is refused it asked for
        refused = raised.exception.endswith("MemoryError")
        asked = verdict.status is FailureStatus.OUT_OF_MEMORY and raised.exception == "RuntimeError"  # as torch's
        if verdict.status in PROVABLE or refused or asked:
            reason, kind = f"{raised.worker} raised {what}", _NUMBERS.sub("0", what)
            broken = self._user_error(raised, kind, reason, raised.traceback, own=own or refused)
            if broken:
                return broken
        return self._reporter.fail(
            FailureDetected(
                severity=min(verdict.severity, Severity.SEV2),
                method=DetectionMethod.EXCEPTION_PROPAGATION,
                status=verdict.status,
                task=raised.task,
                node=raised.node,
                slot=raised.slot,
                worker=raised.worker,
                reason=what,
                escalated=Severity.SEV3 if verdict.severity is Severity.SEV3 else None,
            ),
            raised.iteration,
            echo=verdict.echo,
            own=own,
            unexplained=verdict.status is FailureStatus.UNEXPLAINED,
            outside=verdict.outside,
            traceback=raised.traceback,
        )

    def _user_error(
        self, fact: WorkerExited | WorkerRaised, what: str, reason: str, traceback: str, *, own: bool
    ) -> list[Message]:
        """Return TaskBroken if another worker ended in the same way at the same iteration, else remember it.

        That worker was elsewhere: on another machine; in another slot, where the task is on one machine alone: what
        befalls one of several machines may be the machine's own. Or it was the one before in this slot, and the script
        is known to have failed in the same line, with no iteration in between.
        Of a program that reports no iterations the other must be of the same membership, but for what only one rank of
        each can do: listen where all others find it.
        """
        task = self._reporter.task(fact.task)
        where = f"{fact.iteration}"
        if task.restarts and fact.iteration <= 0 and TAKE_ANOTHER not in what:
            where = f"{self._reporter.worker(fact.worker, fact.task, fact.node, fact.slot).epoch}."
        place = _place(traceback)
        signature = f"{where}:{what}{place}"
        digest = blake2b(signature.encode(errors="replace"), digest_size=16).hexdigest()
        first = task.seen.setdefault(digest, fact.worker)
        other = self._state.workers.get(first)
        elsewhere = other is not None and self._is_elsewhere(other, fact)
        times = task.standstill.count_same(f"{fact.node}:{fact.slot}", digest) if place else 0
        again = times >= (REPEATS if own else REPEATS_UNEXPLAINED)
        if first != fact.worker and (elsewhere or again or TAKE_ANOTHER in what):
            when = f"at iteration {fact.iteration}, " if fact.iteration >= 0 else "before the first iteration, "
            when = "" if task.restarts and fact.iteration <= 0 else when  # it does not say how far it is
            at = f"{place[1:]}, " if place and place not in reason else ""
            return self._reporter.break_task(fact.task, f"{reason} ({at}{when}as {first} did before it)", traceback)
        if len(task.seen) > SIGNATURES:
            task.seen.pop(next(iter(task.seen)))
        return []

    def _is_elsewhere(self, other: WatchedWorker, fact: WorkerExited | WorkerRaised) -> bool:
        here, there = self._reporter.machine(fact.node), self._reporter.machine(other.node)
        if {here, there, *self._reporter.machines_of_task(fact.task)} == {here}:
            return (other.node, other.slot) != (fact.node, fact.slot)
        return here != there

    def record_sleep(self, asleep: WorkerAsleep) -> list[Message]:
        """Record an idle report; it counts for `SLEEPS_S` seconds."""
        task = self._reporter.task(asleep.task)
        task.sleepers = {name: at for name, at in task.sleepers.items() if self._state.now - at < SLEEPS_S}
        task.sleepers[asleep.worker] = self._state.now
        return []

    def report_asleep(self, stalled: WorkerStalled) -> list[Message]:
        """Report a sleeping worker; where others of its task sleep too, they wait for something that they share.

        Their agents repeat the report when they have waited for as long as any other may.
        """
        task, since = self._reporter.task(stalled.task), self._state.now - max(stalled.limit_s, SLEEPS_S)
        names = sorted({stalled.worker, *(name for name, at in task.sleepers.items() if at >= since)})
        if len(names) == 1:
            return self.report_hang(stalled)
        if task.closed or stalled.iteration <= task.common:
            return []
        task.common = stalled.iteration
        text = f"{len(names)} workers of {stalled.task} sleep at once in iteration {stalled.iteration}"
        return [Alert(text=f"{text}: look at what they share ({', '.join(names)})", task=stalled.task)]

    def replace_growing(self, grown: WorkerGrows) -> list[Message]:
        """Have a worker replaced, between two iterations, before the kernel ends it in one for want of memory."""
        task, now = self._reporter.task(grown.task), self._state.now
        regroups = task.ordered is not None and grown.epoch < task.ordered
        if task.closed or regroups or (task.replaced_at and now - task.replaced_at < REPLACED_S):
            return []
        task.replaced_at = now
        failure = FailureDetected(
            severity=Severity.SEV2,
            method=DetectionMethod.ONLINE_STATISTICS,
            status=FailureStatus.OUT_OF_MEMORY,
            task=grown.task,
            node=grown.node,
            slot=grown.slot,
            worker=grown.worker,
            reason=f"{grown}: it is replaced before the kernel ends it",
        )
        return self._reporter.fail(failure, grown.iteration + 1, own=True)

    def report_hang(self, stalled: WorkerStalled) -> list[Message]:
        """Report a process that hangs."""
        worker = self._state.workers.get(stalled.worker)
        if worker and worker.epoch > stalled.epoch:
            return []  # it has gone on since
        answers = "still answers" if stalled.responsive else "does not answer"
        answers += " while all its processes sleep" * stalled.asleep
        where = f"; {stalled.stacks[0].partition(' ')[2][:WHERE]}" if stalled.stacks else ""
        return self._reporter.fail(
            FailureDetected(
                severity=Severity.SEV2,
                method=DetectionMethod.ONLINE_STATISTICS,
                status=FailureStatus.TASK_HANG,
                task=stalled.task,
                node=stalled.node,
                slot=stalled.slot,
                worker=stalled.worker,
                reason=f"{describe_stall(stalled)}, and it {answers}{where}{first_collective(stalled.collectives)}",
            ),
            stalled.iteration,
        )


def script_line(traceback: str) -> str:
    """Return the innermost line of a traceback that is in no installed package."""
    own = [f"{path}:{line}" for path, line in _FRAME.findall(traceback) if "/site-packages/" not in path]
    return own[-1] if own else "a line that is not known"


def _place(text: str) -> str:
    """Return where a script was, if a text says that, as a part of what tells one error from another."""
    return f" in {script_line(text)}" if _FRAME.search(text) else ""


def may_be_own_fault(exited: WorkerExited) -> bool:
    """Return whether the program may have ended itself; a shell in between turns signal n into exit code 128 + n."""
    number = exited.signal or (exited.exit_code or 0) - 128
    if number > 0:
        return number in OWN_FAULTS
    return exited.exit_code is not None


def describe_end(exited: WorkerExited) -> str:
    """Return the end of a process in words, with the last line that its program wrote."""
    if exited.signal:
        known = exited.signal in set(signal.Signals)
        how = f"was ended by {signal.Signals(exited.signal).name if known else f'signal {exited.signal}'}"
    elif exited.exit_code is None:
        how = "ended, nobody knows how"
    else:
        how = f"exited with code {exited.exit_code}"
    how += first_collective(exited.collectives)
    aside = "unicron: " if exited.signal else (NO_SNAPSHOT_NOW, SNAPSHOT_AGAIN)  # else it may be why it has ended
    own = (line.strip() for line in reversed(exited.stderr) if not line.startswith(aside))
    last = next(filter(None, own), "")
    return f'{how}; its last line was "{last}"' if last else how


def first_collective(collectives: list[str]) -> str:
    """Return the first of the lines about collectives as the end of a sentence; empty where there is none."""
    return f"; under way: {collectives[0][:WHERE]}" if collectives else ""


def describe_stall(stalled: WorkerStalled) -> str:
    """Return the stall of a process in words."""
    return (
        f"{stalled.worker} made no progress in its {stalled.phase} phase for {stalled.waited_s:.2f} s, "
        f"where {stalled.limit_s:.2f} s are allowed"
    )

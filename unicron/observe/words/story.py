"""Messages in a person's words, and the story of one failure: every message of its chain, in order."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import fields as fields_of

from unicron.contracts import commands, events, hardware, notices, slowdowns, stragglers
from unicron.contracts.base import Message
from unicron.contracts.plans import TaskShare
from unicron.contracts.states import Saver
from unicron.contracts.tasks import UNCOUNTED
from unicron.errors import InvalidInputError
from unicron.observe.incidents import chain_of

_ENVELOPE = {field.name for field in fields_of(Message)}
LONGEST = 160
"""Characters of a line."""


_WORDS: dict[type[Message], Callable[[Any], str]] = {
    events.NodeJoined: lambda m: f"{m.node} joined with {len(m.slots)} slots, {len(m.workers)} workers alive",
    events.NodeAdmitted: lambda m: f"{m.node} admitted with {len(m.slots)} slots" + " again" * m.returned,
    events.NodeDrained: lambda m: f"{m.node} {'gets no more work' if m.drain else 'is in use again'}",
    events.NodeLeft: lambda m: f"{m.node} says goodbye" + f": {m.reason}" * bool(m.reason),
    events.NodeGone: lambda m: f"{m.node} is gone",
    events.NodeRefused: lambda m: f"{m.node} was not taken in: {m.reason}",
    events.NodePaced: lambda m: f"{m.node} is to beat every {m.heartbeat_s:g} s",
    events.NodeLeaving: lambda m: f"{m.node} is to go, and hands over what it has for up to {m.seconds:g} s",
    events.WorkerReady: lambda m: f"{_where(m)} is ready",
    events.WorkerFinished: lambda m: (
        f"{_where(m)} has done all {m.iterations} iterations" if m.iterations < UNCOUNTED else f"{_where(m)} is done"
    ),
    events.StateKept: lambda m: f"{_where(m)} leaves its state of iteration {m.state.iteration} behind",
    events.StateSecured: lambda m: (
        f"{_where(m)} saves its state, and that of iteration {m.iteration} is whole"
        f"{_after(', also on ', ', '.join(m.nodes))}"
    ),
    events.StateUnprotected: lambda m: f"{_where(m)} can't save its state: {m.reason}",
    events.StateDiverged: lambda m: (
        f"{_where(m)} has another state of iteration {m.iteration} than other replicas, and takes theirs: "
        f"{' '.join(m.digests)}{', undecided: the lowest rank counts' * m.undecided}"
    ),
    events.StateUnusable: lambda m: (
        f"{m.worker} can't go on from iteration {m.iteration}, which is from {m.copies}: {m.reason}"
    ),
    events.GradientNotFinite: lambda m: (
        f"the gradient of iteration {m.iteration} is not finite: "
        f"microbatch {', '.join(map(str, m.microbatches)) or 'none'} on rank {m.rank}, {_where(m)}; rule: {m.rule}"
        f"{'; computed again it is: suspect this device' * m.suspect}"
    ),
    events.ScriptDrilled: lambda m: f"drill in iteration {m.iteration}: {m.outcome}",
    events.StateRejected: lambda m: f"{m.state.location.node} holds a bad copy, found out on {m.node}: {m.reason}",
    events.StateCopied: lambda m: (
        f"{m.state.location.node} keeps "
        f"{'no copy' if m.problem else 'a copy'} of what {m.state.location.worker} left on {m.node}"
        f"{_after(': ', m.problem)}"
    ),
    events.StatesFound: lambda m: (
        f"{m.node} has of {m.task} {', '.join(sorted({f'iteration {ref.iteration}' for ref in m.states})) or 'nothing'}"
    ),
    events.PartStored: lambda m: (
        f"{m.node} has written place {m.part.place} of {m.task} to storage: "
        f"iteration {m.saving.iteration}, {m.seconds:.1f} s"
    ),
    events.CheckpointStored: lambda m: f"iteration {m.iteration} of {m.task} is on storage: {m.address}",
    events.CheckpointOrdered: lambda m: f"a user wants the state of {m.task} on storage now",
    events.TaskRewound: lambda m: f"a user wants {m.task} to go back to iteration {m.iteration}",
    events.TaskPaused: lambda m: f"a user {'pauses' if m.paused else 'resumes'} {m.task}",
    events.CheckpointFailed: lambda m: f"{m.node} can't use the storage of {m.task}: {m.reason}",
    events.CheckpointFound: lambda m: (
        f"on storage {m.node} finds of {m.task} {f'iteration {m.stored.iteration}' if m.stored else 'nothing'}"
        f"{_after(', and skips ', '; '.join(m.skipped))}"
    ),
    events.WorkerExited: lambda m: (
        f"{_where(m)} {_end(m)}{', as it was told' * m.expected}"
        f"{f', in iteration {m.iteration}' if m.iteration >= 0 else ', before its first iteration'}"
    ),
    events.WorkerRaised: lambda m: f"{_where(m)} raised {m.exception}: {m.text}",
    events.WorkerStalled: lambda m: (
        f"nothing was heard of {_where(m)} for {m.waited_s:.2f} s"
        if m.silent
        else f"{_where(m)} made no progress for {m.waited_s:.2f} s in {m.phase}"
    ),
    events.WorkerAway: lambda m: f"{_where(m)} is between two iterations, for {m.waited_s:.2f} s so far",
    events.CollectiveFailed: lambda m: f"{_where(m)} can't go on in epoch {m.epoch}: {m.error}",
    events.WorkerAsleep: lambda m: f"all processes of {_where(m)} sleep, for {m.waited_s:.2f} s so far",
    events.Regrouped: lambda m: (
        f"{m.worker} is rank {m.rank} of {m.world_size} and goes on with iteration {m.iteration}: "
        f"{m.kept} microbatches kept, {m.recomputed} computed again{_after(', state from ', m.state_from)}"
    ),
    events.TaskSubmitted: lambda m: (
        f"{m.task} submitted: weight {m.spec.weight:g}, {m.spec.min_workers} to {m.spec.max_workers} workers"
    ),
    events.NodeSuspected: lambda m: f"{m.node} is suspect, {m.grace_s:g} s from being given up: {m.reason}",
    events.TaskBroken: lambda m: f"the program of {m.task} is at fault: {m.reason}",
    events.TaskRemoved: lambda m: f"{m.task} removed",
    events.AttemptFailed: lambda m: (
        f"{m.action} of {' '.join(filter(None, (m.worker or m.task, m.node)))} failed: {m.reason}"
    ),
    events.CommandRefused: lambda m: f"{m.node} refused {m.command}{_after(' of ', m.worker)}: {m.reason}",
    events.FailureDetected: lambda m: (
        f"sev{m.severity.value} {m.status} {' '.join(filter(None, (m.task, m.worker, m.node)))}"
        f"{f', raised from sev{m.escalated.value}' if m.escalated else ''}{_after(': ', m.reason)}"
    ),
    events.PlanDecided: lambda m: (
        f"plan {m.plan.number} after {m.plan.trigger}: "
        f"{' '.join(map(_share, m.plan.shares))}{' (prepared)' * m.plan.prepared}"
    ),
    events.TaskStateChanged: lambda m: (
        f"{m.task} is {m.state}{f' on {len(m.members)} workers' if m.members else ''}{_after(': ', m.reason)}"
    ),
    events.TaskRecovered: lambda m: f"{m.task} is back at {m.workers} workers after {m.seconds:.2f} s",
    hardware.FaultLogged: lambda m: (
        f"{m.worker} on {m.node} wrote: {m.text}"
        if m.printed
        else f"{m.node} logged{_after(' of ', m.worker)}: {m.text}"
    ),
    slowdowns.SlowdownDetected: lambda m: f"{m.task} is slow: {m.text}",
    slowdowns.SlowdownEnded: lambda m: f"{m.task} takes {m.recent_s:.3g} s an iteration: {m.reason}",
    stragglers.StragglerDetected: lambda m: (
        f"{m.task} is {m.slowdown:.2f} times as slow as it could be: {m.diagnosis}"
        f"{f' {_where(m)}' if m.worker else ''}{', its node is drained' * m.drain}{_after(': ', m.cure)}"
    ),
    stragglers.RecordingSwitched: lambda m: f"{m.task}: {m.share:.3g} of the iterations are recorded",
    events.OrderTaken: lambda m: f"{m.by or 'somebody'} ordered {m.order}: {m.text}",
    notices.NotificationDecided: lambda m: f"{', '.join(m.channels)} {_says(m.channels)} ({m.phase}): {m.text}",
    notices.NotificationSent: lambda m: (
        f"{m.channel} has taken {m.delivery}{f', after {m.attempts} attempts' if m.attempts > 1 else ''}"
    ),
    notices.NotificationFailed: lambda m: f"{m.channel} has not taken {m.delivery}: {m.reason}",
    notices.IncidentAcknowledged: lambda m: f"{m.by} sees to {m.incident}",
    events.DeadLetter: lambda m: f"on {m.subject}: {m.error} ({len(m.payload)} bytes put aside)",
    events.Alert: lambda m: str(m.text),
    commands.StartWorker: lambda m: (
        f"start {_where(m)}{f' for place {m.place} of {m.layout.degrees}' if m.layout.replica_workers > 1 else ''}"
    ),
    commands.DropStates: lambda m: (
        f"remove what was left behind on {m.node}: {', '.join([*m.names, *(f'all of {each}' for each in m.workers)])}"
    ),
    commands.StoreState: lambda m: f"write {m.state.location.name} on {m.node} to {m.saving.root}",
    commands.CopyState: lambda m: f"copy {m.state.location.name} from {m.node} to {m.keeper.node}",
    commands.ReleaseNode: lambda m: f"nothing on {m.node} is needed any more: it may go",
    commands.SaveStates: lambda m: f"save on {m.node}: {', '.join(map(_saver, m.savers)) or 'nothing any more'}",
    commands.CommitCheckpoint: lambda m: f"complete the checkpoint of iteration {m.saving.iteration} of {m.task}",
    commands.FindCheckpoint: lambda m: f"look at {m.root} for a checkpoint of {m.task}",
    commands.FindStates: lambda m: f"tell what {m.node} has of {m.task}",
    commands.StopWorker: lambda m: f"stop {_where(m)}{_after(': ', m.reason)}",
    commands.Regroup: lambda m: (
        f"form epoch {m.epoch} of {m.task}{' to leave the states behind' * m.leaving}, {m.world_size} workers, here "
        f"{', '.join(f'{m.layout.seat_name(at)}={each.worker}' for at, each in zip(m.ranks, m.members, strict=False))}"
    ),
}


def describe(message: Message) -> str:
    """Return what `message` says, in one line."""
    return short(_WORDS.get(type(message), _fields)(message))


def short(text: str, most: int = LONGEST) -> str:
    """Return text as one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _says(channels: list[str]) -> str:
    return "say" if len(channels) > 1 else "says"


def _fields(message: Message) -> str:
    found = [
        f"{field.name}={value}"
        for field in fields_of(type(message))
        if field.name not in _ENVELOPE and (value := getattr(message, field.name)) not in ("", [], None)
    ]
    return " ".join(found)


def _saver(saver: Saver) -> str:
    return f"{saver.worker}{_after(' with copies on ', ', '.join(keeper.node for keeper in saver.keepers))}"


def _share(share: TaskShare) -> str:
    in_parts = share.slots and share.layout.replica_workers > 1
    return f"{share.task}={len(share.slots)}{f' ({share.layout.degrees})' if in_parts else ''}"


def _end(exited: events.WorkerExited) -> str:
    if exited.signal:
        return f"ended by signal {exited.signal}"
    return "ended, nobody knows how" if exited.exit_code is None else f"ended by exit code {exited.exit_code}"


def _where(message: Any) -> str:
    return f"{message.worker} on {message.node}:{message.slot}"


def _after(lead: str, text: str) -> str:
    return lead + text if text else ""


def line(message: Message) -> str:
    """Return one line of the event list: time, chain, source, type, and what it says."""
    clock = datetime.fromtimestamp(message.at).astimezone().isoformat(timespec="milliseconds")[11:23]
    return f"{clock}  {chain_of(message):16}  {message.source:10}  {type(message).__name__:16}  {describe(message)}"


def find_chain(messages: Iterable[Message], wanted: str) -> list[Message]:
    """Return the messages of the chain that the message with id `wanted` belongs to, in their order.

    Raises:
        InvalidInputError: no message has that id, or the beginning given fits several chains.
    """
    known = list(messages)
    chains = {chain_of(message) for message in known if wanted in (message.id, message.correlation)}
    if not chains and wanted:
        chains = {
            chain_of(message)
            for message in known
            if message.id.startswith(wanted) or message.correlation.startswith(wanted)
        }
    if len(chains) != 1:
        why = f"fits {len(chains)} chains; give more of it" if chains else "is in no message of the journal"
        raise InvalidInputError(f"id {wanted!r} {why}; `unicron events` lists the ids")
    [chain] = chains
    return [message for message in known if chain_of(message) == chain]


def story(messages: list[Message]) -> list[str]:
    """Return a chain's lines: seconds since its first message, source, type, and what it says."""
    start = messages[0].at
    return [
        f"{message.at - start:+9.3f} s  {message.source:10}  {type(message).__name__:16}  {describe(message)}"
        for message in messages
    ]

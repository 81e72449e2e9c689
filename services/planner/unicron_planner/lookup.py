"""The lookup table of paper section 5.2: what to do after each event that can come next."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unicron_planner import program
from unicron_planner.program import Choices, Floats, Ints, Solution, Sweep
from unicron_planner.state import Row


@dataclass(frozen=True)
class Standing:
    """How a task stands before the event.

    Attributes:
        sizes: worker counts it can be given, ascending, 0 (it waits) the first.
        waf: F(t, x') for each of them.
        held: x, the workers it has.
        held_waf: F(t, x).
    """

    sizes: Ints
    waf: Floats
    held: int
    held_waf: float


@dataclass(frozen=True)
class Situation:
    """The cluster before the event.

    Attributes:
        tasks: by name, in order of submission.
        failure_rate: failures a second and worker.
        transition_s: D_transition.
    """

    tasks: Mapping[str, Standing]
    failure_rate: float
    transition_s: float

    def running_s(self, workers: int) -> float:
        """Return D_running(n'): the expected time to the next failure among `workers`."""
        return 1.0 / (max(workers, 1) * self.failure_rate)


@dataclass(frozen=True)
class Event:
    """Something that may come next.

    Attributes:
        name: for instance "node_lost:node-3".
        workers: n' after it.
        lost: workers that it takes from tasks; these are hit.
        ended: task that it ends.
        launched: waiting task that must run after it.
    """

    name: str
    workers: int
    lost: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    launched: str = ""


def answer(situation: Situation, event: Event) -> Row:
    """Return what to do after one event that was not foreseen."""
    unit = _unit(situation, event.workers)
    tasks = [_choices(situation, name, event, unit) for name in situation.tasks]
    solution = program.solve(tasks, event.workers)
    if solution is None:
        raise AssertionError("every task may wait, so there is always a plan")
    return _row(situation, event, solution, unit)


def table(situation: Situation, events: Iterable[Event]) -> dict[str, Row]:
    """Return the answers to all `events`, less those that can't happen (a launch that needs more than there is).

    The passes over all tasks are made once for each n'; events that do the same to the same tasks share one solution.
    """
    sweeps: dict[int, Sweep] = {}
    solved: dict[object, Solution | None] = {}
    rows = {}
    for event in events:
        unit = _unit(situation, event.workers)
        case = (event.workers, frozenset(event.lost.items()), event.ended, event.launched)
        if case not in solved:
            if event.workers not in sweeps:
                calm = Event("", event.workers)
                tasks = [_choices(situation, name, calm, unit) for name in situation.tasks]
                sweeps[event.workers] = program.sweep(tasks, event.workers)
            touched = {*event.lost, event.ended, event.launched}
            replaced = {
                index: _choices(situation, name, event, unit)
                for index, name in enumerate(situation.tasks)
                if name in touched
            }
            solved[case] = program.solve_instead(sweeps[event.workers], replaced)
        solution = solved[case]
        if solution is not None:
            rows[event.name] = _row(situation, event, solution, unit)
    return rows


def _unit(situation: Situation, workers: int) -> float:
    """Return the reward of one point of score at n' = `workers`."""
    running_s = situation.running_s(workers)
    largest = max(
        (
            float(task.waf[task.sizes <= workers].max()) * running_s + task.held_waf * situation.transition_s
            for task in situation.tasks.values()
        ),
        default=0.0,
    )
    return largest / program.RESOLUTION or 1.0


def _choices(situation: Situation, name: str, event: Event, unit: float) -> Choices:
    """Return what the task can be given after the event."""
    if name == event.ended:
        return program.ENDED
    task = situation.tasks[name]
    allowed = task.sizes <= event.workers
    if name == event.launched:
        allowed &= task.sizes > 0
    sizes, lost = task.sizes[allowed], event.lost.get(name, 0)
    earned = program.rewards(
        sizes,
        task.waf[allowed],
        task.held,
        task.held_waf,
        hit=lost > 0,
        running_s=situation.running_s(event.workers),
        transition_s=situation.transition_s,
    )
    return Choices(sizes, earned, program.scores(sizes, earned, task.held - lost, unit, event.workers))


def _row(situation: Situation, event: Event, solution: Solution, unit: float) -> Row:
    sizes = dict(zip(situation.tasks, solution.sizes, strict=True))
    sizes.pop(event.ended, None)
    other = solution.runner_up
    return Row(
        event=event.name,
        workers=event.workers,
        sizes=sizes,
        reward=solution.reward,
        # In a tie the score is less by what was moved for nothing, and rounding may put it a hair above.
        runner_up_reward=None if other is None else min(solution.reward, other * unit),
    )

"""The state of a planner after a change that a user asks about. A pure function on `state`."""

from msgspec.structs import replace

from unicron.checks import check_task
from unicron.contracts.queries import WhatIf
from unicron.errors import InvalidInputError
from unicron_planner import nodes, throughput
from unicron_planner.state import AdmittedNode, PlannerState


def changed(before: PlannerState, query: WhatIf) -> PlannerState:
    """Return a copy of the state, changed as the query says.

    Raises:
        InvalidInputError: a node or task is not in use, or the task can't be planned for.
    """
    state = before.copy()
    for name in query.lose:
        if name not in before.nodes or not before.nodes[name].up:
            up = ", ".join(name for name, node in state.nodes.items() if node.up)
            raise InvalidInputError(f"node {name!r} is not up; these are: {up or 'none'}")
        state.nodes[name] = replace(state.nodes[name], up=False)
    for number in range(query.join):
        state.nodes[f"new-{number + 1}"] = AdmittedNode(slots=list(range(nodes.usual_slots(before))))
    for task in query.finish:
        if state.tasks.pop(task, None) is None:
            raise InvalidInputError(f"no task {task!r} to finish; there are: {', '.join(before.tasks) or 'none'}")
    if query.submit is not None:
        check_task(query.submit)
        throughput.check(query.submit)
        state.tasks[query.submit.name] = query.submit
    return state

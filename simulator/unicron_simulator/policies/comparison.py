"""Several policies on the same trace and the same tasks."""

from collections.abc import Sequence

from msgspec.structs import replace

from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError
from unicron_simulator.policies import parameters
from unicron_simulator.policies.economy import PolicyCluster, Result, tariffs
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.policies import RepairHit, Unicron, oracle
from unicron_simulator.policies.replacing import VirtualPool
from unicron_simulator.policies.traces import FailureTrace

UNICRON = "unicron"
ORACLE = "oracle"
POLICIES = (UNICRON, "megatron", "oobleck", "varuna", "bamboo", ORACLE)
"""The default policies of a comparison."""


def compare(
    trace: FailureTrace,
    tasks: Sequence[TaskSpec],
    policies: Sequence[str] = POLICIES,
    *,
    gpus: int = 8,
    costs: dict[str, Costs] | None = None,
    refresh_every_s: float = 0.0,
    spares: int = 0,
    delivery_s: float | None = None,
) -> dict[str, Result]:
    """Run each policy through the trace; return what came out, by policy.

    Args:
        trace: the failures.
        tasks: what is trained, all the time.
        policies: names in `parameters.toml`, or "oracle". Those that begin with "unicron" are planned for.
        gpus: slots of a node.
        costs: other parameters than those of the file.
        refresh_every_s: as for `Unicron`.
        spares: nodes that are there besides, without failures of their own.
        delivery_s: seconds within which a provisioner gets another machine for a lost node, for all but the oracle;
            None: there is none, and nodes are back after their repair.

    Raises:
        InvalidInputError: there is no such policy, no task, or a task can't be used.
    """
    known = costs or parameters.load()[0]
    for policy in policies:
        if policy != ORACLE and policy not in known:
            raise InvalidInputError(f"no policy {policy!r}; there are {', '.join([*known, ORACLE])}")
    if not tasks:
        raise InvalidInputError("no tasks; give one at least")
    if not trace.nodes:
        raise InvalidInputError("no nodes; give one at least")
    tariff = tariffs(tasks, len(trace.nodes) * gpus)
    first = Unicron(trace._replace(faults=()), gpus, tariff, known[UNICRON])
    first.start()
    sizes = {task: first.size(task) for task in tariff}
    trace = trace._replace(nodes=(*trace.nodes, *(f"spare-{number}" for number in range(spares))))
    found = {}
    for policy in policies:
        if policy == ORACLE:
            found[policy] = oracle(trace, gpus, tariff)
            continue
        cluster: PolicyCluster
        if policy.startswith(UNICRON):
            cluster = Unicron(trace, gpus, tariff, known[policy], refresh_every_s)
        else:
            cluster = RepairHit(trace, gpus, tariff, known[policy], sizes)
        if delivery_s is not None:
            cluster.replace = VirtualPool(cluster, tasks, spares, delivery_s).lost
        found[policy] = cluster.run(policy)
    return found


def circular() -> dict[str, Costs]:
    """Return the parameters with efficiencies from figure 11 of the paper, good for no comparison with that figure."""
    known, figures = parameters.load()
    return known | {
        name: replace(known[name], basis=figures.basis, source=figures.source, efficiency=efficiency)
        for name, efficiency in figures.efficiency.items()
    }

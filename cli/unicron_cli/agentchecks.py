"""Whether agents run with what the set-up says, for `unicron doctor --cluster`: settings, rules, patterns of logs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from unicron_agent.settings import AgentSettings
from unicron_deploy.production.wanted import Agent

from unicron.contracts.answers import RunningSettings, Status
from unicron.contracts.tasks import TaskState
from unicron.contracts.watchdogs import LogPattern
from unicron.settings import PREFIX
from unicron_cli.observed import Check, Observed, listed

DEFAULTS = AgentSettings().texts()


def _variables(*names: str) -> set[str]:
    return {PREFIX + name for name in names}


BY_PROVIDER = _variables(
    "NODE", "MACHINE", "POOL", "NATS_URL", "NATS_NKEY", "FABRIC_KEY", "JOIN_TOKEN_FILE", "RUN_DIR", "RACK", "SLOTS"
)
"""What each machine of a pool is given by who has it started, and the set-up does not know."""

BY_MACHINE = BY_PROVIDER | _variables(
    "NATS_CREDS", "NATS_CERT", "NATS_KEY", "HOST", "DOMAIN", "METRICS", "KERNEL_LOG", "TOPOLOGY"
)
"""What may differ from machine to machine."""


def checks(seen: Observed, status: Status) -> Iterator[Check]:
    """Return what there is to say of the agents that are up; nothing where none is."""
    if seen.agents:
        there = {node: running for node, running in seen.agents.items() if running is not None}
        yield _settings(seen, there)
        yield _rules(seen, there)
        yield _patterns(there, status)


def _settings(seen: Observed, there: Mapping[str, RunningSettings]) -> Check:
    wrong = [f"{node} does not say what it runs with" for node in seen.agents if node not in there]
    usual = _usual(there.values())
    for node, running in there.items():
        wrong += _differences(seen, node, running, usual)
    if not wrong:
        found = "as set up" if seen.wanted else "alike; --setup DIR holds them against what `unicron init` wrote"
        return Check(name="settings", state="ok", found=f"of {len(there)} agents, {found}")
    cure = "set the same for all agents and restart these, or give --setup DIR, which says what is meant"
    if seen.wanted:
        cure = "bring the files there to what the set-up says and restart that agent, or mend the set-up"
    return Check(name="settings", state="warning", found=listed(wrong), cure=cure)


def _usual(there: Iterable[RunningSettings]) -> dict[str, str]:
    """Return the most frequent value of each setting that is the same on all machines, as a rule."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for running in there:
        for name, text in running.settings.items():
            counts[name][text] += 1
    return {name: count.most_common(1)[0][0] for name, count in counts.items() if name not in BY_MACHINE}


def _differences(seen: Observed, node: str, running: RunningSettings, usual: Mapping[str, str]) -> list[str]:
    agent = _wanted(seen, running)
    if agent is None and seen.wanted is not None:
        return [f"{node} is not in the set-up"]
    return [
        f"{node}: {name} is {_shown(running.settings.get(name))}, not {_shown(text)}"
        for name, text in sorted((_meant(agent) if agent else usual).items())
        if not _same(running.settings.get(name), text)
    ]


def _wanted(seen: Observed, running: RunningSettings) -> Agent | None:
    """Return what the set-up says of an agent, None where it says nothing of it."""
    if seen.wanted is None:
        return None
    node, pool = (running.settings.get(PREFIX + name, "") for name in ("NODE", "POOL"))
    return seen.wanted.nodes.get(node) or seen.wanted.pools.get(pool)


def _meant(agent: Agent) -> dict[str, str]:
    """Return what each setting is to be."""
    given = {name: text for name, text in agent.settings.items() if name.startswith(PREFIX)}
    skipped = BY_PROVIDER if agent.pool else set[str]()
    return {name: text for name, text in {**DEFAULTS, **given}.items() if name not in skipped}


def _rules(seen: Observed, there: Mapping[str, RunningSettings]) -> Check:
    usual = next((digest for digest, _ in Counter(each.rules for each in there.values()).most_common(1)), "")
    meant = {node: _wanted(seen, running) for node, running in there.items()}
    others = [
        node
        for node, running in there.items()
        if running.rules != ((agent.rules if (agent := meant[node]) else "") or usual)
    ]
    if not others:
        return Check(name="rules", state="ok", found="as set up" if seen.wanted else "the same for all agents")
    than = "the set-up's" if seen.wanted else "most others'"
    cure = "bring the folder that UNICRON_RULES names, and the version, to the same there, and restart that agent"
    return Check(name="rules", state="warning", found=f"other ones than {than} on {listed(others)}", cure=cure)


def _patterns(there: Mapping[str, RunningSettings], status: Status) -> Check:
    wrong = [
        f"{node}: watch_log of {view.spec.name} is {_listed(found)}, not {_listed(view.spec.watch_log)}"
        for view in status.tasks
        if view.state is TaskState.RUNNING
        for node in sorted({member.node for member in view.members} & there.keys())
        if (found := there[node].watch_log.get(view.spec.name, [])) != view.spec.watch_log
    ]
    if wrong:
        cure = "pause and resume the task: its workers are watched anew when they start"
        return Check(name="log patterns", state="warning", found=listed(wrong), cure=cure)
    return Check(name="log patterns", state="ok", found="each task's are watched for where it runs")


def _listed(patterns: list[LogPattern]) -> str:
    texts = (f"{each.pattern!r} within {each.within_s:g} absent {each.absent_for_s:g}" for each in patterns)
    return "; ".join(texts) or "none"


def _shown(text: str | None) -> str:
    return "unknown to that agent" if text is None else text or "empty"


def _same(one: str | None, other: str) -> bool:
    if one is None or one.casefold() == other.casefold():
        return one is not None
    try:
        return float(one) == float(other)
    except ValueError:
        return False

"""What of a running cluster is not as it should be in production: each check is a function of what was observed."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.tasks import NodeState, TaskState
from unicron_cli import agentchecks
from unicron_cli.observed import Check, Observed, State, listed

SERVERS = 3
"""NATS servers of which any may be lost."""

LATE_DAYS, SOON_DAYS = 14, 60
"""Days that a certificate has left when that is urgent, and when it is time to see to it."""

FAR_S = 5.0
"""How far clocks may be apart before it is told."""

SECRET = 0o077
"""Rights that nobody but its owner may have on a key."""


def checks(seen: Observed) -> list[Check]:
    """Return all that production asks for, each with what was found."""
    found = [servers(seen), tls(seen), streams(seen), *services(seen), metrics(seen), notifier(seen)]
    found += [*key_files(seen), clocks(seen.ahead)]
    if seen.status is None:
        return [*found, Check(name="nodes", state="fail", found="the registry does not answer", cure="see its log")]
    status = seen.status
    return [
        *found,
        observing(status),
        *nodes(seen, status),
        *agentchecks.checks(seen, status),
        spares(seen, status),
        storage(seen, status),
        copies(status),
    ]


def servers(seen: Observed) -> Check:
    """Check that three servers of one version answer."""
    name, there = "NATS servers", [each for each in seen.servers if each.version]
    silent = [each.address for each in seen.servers if not each.version]
    if silent:
        cure = "start them again, or mend the way to them"
        return Check(name=name, state="fail", found=f"no answer: {listed(silent)}", cure=cure)
    versions = Counter(each.version for each in there)
    if len(versions) > 1:
        found = ", ".join(f"{count} of {version}" for version, count in versions.items())
        return Check(name=name, state="warning", found=found, cure="bring all of them to the newest version")
    found = f"{len(there)} of version {', '.join(versions)}"
    if len(there) < SERVERS:
        cure = "run three, and name all of them in UNICRON_NATS_URL: docs/howto/three-servers.md"
        return Check(name=name, state="warning", found=f"{found}: none may be lost", cure=cure)
    return Check(name=name, state="ok", found=found)


def tls(seen: Observed) -> Check:
    """Check that what goes over a network is encrypted."""
    plain = [each for each in seen.servers if each.version and not each.tls]
    if not plain:
        return Check(name="TLS", state="ok", found="all servers take TLS only")
    if all(each.is_local for each in plain):
        return Check(name="TLS", state="ok", found="in plain, and reached on this machine only")
    cure = "give them certificates (unicron_deploy.keys --tls) and a tls block, as in deploy/nats.conf"
    return Check(name="TLS", state="fail", found=f"in plain: {listed([each.address for each in plain])}", cure=cure)


def streams(seen: Observed) -> Check:
    """Check that each stream lies on as many servers as there should be, and is up to date there."""
    name, wanted = "streams", SERVERS if len(seen.servers) >= SERVERS else 1
    if not seen.streams:
        return Check(name=name, state="fail", found="none can be seen", cure="run `unicron provision`")
    few = [f"{each.name} on {each.replicas}" for each in seen.streams if each.replicas < wanted]
    if few:
        cure = "run `unicron provision` with all servers in UNICRON_NATS_URL"
        return Check(name=name, state="fail", found=f"of {len(seen.servers)} servers: {listed(few)}", cure=cure)
    behind = [f"{each.name} on {server}" for each in seen.streams for server in each.behind]
    if behind:
        cure = "wait until they have caught up; where they do not, look at these servers' logs and disks"
        return Check(name=name, state="warning", found=f"not up to date: {listed(behind)}", cure=cure)
    return Check(name=name, state="ok", found=f"{len(seen.streams)}, each on {seen.streams[0].replicas}")


def services(seen: Observed) -> Iterator[Check]:
    """Check that each service has an instance that works, and one that would take over."""
    instances = Counter(each.service for each in seen.targets or () if each.up and each.service)
    for name, active in seen.active.items():
        if not active:
            cure = f"start it: python -m unicron_{name}; where it runs, see its log"
            yield Check(name=name, state="fail", found="no instance holds its lease", cure=cure)
        elif instances[name] > 1:
            yield Check(name=name, state="ok", found=f"active, {instances[name] - 1} standing by")
        else:
            found = "active, none standing by" if instances[name] else "active; nobody says whether one stands by"
            cure = "start another instance on another machine, and list it in the targets of Prometheus (--targets)"
            yield Check(name=name, state="warning", found=found, cure=cure)


def metrics(seen: Observed) -> Check:
    """Check that every process answers Prometheus."""
    name = "metrics"
    if not seen.targets:
        cure = "set UNICRON_METRICS for each process, and name the file of targets that Prometheus reads with --targets"
        return Check(name=name, state="warning", found="nobody says whom Prometheus scrapes", cure=cure)
    down = [each.address for each in seen.targets if not each.up]
    if down:
        cure = "see whether these processes run, and answer this machine; else take them off the list"
        return Check(name=name, state="fail", found=f"no answer: {listed(down)}", cure=cure)
    return Check(name=name, state="ok", found=f"{len(seen.targets)} processes answer")


def notifier(seen: Observed) -> Check:
    """Check that somebody is told of incidents."""
    name, told = "people", seen.notifications
    if told is None:
        return Check(name=name, state="fail", found="the notifier does not answer", cure="see its log")
    if not told.channels:
        cure = "give it a file of channels (UNICRON_NOTIFY): docs/howto/notify.md"
        return Check(name=name, state="warning", found="the notifier has no channel: nobody is told", cure=cure)
    broken = [f"{each.name}: {each.broken}" for each in told.channels if each.broken]
    if broken:
        return Check(name=name, state="fail", found=listed(broken), cure="mend it, then `unicron notify test`")
    return Check(name=name, state="ok", found=f"told by {listed([each.name for each in told.channels])}")


def key_files(seen: Observed) -> Iterator[Check]:
    """Check who may read the keys that lie here, and how long certificates hold."""
    if not seen.files:
        cure = "name the folder of the cluster's keys with --keys, on the machine where they lie"
        yield Check(name="keys", state="warning", found="no folder of keys is here", cure=cure)
        return
    open_to_all = [each.path for each in seen.files if each.days is None and each.mode & SECRET]
    if open_to_all:
        cure = "chmod 600 them, then replace them: `unicron credentials rotate NAME`"
        yield Check(name="keys", state="fail", found=f"others may read {listed(open_to_all)}", cure=cure)
    else:
        count = sum(each.days is None for each in seen.files)
        yield Check(name="keys", state="ok", found=f"{count}, their owner's alone")
    dated = sorted((each.days, each.path) for each in seen.files if each.days is not None)
    if dated:
        days, path = dated[0]
        state: State = "fail" if days < LATE_DAYS else "warning" if days < SOON_DAYS else "ok"
        cure = "" if state == "ok" else "make it anew (docs/howto/keys.md), and give it to its process"
        yield Check(name="certificates", state=state, found=f"the first ends in {days:.0f} days: {path}", cure=cure)


def clocks(ahead: dict[str, float]) -> Check:
    """Say whose clock is not as ours is.

    Args:
        ahead: of ours, by node, in seconds.
    """
    off = {node: by for node, by in sorted(ahead.items()) if abs(by) > FAR_S}
    if not off:
        found = f"{len(ahead)} heard, as this machine's within {FAR_S:g} s" if ahead else "no node was heard"
        return Check(name="clocks", state="ok", found=found)
    those = ", ".join(f"{node} is {abs(by):.0f} s {'ahead' if by > 0 else 'behind'}" for node, by in off.items())
    cure = (
        "set them, by NTP (chrony, systemd-timesyncd), or this machine's: an agent that is 30 s off does not start, "
        "and nodes 60 s apart hand one another no state"
    )
    return Check(name="clocks", state="warning", found=f"not as this machine's: {those}", cure=cure)


def observing(status: Status) -> Check:
    """Check that the cluster may heal."""
    if not status.observe_only:
        return Check(name="healing", state="ok", found="on")
    held = [view.spec.name for view in status.tasks if view.withheld]
    found = f"observe only{f'; withheld of {listed(held)}' if held else ''}"
    cure = "start the services without UNICRON_OBSERVE_ONLY once you trust what `unicron events` says"
    return Check(name="healing", state="warning", found=found, cure=cure)


def nodes(seen: Observed, status: Status) -> Iterator[Check]:
    """Check that nodes are up, alike, of this version, and known by their racks."""
    up, lost = _up(status), [each.node for each in status.nodes if each.state is NodeState.LOST]
    if not up:
        cure = "start an agent on each node: python -m unicron_agent --node NAME"
        yield Check(name="nodes", state="fail", found="none is up", cure=cure)
        return
    if lost:
        cure = "look at these machines, and start their agents again"
        yield Check(name="nodes", state="warning", found=f"{len(up)} up, lost: {listed(lost)}", cure=cure)
    else:
        yield Check(name="nodes", state="ok", found=f"{len(up)} up")
    others = [f"{each.node} has {each.version or 'an older one'}" for each in up if each.version != seen.version]
    cure = "bring agents and services to one version: docs/howto/upgrade.md" if others else ""
    state: State = "warning" if others else "ok"
    found = listed(others) if others else f"all agents have {seen.version}"
    yield Check(name="version", state=state, found=f"this is {seen.version}; {found}" if others else found, cure=cure)
    yield _alike(up)
    if len(up) > 1:
        yield _racks(up)


def _alike(up: list[NodeView]) -> Check:
    kinds: dict[str, list[str]] = defaultdict(list)
    for each in up:
        slots = Counter(slot.kind for slot in each.slots)
        kinds[", ".join(f"{count} {kind}" for kind, count in sorted(slots.items()))].append(each.node)
    if len(kinds) == 1:
        return Check(name="slots", state="ok", found=f"{next(iter(kinds))} on each node")
    found = "; ".join(f"{kind} on {listed(names)}" for kind, names in kinds.items())
    cure = "where that is not meant: see which GPUs the agents there have found, and UNICRON_SLOTS"
    return Check(name="slots", state="warning", found=found, cure=cure)


def _racks(up: list[NodeView]) -> Check:
    unknown = [each.node for each in up if not each.rack]
    if unknown:
        cure = "set UNICRON_RACK for each agent, so that copies of a state do not fail together"
        return Check(name="racks", state="warning", found=f"not known of {listed(unknown)}", cure=cure)
    racks = {each.rack for each in up}
    if len(racks) == 1:
        found, cure = "all nodes are in one", "none, where there is no other; all copies of a state are lost with it"
        return Check(name="racks", state="warning", found=found, cure=cure)
    return Check(name="racks", state="ok", found=f"{len(racks)}")


def spares(seen: Observed, status: Status) -> Check:
    """Check that a lost node can be replaced: by slots that no task has, or by a pool."""
    taken = {(slot.node, slot.slot) for share in (status.plan.shares if status.plan else ()) for slot in share.slots}
    free = sum((each.node, slot.index) not in taken for each in _up(status) for slot in each.slots)
    pools = [each for each in seen.pools.pools if each.have + each.asked < each.pool.max] if seen.pools else []
    troubled = [f"{each.pool.name}: {each.trouble}" for each in pools if each.trouble]
    if troubled:
        return Check(name="spares", state="fail", found=f"pool {listed(troubled)}", cure="mend its provider")
    if free or pools:
        more = f"; pools that may grow: {listed([each.pool.name for each in pools])}" if pools else ""
        return Check(name="spares", state="ok", found=f"{free} slots are free{more}")
    cure = "add a node, or a pool with spares (docs/howto/pools.md); until then a lost node leaves tasks smaller"
    return Check(name="spares", state="warning", found="no slot is free, and no pool may grow", cure=cure)


def storage(seen: Observed, status: Status) -> Check:
    """Check that tasks have a storage that can be read."""
    living = [view for view in status.tasks if not view.state.ended]
    away = [f"{address}: {why}" for address, why in seen.storages.items() if why]
    if away:
        cure = "mend the way there, or its credentials; a directory must be the same on each node"
        return Check(name="storage", state="fail", found=f"seen from this machine: {listed(away)}", cure=cure)
    without = [view.spec.name for view in living if not view.spec.checkpoints]
    if without:
        cure = "give their task files `checkpoints`: what lies in memory alone is lost with its nodes"
        return Check(name="storage", state="warning", found=f"none for {listed(without)}", cure=cure)
    return Check(name="storage", state="ok", found=listed(sorted(seen.storages)) if living else "no task needs any now")


def copies(status: Status) -> Check:
    """Check that the state of each running task lies on nodes that do not fail together."""
    racks = {each.node: each.rack for each in status.nodes}
    alone, together = [], []
    for view in status.tasks:
        if view.state is not TaskState.RUNNING or not view.savers:
            continue
        held = _held(view)
        if any(len(there) < 2 for there in held):
            alone.append(view.spec.name)
        elif any(len({racks.get(node, "") for node in there}) == 1 and racks.get(min(there)) for there in held):
            together.append(view.spec.name)
    if alone:
        cure = "see `unicron status`, SAVED: more nodes must be up, with room in /dev/shm"
        return Check(name="copies", state="fail", found=f"on one node only: {listed(alone)}", cure=cure)
    if together:
        cure = "have nodes of more than one rack: all copies of a state are lost with its rack"
        return Check(name="copies", state="warning", found=f"in one rack only: {listed(together)}", cure=cure)
    return Check(name="copies", state="ok", found="each state in memory lies on nodes that do not fail together")


def _held(view: TaskView) -> list[set[str]]:
    """Return the nodes that hold each part of a task's state."""
    layout = view.spec.shape(len(view.members))
    parts: list[set[str]] = [set() for _ in range(layout.replica_workers)]
    for rank, member in enumerate(view.members[: layout.workers]):
        saver = view.savers.get(member.worker)
        parts[layout.seat(rank).place] |= set(saver.nodes) if saver else set()
    return parts


def _up(status: Status) -> list[NodeView]:
    return [each for each in status.nodes if each.state in {NodeState.UP, NodeState.DRAINING}]

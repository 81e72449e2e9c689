"""Each check of `unicron doctor --cluster`, on what was observed: what is well, what is not, and the cure."""

import json
import os
import time
from datetime import timedelta

import pytest
from helpers.refusing import WELCOME, serving
from msgspec.structs import replace
from unicron_cli import clusterlook, production
from unicron_cli.observed import FileSeen, Observed, ServerSeen, StreamSeen, TargetSeen
from unicron_deploy import certificates
from unicron_deploy.keys import Keyring

from unicron.contracts.answers import NodeView, SaverView, Status, TaskView
from unicron.contracts.notices import ChannelView, NotificationsView
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.pools import Pool, PoolsView, PoolView
from unicron.contracts.tasks import Member, NodeState, Slot, SlotRef, TaskSpec, TaskState
from unicron.errors import InvalidInputError
from unicron.services import SERVICES

ADDRESSES = [f"nats://nats-{number}:4222" for number in (1, 2, 3)]


def node(name, rack="r1", **fields):
    slots = fields.pop("slots", [Slot(index=0, kind="gpu")])
    return NodeView(node=name, state=fields.pop("state", NodeState.UP), rack=rack, slots=slots, version="1", **fields)


def running(saved_on, **fields):
    spec = TaskSpec(name="t", command=["x"], max_workers=1, microbatches=1, checkpoints="s3://b", **fields)
    members = [Member(worker="t-1", node="n1", slot=0)]
    savers = {"t-1": SaverView(nodes=saved_on)}
    return TaskView(spec=spec, state=TaskState.RUNNING, members=members, savers=savers)


PLAN = Plan(number=1, trigger="x", workers=1, shares=[TaskShare(task="t", slots=[SlotRef(node="n1", slot=0)])])
STATUS = Status(nodes=[node("n1"), node("n2", "r2")], tasks=[running(["n1", "n2"])], plan=PLAN)
GOOD = Observed(
    version="1",
    servers=[ServerSeen(address=address, version="2.11.1", tls=True) for address in ADDRESSES],
    streams=[StreamSeen(name=name, replicas=3) for name in ("UNICRON", "KV_unicron_state", "KV_unicron_lease")],
    active=dict.fromkeys(SERVICES, True),
    targets=[TargetSeen(address=f"h{n}:1", up=True, service=s, active=n == 1) for s in SERVICES for n in (1, 2)],
    files=[FileSeen(path="k/a.nk", mode=0o600), FileSeen(path="k/tls.pem", days=900.0)],
    ahead={"n1": 0.1},
    storages={"s3://b": ""},
    status=STATUS,
    notifications=NotificationsView(channels=[ChannelView(name="pager")]),
)


def seen(name, **changes):
    """Return one line for a good cluster with changes."""
    [line] = [check for check in production.checks(replace(GOOD, **changes)) if check.name == name]
    return line


def status(**changes):
    return {"status": replace(STATUS, **changes)}


def test_a_good_cluster_is_well_in_every_line_and_needs_no_cure():
    found = production.checks(GOOD)
    assert [(check.name, check.cure) for check in found if check.state != "ok"] == []
    assert not [check for check in found if check.cure]
    assert len({check.name for check in found}) == len(found)


def servers(**last):
    return {"servers": [*GOOD.servers[:2], replace(GOOD.servers[2], **last)]}


def pools(**fields):
    pool = Pool(name="p", provider="local", max=2)
    return PoolsView(pools=[PoolView(pool=pool, **fields)])


FULL = Status(nodes=[node("n1")], tasks=STATUS.tasks, plan=PLAN)


@pytest.mark.parametrize(
    ("name", "changes", "state", "found", "cure"),
    [
        ("NATS servers", servers(version=""), "fail", "no answer: nats://nats-3:4222", "start them again"),
        ("NATS servers", servers(version="2.10.0"), "warning", "2 of 2.11.1, 1 of 2.10.0", "newest version"),
        (
            "NATS servers",
            {"servers": GOOD.servers[:1]},
            "warning",
            "1 of version 2.11.1: none may be lost",
            "run three",
        ),
        ("TLS", servers(tls=False), "fail", "in plain: nats://nats-3:4222", "give them certificates"),
        ("streams", {"streams": []}, "fail", "none can be seen", "unicron provision"),
        ("streams", {"streams": [StreamSeen(name="UNICRON", replicas=1)]}, "fail", "UNICRON on 1", "unicron provision"),
        (
            "streams",
            {"streams": [StreamSeen(name="UNICRON", replicas=3, behind=["nats-2"])]},
            "warning",
            "not up to date: UNICRON on nats-2",
            "caught up",
        ),
        ("planner", {"active": {"planner": False}}, "fail", "no instance holds its lease", "python -m unicron_planner"),
        ("planner", {"targets": GOOD.targets[::2]}, "warning", "active, none standing by", "another instance"),
        ("planner", {"targets": None}, "warning", "nobody says whether one stands by", "--targets"),
        ("metrics", {"targets": None}, "warning", "nobody says", "UNICRON_METRICS"),
        ("metrics", {"targets": [TargetSeen(address="h:1", up=False)]}, "fail", "no answer: h:1", "take them off"),
        ("people", {"notifications": None}, "fail", "does not answer", "log"),
        ("people", {"notifications": NotificationsView()}, "warning", "no channel", "UNICRON_NOTIFY"),
        (
            "people",
            {"notifications": NotificationsView(channels=[ChannelView(name="pager", broken="refused")])},
            "fail",
            "pager: refused",
            "unicron notify test",
        ),
        ("keys", {"files": None}, "warning", "no folder of keys", "--keys"),
        ("keys", {"files": [FileSeen(path="a.nk", mode=0o640)]}, "fail", "others may read a.nk", "chmod 600"),
        (
            "certificates",
            {"files": [FileSeen(path="a.pem", days=59.0)]},
            "warning",
            "in 59 days: a.pem",
            "make it anew",
        ),
        ("certificates", {"files": [FileSeen(path="a.pem", days=-1.0)]}, "fail", "in -1 days: a.pem", "make it anew"),
        ("clocks", {"ahead": {"n1": -45.2}}, "warning", "n1 is 45 s behind", "NTP"),
        ("nodes", {"status": None}, "fail", "the registry does not answer", "log"),
        ("nodes", status(nodes=[]), "fail", "none is up", "start an agent"),
        ("nodes", status(nodes=[node("n1"), node("n2", state=NodeState.LOST)]), "warning", "1 up, lost: n2", "again"),
        ("version", {"version": "2"}, "warning", "this is 2; n1 has 1, n2 has 1", "upgrade.md"),
        ("slots", status(nodes=[node("n1"), node("n2", slots=[])]), "warning", "1 gpu on n1;  on n2", "UNICRON_SLOTS"),
        ("racks", status(nodes=[node("n1"), node("n2", "")]), "warning", "not known of n2", "UNICRON_RACK"),
        ("racks", status(nodes=[node("n1"), node("n2")]), "warning", "all nodes are in one", "no other"),
        ("healing", status(observe_only=True), "warning", "observe only", "UNICRON_OBSERVE_ONLY"),
        ("spares", {"status": FULL}, "warning", "no slot is free", "docs/howto/pools.md"),
        ("spares", {"status": FULL, "pools": pools(have=2)}, "warning", "no pool may grow", "docs/howto/pools.md"),
        ("spares", {"status": FULL, "pools": pools(trouble="no quota")}, "fail", "p: no quota", "provider"),
        ("storage", {"storages": {"s3://b": "no such bucket"}}, "fail", "s3://b: no such bucket", "mend the way"),
        ("copies", status(tasks=[running(["n1"])]), "fail", "on one node only: t", "SAVED"),
        ("copies", status(nodes=[node("n1"), node("n2")]), "warning", "in one rack only: t", "more than one rack"),
    ],
)
def test_what_is_not_well_is_said_with_the_cure(name, changes, state, found, cure):
    line = seen(name, **changes)
    assert line.state == state
    assert found in line.found
    assert cure in line.cure


def test_what_is_said_in_plain_on_one_machine_is_heard_by_nobody_else():
    alone = [
        ServerSeen(address=f"nats://{host}:4222", version="2.11.1") for host in ("127.0.0.1", "localhost", "[::1]")
    ]
    assert seen("TLS", servers=alone).state == "ok"
    assert seen("TLS", servers=[*alone, ServerSeen(address="nats://10.0.0.1:4222", version="2.11.1")]).state == "fail"


def test_a_pool_that_may_grow_is_as_good_as_a_free_slot():
    assert "pools that may grow: p" in seen("spares", status=FULL, pools=pools(have=1)).found


def test_a_task_without_a_storage_is_named():
    spec = TaskSpec(name="bare", command=["x"], max_workers=1, microbatches=1)
    line = seen("storage", **status(tasks=[TaskView(spec=spec, state=TaskState.RUNNING)]))
    assert (line.state, line.found) == ("warning", "none for bare")


async def test_a_server_is_known_by_its_greeting_and_what_is_none_by_its_silence():
    async with serving(WELCOME, greetings=[{"version": "2.11.4", "tls_required": True}]) as url:
        assert await clusterlook.greeting(url) == ServerSeen(address=url, version="2.11.4", tls=True)
    for other in (b"HTTP/1.1 400 Bad Request\r\n", b"INFO {\r\n", b"INFO []\r\n"):
        async with serving(WELCOME, greetings=[other]) as url:
            assert not (await clusterlook.greeting(url)).version


def test_keys_and_certificates_are_found_with_their_rights_and_days(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "LIFE", timedelta(days=30))
    keyring = Keyring(tmp_path)
    keyring.ensure(["n1"])
    keyring.certify(["localhost"])
    keyring.path("n1").chmod(0o644)
    found = {os.path.relpath(each.path, tmp_path): each for each in clusterlook.files(tmp_path, time.time())}
    assert found["n1/n1.nk"].mode == 0o644
    assert found["ca/ca.key"].mode == found["console/tokens"].mode == 0o600
    assert found["server/tls.pem"].days == pytest.approx(30, abs=0.1)


def test_a_file_of_targets_is_read_and_what_is_none_is_refused(tmp_path):
    path = tmp_path / "targets.json"
    path.write_text(json.dumps([{"targets": ["a:1", "b:2"], "labels": {}}, {"targets": ["c:3"]}]))
    assert clusterlook.addresses(path) == ["a:1", "b:2", "c:3"]
    for bad in ("{", "[1]", '[{"targets": [1]}]', '[{"labels": {}}]'):
        path.write_text(bad)
        with pytest.raises(InvalidInputError, match="file_sd_configs"):
            clusterlook.addresses(path)

"""What `unicron task show` says of tasks, of a recorded journal; the commit of a task's folder."""

import json
import subprocess
from datetime import UTC, datetime

import pytest
from helpers.cli import printed
from msgspec.structs import replace
from replay import replayer
from unicron_cli.commit import with_commit
from unicron_cli.output import to_json
from unicron_cli.task import _read
from unicron_cli.taskview import account, view_of

from unicron.contracts.answers import Status, TaskView
from unicron.contracts.events import TaskSubmitted
from unicron.contracts.tasks import TaskSpec, TaskState
from unicron.observe.cluster import ClusterPicture

RECENT_S = [0.2, 0.1, 0.4, 0.2, 0.2]


@pytest.fixture(scope="module")
def cluster():
    picture = ClusterPicture()
    for position, message in enumerate(replayer.read("demo"), 1):
        picture.handle(position, message)
    return picture


def accounts(cluster, *names, **fields):
    views = [
        TaskView(spec=cluster.tasks[name].spec, state=TaskState.RUNNING, iteration=9, recent_s=RECENT_S, **fields)
        for name in names
    ]
    return [account(cluster, view, cluster.now, cluster.goodput) for view in views]


def rows(text):
    return {line.split("  ")[0]: line for line in text.splitlines() if line.strip()}


def test_a_task_tells_how_far_it_is_and_what_failures_have_cost_it(cluster):
    found = accounts(cluster, "gpt-b", loss=2.5)
    [task], text = found, printed(view_of(found), 300)
    left = task.iterations - 10
    assert (task.left.seconds, task.left.least) == pytest.approx((0.2 * left, 0.1 * left))
    assert task.left.most > 0.4 * left, "failures are counted in"
    assert f"10 of {task.iterations}" in rows(text)["done"]
    assert rows(text)["failures"].split()[-1] == str(task.struck) == "3"
    assert "task_hang" in rows(text)["GPU time lost to"]
    newest = datetime.fromtimestamp(task.failures[0].at, tz=UTC).astimezone()
    assert f"{newest:%Y-%m-%d %H:%M:%S}" in text
    assert "gpt-b:" in task.failures[-1].what, "a worker goes by its rank"
    assert [each.at for each in task.failures] == sorted((each.at for each in task.failures), reverse=True)
    assert all(f"chain {each.chain}" in text for each in task.failures)
    assert "--seed" in rows(text)
    assert json.loads(to_json(found))[0]["configuration"] == [list(each) for each in task.configuration]


def test_two_tasks_are_put_side_by_side_and_what_differs_is_marked(cluster):
    text = printed(view_of(accounts(cluster, "gpt-a", "gpt-b")))
    assert "--seed *" in rows(text)
    assert "--corpus" in rows(text), "it is the same for both"
    assert "--corpus *" not in rows(text)


def test_of_a_task_that_does_not_run_nobody_knows_how_long_it_takes(cluster):
    view = TaskView(spec=cluster.tasks["gpt-a"].spec, state=TaskState.WAITING, recent_s=RECENT_S)
    assert account(cluster, view, cluster.now, cluster.goodput).left is None
    failed = TaskView(spec=view.spec, state=TaskState.FAILED, traceback="KeyError: 'lr'")
    assert "KeyError: 'lr'" in printed(view_of([account(cluster, failed, cluster.now, cluster.goodput)]))
    unheard = TaskView(spec=TaskSpec(name="new", command=["x"]), state=TaskState.STARTING)
    assert account(cluster, unheard, cluster.now, cluster.goodput).goodput is None


class Journal:
    """A client of a cluster that had two tasks of one name."""

    def __init__(self, spec, messages):
        self.spec, self.messages = spec, messages

    async def status(self):
        return Status(tasks=[TaskView(spec=self.spec, state=TaskState.RUNNING)])

    async def tail(self):
        return len(self.messages)

    async def follow(self, first, last):
        for position, message in list(enumerate(self.messages, 1))[first:last]:
            yield position, message


async def test_what_an_earlier_task_of_its_name_cost_is_not_its_own(cluster):
    spec, before = cluster.tasks["gpt-b"].spec, list(replayer.read("demo"))
    [old] = await _read(Journal(spec, before), ["gpt-b"])
    again = TaskSubmitted(task="gpt-b", spec=spec, id="again", at=before[-1].at + 1.0, source="registry")
    [new] = await _read(Journal(spec, [*before, again]), ["gpt-b"])
    assert old.failures
    assert old.seconds["training"] > 0
    assert (new.failures, new.struck, new.seconds.get("training", 0.0)) == ([], 0, 0.0)


def git(folder, *words):
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True).stdout


def test_the_commit_is_that_of_the_folder_of_the_script(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("1")
    spec = TaskSpec(name="t", command=["python", "sub/train.py"], workdir=str(tmp_path))
    assert with_commit(spec).commit == "", "no repository"
    git(tmp_path / "sub", "init")
    git(tmp_path / "sub", "add", ".")
    git(tmp_path / "sub", "commit", "-m", "x")
    head = git(tmp_path / "sub", "rev-parse", "--short=12", "HEAD").strip()
    assert with_commit(spec).commit == head
    (tmp_path / "sub" / "train.py").write_text("2")
    assert with_commit(spec).commit == f"{head}-dirty"
    assert with_commit(replace(spec, workdir=str(tmp_path / "not there"))).commit == ""
    git(tmp_path / "sub", "checkout", ".")
    (tmp_path / "sub" / "new.py").touch()
    assert with_commit(spec).commit == head, "what a commit lacks beside the script is no part of it"
    (tmp_path / "sub" / "train[1].py").touch()  # as a pattern it would be train1.py
    git(tmp_path / "sub", "--literal-pathspecs", "add", "train[1].py")
    git(tmp_path / "sub", "commit", "-m", "y")
    head = git(tmp_path / "sub", "rev-parse", "--short=12", "HEAD").strip()
    assert with_commit(replace(spec, command=["python", "sub/train[1].py"])).commit == head
    unknown = replace(spec, command=["python", "sub/new.py"])
    assert with_commit(unknown).commit == f"{head}-dirty", "a script that git does not know is in no commit"

"""The agent's decisions: commands that it obeys, workers that it starts and ends, joining, facts, and stalls."""

import msgspec
import pytest
from unicron_agent.core import AgentCore
from unicron_agent.effects import (
    AbandonCopies,
    Kill,
    ObtainState,
    ReadToken,
    RemoveState,
    SendCopy,
    SendToWorker,
    StartProcess,
    StoreToken,
    UseStorage,
)
from unicron_agent.presence import ADOPTION_S, AGAIN_S
from unicron_agent.stimuli import (
    Adopted,
    CopySent,
    DepartureNotice,
    EntryRead,
    ProcessExited,
    ProcessStarted,
    Published,
    Reconnected,
    Shutdown,
    Tick,
    TokenRead,
    WorkerMessage,
    WorkerProcess,
)
from unicron_agent.workers import activity
from unicron_agent.workers.workers import StallLimits

from unicron import codec, subjects
from unicron.contracts import events
from unicron.contracts import worker as wire
from unicron.contracts.base import Message
from unicron.contracts.commands import DropStates, Regroup, ReleaseNode, SaveStates, StartWorker, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.slowdowns import ComputeTimed
from unicron.contracts.states import Keeper, ParkedSnapshot, Saver, StateLocation, StateRef
from unicron.contracts.storage import StoreOrder
from unicron.contracts.stragglers import RecordingSwitched
from unicron.contracts.tasks import Member, ParallelLayout, Slot, TaskSpec
from unicron.contracts.timings import Op

PLACE = {"node": "n1", "slot": 1, "task": "gpt", "worker": "gpt-1"}
CARD = events.NodeJoined(
    node="n1", incarnation="", host="h", slots=[Slot(index=0), Slot(index=1)], rendezvous="h:1", pid=7
)


class AgentHarness:
    """An agent's core, and a clock that a test sets."""

    def __init__(self, *found, token=0):
        self.core = AgentCore(CARD, "b", token, StallLimits(factor=3, stopped_s=0.5, hang_s=20))
        self.now, self.sequence, self.lease = 0.0, 0, token
        self.first = self.feed(Adopted([running(name) for name in found]))

    def feed(self, stimulus):
        return self.core.handle(stimulus, self.now)

    def read(self, message, source="transition", subject=None):
        out = self.hear(message, source, subject)
        self.lease = max(self.lease, getattr(message, "token", 0))
        return self.feed(TokenRead(self.lease)) if ReadToken() in out else out

    def hear(self, message, source="transition", subject=None):
        """Let a message come, and nobody read the lease."""
        self.sequence += 1
        message = msgspec.structs.replace(message, source=source, id="m1", correlation="chain")
        return self.feed(EntryRead(self.sequence, subject or subjects.for_message(message), codec.encode(message)))

    def say(self, message, name="gpt-1"):
        return self.feed(WorkerMessage(name, message))

    def run(self, name="gpt-1", slot=1):
        """Start a worker, as far as its first words."""
        [effect] = self.read(start(name, slot))
        assert isinstance(effect, StartProcess)
        assert self.feed(ProcessStarted(name, 42)) == []
        assert self.say(hello(name), name) == []

    def progress(self, *times, done=1, phase="compute"):
        """Let the worker finish a microbatch at each of `times`."""
        for offset, self.now in enumerate(times):
            self.say(wire.Progress(iteration=3, phase=phase, done=done + offset))

    def stalled(self, now, *stopped):
        self.now = now
        return [fact for fact in self.feed(Tick(stopped)) if isinstance(fact, events.WorkerStalled)]


def running(name, slot=1):
    return WorkerProcess(worker=name, task="gpt", slot=slot, pid=41, correlation="before")


def hello(name="gpt-1", **where):
    return wire.Hello(worker=name, pid=42, **where)


def away(scene):
    return [fact for fact in scene.feed(Tick()) if isinstance(fact, events.WorkerAway)]


def start(name="gpt-1", slot=1, token=0, **fields):
    spec = TaskSpec(name="gpt", command=["x"])
    return StartWorker(node="n1", token=token, slot=slot, worker=name, task="gpt", spec=spec, **fields)


def stop(name="gpt-1", token=0, node="n1", **fields):
    return StopWorker(node=node, token=token, slot=1, worker=name, task="gpt", **fields)


def regroup(*names, epoch=2):
    members = [Member(worker=name, node="n1", slot=1) for name in names]
    ranks = {"members": members, "world_size": 5, "ranks": [3, 4][: len(names)]}
    return Regroup(node="n1", task="gpt", epoch=epoch, rendezvous="h:1", **ranks)


def refusal(out, task="gpt", worker="gpt-1"):
    [fact] = [each for each in out if isinstance(each, events.CommandRefused)]
    assert (fact.command, fact.correlation, fact.task, fact.worker) == ("m1", "chain", task, worker)
    return fact.reason


@pytest.fixture
def scene():
    scene = AgentHarness()
    scene.run()
    return scene


# --- which commands are obeyed ---------------------------------------------------------------------------------------


def test_a_command_with_an_older_token_is_refused_and_the_newest_token_is_to_be_stored(scene):
    assert scene.read(stop(token=5)) == [StoreToken(5), Kill("gpt-1")]
    assert scene.read(stop(token=5)) == [Kill("gpt-1")]
    assert scene.read(stop(token=7)) == [StoreToken(7), Kill("gpt-1")]
    out = scene.read(stop(token=6))
    assert "token 6; 7" in refusal(out)
    assert len(out) == 1


def test_a_forged_token_is_refused_and_every_real_command_obeyed(scene):
    assert scene.read(stop(token=5)) == [StoreToken(5), Kill("gpt-1")]
    assert scene.hear(stop(token=2**53)) == [ReadToken()]
    assert scene.hear(stop(token=5)) == [], "in the order in which they came"
    forged, again = scene.feed(TokenRead(5))
    # no worker is named: no attempt to start it has failed
    assert "token 9007199254740992, which nobody was given: the lease holds 5" in refusal([forged], "", "")
    assert again == ReadToken()
    assert scene.feed(TokenRead(5)) == [Kill("gpt-1")]
    assert scene.hear(stop(token=5)) == [Kill("gpt-1")]


def test_a_token_given_out_after_the_question_is_asked_for_again(scene):
    assert scene.hear(stop(token=2**53)) == [ReadToken()]
    assert scene.hear(stop(token=8)) == []
    refused, again = scene.feed(TokenRead(7))
    assert refusal([refused], "", "")
    assert again == ReadToken()
    assert scene.feed(TokenRead(8)) == [StoreToken(8), Kill("gpt-1")]


def test_a_command_of_a_sender_that_was_replaced_since_is_obeyed_as_it_came_first(scene):
    assert scene.hear(stop(token=5)) == [ReadToken()]
    assert scene.feed(TokenRead(9)) == [StoreToken(5), Kill("gpt-1")]
    assert scene.read(stop(token=9)) == [StoreToken(9), Kill("gpt-1")]
    assert "token 5; 9" in refusal(scene.read(stop(token=5)))


def test_a_token_that_an_earlier_agent_stored_counts_if_it_was_given_out():
    out = AgentHarness(token=4).read(start(token=3))
    assert "token 3; 4" in refusal(out)
    assert out[-1].token == 3, "so that its sender's successor knows it for another's"
    scene = AgentHarness(token=2**62)  # as its file says, and nobody was given it
    assert scene.hear(start(token=7)) == [ReadToken()]
    stored, started = scene.feed(TokenRead(7))
    assert stored == StoreToken(7)
    assert isinstance(started, StartProcess)


def test_a_command_for_another_node_is_refused_and_its_token_forgotten(scene):
    assert scene.hear(stop(token=9, node="n2")) == [ReadToken()]
    [fact] = scene.feed(TokenRead(9))
    assert "'n2'" in refusal([fact])
    assert scene.read(stop(token=1)) == [StoreToken(1), Kill("gpt-1")]


def test_a_command_from_before_the_node_joined_anew_passes_without_effect(scene):
    [old] = scene.first
    [new] = scene.feed(Reconnected())
    assert scene.read(stop(incarnation=old.incarnation)) == []
    assert scene.read(stop(incarnation=new.incarnation)) == [Kill("gpt-1")]
    assert scene.read(stop()) == [Kill("gpt-1")]


def test_what_can_not_be_read_becomes_a_dead_letter(scene):
    [fact] = scene.feed(EntryRead(1, "unicron.v1.cmd.n1.StopWorker.gpt", b"\xc1"))
    assert fact == events.DeadLetter(subject="unicron.v1.cmd.n1.StopWorker.gpt", error=fact.error, payload=b"\xc1")
    [fact] = scene.read(stop(), subject="unicron.v1.cmd.n1.StopWorker.bert")
    assert "it belongs on unicron.v1.cmd." in fact.error


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_command_to_start_a_worker_that_is_repeated_starts_one_process():
    scene = AgentHarness()
    assert [type(each) for each in scene.read(start())] == [StartProcess]
    assert scene.read(start()) == []
    assert scene.feed(ProcessStarted("gpt-1", 42)) == []
    assert scene.read(start()) == []


def test_a_slot_that_is_taken_or_not_there_is_refused(scene):
    [fact] = scene.read(start("gpt-2", 1))
    assert fact.reason == "slot 1 is taken by worker gpt-1"
    [fact] = scene.read(start("gpt-2", 2))
    assert fact.reason == "slot 2: n1 has slots 0 to 1"


@pytest.mark.parametrize("ending", ["ordered", "finished"])
def test_a_worker_waits_until_the_last_process_in_its_slot_is_gone(scene, ending):
    scene.read(stop()) if ending == "ordered" else scene.say(wire.Finished(iterations=9))
    assert scene.read(start("gpt-2")) == []
    fact, effect = scene.feed(ProcessExited("gpt-1", 0))
    assert (fact.worker, fact.expected, fact.finished) == ("gpt-1", ending == "ordered", ending == "finished")
    assert isinstance(effect, StartProcess)
    assert effect.command.worker == "gpt-2"


def test_a_worker_that_is_stopped_while_it_waits_for_its_slot_never_starts(scene):
    scene.read(stop())
    scene.read(start("gpt-2"))
    [fact] = scene.read(stop("gpt-2"))
    assert (type(fact), fact.worker, fact.expected) == (events.WorkerExited, "gpt-2", True)
    assert [type(each) for each in scene.feed(ProcessExited("gpt-1", 0))] == [events.WorkerExited]


def test_a_worker_that_is_stopped_while_its_process_starts_is_killed_when_it_is_there():
    scene = AgentHarness()
    scene.read(start())
    assert scene.read(stop()) == [Kill("gpt-1")]
    assert scene.feed(ProcessStarted("gpt-1", 42)) == [Kill("gpt-1")]


def test_an_exit_carries_where_the_worker_was(scene):
    scene.progress(10.0, 10.1)
    gone = ProcessExited("gpt-1", None, 9, ("last words",), ("all_reduce #3",))
    how = {"signal": 9, "iteration": 3, "microbatches_done": 2, "stderr": ["last words"]}
    assert scene.feed(gone) == [events.WorkerExited(**PLACE, **how, collectives=["all_reduce #3"])]
    assert scene.core.workers == {}
    assert scene.feed(gone) == []
    assert scene.read(stop()) == []


# --- joining and leaving ---------------------------------------------------------------------------------------------


def test_a_node_without_workers_joins_at_once_and_then_beats():
    scene = AgentHarness()
    assert scene.first == [msgspec.structs.replace(CARD, incarnation="b.1")]
    beats = []
    for scene.now in (0.0, 0.1, 0.4, 0.5, 0.6, 1.1):
        beats += [
            (scene.now, each.incarnation) for each in scene.feed(Tick()) if isinstance(each, events.NodeHeartbeat)
        ]
    assert beats == [(0.0, "b.1"), (0.5, "b.1"), (1.1, "b.1")]


def test_a_node_beats_as_rarely_as_it_is_told_but_for_the_time_after_it_has_joined():
    scene = AgentHarness()
    told = events.NodeAdmitted(node="n1", incarnation="b.1", host="h", slots=[], heartbeat_s=8.0)
    assert scene.read(msgspec.structs.replace(told, incarnation="a.9", heartbeat_s=99.0), "registry") == []
    assert scene.read(told, "registry") == []

    def beats(since, until):
        found = []
        for tenth in range(round(10 * since), round(10 * until)):
            scene.now = tenth / 10
            found += [scene.now for each in scene.feed(Tick()) if isinstance(each, events.NodeHeartbeat)]
        return found

    assert beats(0.0, 30.0) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 10.5, 18.5, 26.5]
    assert scene.read(events.NodePaced(node="n1", incarnation="a.9", heartbeat_s=99.0), "registry") == []
    assert scene.read(events.NodePaced(node="n1", incarnation="b.1", heartbeat_s=3.0), "registry") == []
    assert beats(34.5, 42.0) == [34.5, 37.5, 40.5]
    scene.feed(Reconnected())
    assert beats(45.0, 52.0) == [45.0, 45.5, 46.0, 46.5, 47.0, 47.5, 50.5]


def test_adopted_workers_say_where_they_are_before_the_node_joins():
    scene = AgentHarness("gpt-1", "gpt-2")
    assert scene.first == []
    assert scene.say(hello("gpt-1", epoch=2, iteration=7, ready=True)) == []
    [joined] = scene.say(hello("gpt-2", epoch=2, iteration=7, ready=True), "gpt-2")
    told = [(each.worker, each.epoch, each.iteration, each.ready) for each in joined.workers]
    assert told == [("gpt-1", 2, 7, True), ("gpt-2", 2, 7, True)]


def test_the_end_of_an_adopted_worker_is_told_before_the_node_joins():
    scene = AgentHarness("gpt-1")
    exited, joined = scene.feed(ProcessExited("gpt-1"))
    assert (exited.worker, exited.exit_code, exited.signal) == ("gpt-1", None, None)
    assert joined.workers == []


def test_a_node_does_not_wait_for_ever_for_an_adopted_worker_that_says_nothing():
    scene = AgentHarness("gpt-1")
    assert scene.feed(Reconnected()) == []
    scene.now = ADOPTION_S - 0.01
    assert not [each for each in scene.feed(Tick()) if isinstance(each, Message)]
    scene.now = ADOPTION_S
    [joined, _beat] = [each for each in scene.feed(Tick()) if isinstance(each, Message)]
    assert [worker.worker for worker in joined.workers] == ["gpt-1"]
    assert scene.say(hello()) == [], "it joins once"


def test_a_node_joins_again_with_its_living_workers_after_the_bus_was_away(scene):
    scene.read(start("gpt-2", 0))
    scene.read(stop("gpt-2"))
    [joined] = scene.feed(Reconnected())
    assert joined.incarnation == "b.2"
    assert [worker.worker for worker in joined.workers] == ["gpt-1"]


def failure(method="node_health", node="n1", task=""):
    return events.FailureDetected(severity=Severity.SEV1, method=method, status="lost_connection", node=node, task=task)


@pytest.mark.parametrize(
    ("lost", "joined", "sequence", "rejoins"),
    [
        pytest.param(failure(), 7, 8, True, id="given up after it joined"),
        pytest.param(failure(), 7, 6, False, id="joined since"),
        pytest.param(failure(), None, 8, False, id="joining already"),
        pytest.param(failure("process_supervision"), 7, 8, False, id="given up for what happens on it"),
        pytest.param(failure(node="n2", task="n1"), 7, 9, False, id="a task of its name is given up"),
    ],
)
def test_a_node_that_lives_joins_again_when_it_is_given_up_for_its_silence(lost, joined, sequence, rejoins):
    scene = AgentHarness()
    [first] = scene.first
    if joined is not None:
        assert scene.feed(Published(first, joined)) == []
    scene.sequence = sequence - 1
    out = scene.read(lost, source="detector")
    assert [each.incarnation for each in out] == (["b.2"] if rejoins else [])


def test_a_node_given_up_before_it_knows_where_it_joined_joins_again_when_it_does():
    scene = AgentHarness()
    scene.sequence = 7
    assert scene.read(failure(), source="detector") == []
    [again] = scene.feed(Published(scene.first[0], 7))
    assert again.incarnation == "b.2"
    assert scene.feed(Published(scene.first[0], 9)) == [], "it is not that one that counts any more"
    assert scene.feed(Published(again, 9)) == []


def test_a_leaving_node_says_so_before_its_workers_end_and_then_does_nothing_more(scene):
    scene.read(start("gpt-2", 0))
    left, *kills = scene.feed(Shutdown())
    assert left == events.NodeLeft(node="n1", incarnation="b.1")
    assert kills == [Kill("gpt-1"), Kill("gpt-2")]
    scene.now = 9.0
    assert scene.feed(Tick()) == scene.feed(Reconnected()) == scene.read(start("gpt-3", 0)) == []
    [exited] = scene.feed(ProcessExited("gpt-1", None, 9))
    assert exited.expected
    assert scene.feed(ProcessStarted("gpt-2", 43)) == [Kill("gpt-2")]


def test_a_node_that_is_to_go_says_so_and_serves_on_until_it_is_told_that_it_may(scene):
    leaving = events.NodeLeaving(node="n1", incarnation="b.1", seconds=20.0)
    scene.read(ReleaseNode(node="n1", token=1, incarnation="b.1"))
    assert not scene.core.released, "it stays"
    assert scene.feed(DepartureNotice(20.0)) == [leaving]
    assert scene.read(start("gpt-2", 0)) != []
    [joined, again] = scene.feed(Reconnected())
    assert again == msgspec.structs.replace(leaving, incarnation=joined.incarnation), "the others may have missed it"
    scene.read(ReleaseNode(node="n1", token=1, incarnation="b.1"))
    assert not scene.core.released, "that was said of what was before"
    scene.read(ReleaseNode(node="n1", token=1, incarnation="b.2"))
    assert scene.core.released


# --- what workers are sent -------------------------------------------------------------------------------------------


def test_a_membership_goes_to_the_members_here_at_once_and_again_when_they_connect_anew(scene):
    [sent] = scene.read(regroup("gpt-1", "gone"))
    told = {"epoch": 2, "since": 2, "rendezvous": "h:1", "rendezvous_id": "", "rank": 3, "world_size": 5}
    member = Member(worker="gpt-1", node="n1", slot=1)
    assert sent == SendToWorker("gpt-1", wire.Membership(**told, member=member))
    assert scene.say(hello()) == [sent]


def test_workers_are_told_what_to_record_now_and_when_they_connect_later(scene):
    quarter = wire.Sample(period=4)
    switch = RecordingSwitched(task="gpt", share=0.25)
    assert scene.read(switch, "straggler") == [SendToWorker("gpt-1", quarter)]
    assert scene.read(RecordingSwitched(task="bert", share=0.0), "straggler") == []
    scene.read(start("gpt-2", 0))
    assert scene.say(hello("gpt-2"), "gpt-2") == [SendToWorker("gpt-2", quarter)]


def test_a_worker_that_asks_for_a_state_gets_it_from_the_shell(scene):
    location = StateLocation(node="n2", worker="gpt-9", name="gpt-9.3.state")
    ref = StateRef(task="gpt", iteration=3, place=0, location=location, size=1, checksum=b"c")
    assert scene.say(wire.FetchState(ref=ref)) == [ObtainState("gpt-1", ref)]


def test_a_quiet_worker_is_asked_whether_it_is_there(scene):
    def asked(now):
        scene.now = now
        return SendToWorker("gpt-1", wire.Ping()) in scene.feed(Tick())

    assert [asked(0.1), asked(0.3)] == [False, True]
    scene.say(wire.Pong())
    assert [asked(0.4), asked(0.6)] == [False, True]


# --- what workers say ------------------------------------------------------------------------------------------------

JOINED = {"epoch": 2, "rank": 0, "world_size": 3, "iteration": 7, "kept": 4, "recomputed": 2, "seconds": 0.1}
JOINED["state_from"] = "gpt-2"
DONE = {"iteration": 7, "epoch": 2, "world_size": 3, "seconds": 0.5, "loss": 2.5}


def test_what_a_worker_says_becomes_a_fact_with_its_place(scene):
    assert scene.say(wire.Ready()) == [events.WorkerReady(**PLACE, pid=42, correlation="chain")]
    assert scene.say(wire.Joined(**JOINED)) == [events.Regrouped(**PLACE, **JOINED, correlation="chain")]
    broken = {"epoch": 2, "iteration": 7, "error": "reset"}
    assert scene.say(wire.Broken(**broken)) == [events.CollectiveFailed(**PLACE, **broken)]
    raised = {"iteration": 7, "exception": "ValueError", "text": "no", "traceback": "..."}
    assert scene.say(wire.Raised(**raised)) == [events.WorkerRaised(**PLACE, **raised)]


def test_a_worker_that_is_ready_before_its_start_is_told_is_told_with_its_process():
    scene = AgentHarness()
    scene.read(start("gpt-1"))
    scene.say(hello())
    [ready] = scene.say(wire.Ready())
    assert ready.pid == hello().pid > 0


def test_a_new_membership_belongs_to_the_chain_of_its_command_and_not_to_that_of_the_start():
    scene = AgentHarness("gpt-1")
    scene.say(hello())
    assert scene.say(wire.Ready())[0].correlation == "before"
    scene.read(regroup("gpt-1"))
    assert scene.say(wire.Joined(**JOINED))[0].correlation == "chain"


def test_only_rank_0_tells_of_iterations(scene):
    assert scene.say(wire.Iterated(**DONE, rank=1)) == []
    assert scene.say(wire.Iterated(**DONE, rank=0)) == [events.IterationFinished(**PLACE, **DONE)]


def test_how_long_workers_compute_is_told_once_all_of_their_membership_here_have_said_it(scene):
    def computed(name, rank):
        said = scene.say(wire.Iterated(**DONE, rank=rank, computed_s=0.1), name)
        return [[each.worker for each in fact.workers] for fact in said if isinstance(fact, ComputeTimed)]

    scene.run("gpt-2", slot=0)
    assert computed("gpt-1", 1) == []
    assert computed("gpt-2", 2) == [["gpt-1", "gpt-2"]]


def test_what_a_worker_recorded_is_passed_on_of_every_rank(scene):
    op = Op(kind=1, microbatch=3, start_us=10, duration_us=20)
    fields = {"epoch": 2, "iteration": 20, "rank": 1, "world_size": 3, "began": 5.5, "ops": [op]}
    assert scene.say(wire.Timed(**fields)) == [events.StepTimed(**PLACE, **fields)]


def test_a_worker_nobody_knows_says_nothing(scene):
    assert scene.say(wire.Ready(), "gpt-9") == []


# --- who stalls ------------------------------------------------------------------------------------------------------


def test_a_stopped_worker_stalls_after_three_times_its_microbatch(scene):
    scene.progress(10.0, 10.4, 10.8, 11.2)
    assert scene.stalled(12.3, "gpt-1") == []
    [fact] = scene.stalled(12.5, "gpt-1")
    times = {"waited_s": pytest.approx(1.3), "limit_s": pytest.approx(1.2)}
    assert fact == events.WorkerStalled(**PLACE, epoch=-1, iteration=3, phase="compute", **times, responsive=False)
    assert scene.stalled(12.6, "gpt-1") == []  # once an iteration


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_that_runs_is_given_longer_whether_it_answers_or_is_starved(scene, answers):
    scene.progress(10.0, 10.1, 10.2)
    for scene.now in (30.0, 30.4):
        if answers:
            scene.say(wire.Pong())
        found = scene.stalled(scene.now + 0.1)
        assert bool(found) == (scene.now > 30.2)
    [fact] = found
    assert fact.responsive == answers
    assert fact.limit_s == 20


def updated(scene, at, iteration=3):
    scene.now = at
    scene.say(wire.Iterated(**DONE | {"iteration": iteration}, rank=0))


def test_what_a_script_does_between_two_iterations_is_no_stall_but_is_told(scene):
    scene.progress(10.0, 10.1)
    updated(scene, 10.2)
    told = []
    for scene.now in (15.0, 20.1, 20.3, 30.0, 31.0, 1800.0):
        told += [
            (scene.now, fact)
            for fact in scene.feed(Tick())
            if isinstance(fact, events.WorkerAway | events.WorkerStalled)
        ]
    [(at, away)] = told
    assert at == 20.3, "before those that wait for it are told to hang"
    assert away == events.WorkerAway(**PLACE, epoch=-1, iteration=4, waited_s=pytest.approx(10.1))
    [stalled] = scene.stalled(1810.3)
    assert (stalled.limit_s, stalled.iteration) == (1800.0, 4)


def test_it_is_told_each_time_anew(scene):
    for number in range(2):
        updated(scene, 100.0 * number, iteration=number)
        scene.now += 50.0
        [told] = away(scene)
        assert told.iteration == number + 1
        scene.say(wire.Progress(iteration=number + 1, phase="compute", done=0))
        scene.now += 15.0
        assert away(scene) == []


def test_it_is_told_again_for_a_membership_that_the_worker_has_not_noticed_yet(scene):
    updated(scene, 10.0)
    scene.now = 30.0
    [before] = away(scene)
    scene.read(regroup("gpt-1", epoch=7))
    [again] = away(scene)
    assert (before.epoch, again.epoch) == (-1, 7)
    assert away(scene) == []


def test_a_worker_that_is_stopped_between_two_iterations_stalls(scene):
    scene.say(wire.Ready())
    updated(scene, 10.0)
    assert len(scene.stalled(10.6, "gpt-1")) == 1


def test_who_waits_for_others_is_on_its_way_out_or_has_not_begun_does_not_stall(scene):
    assert scene.stalled(1000.0) == []
    scene.progress(10.0, 10.1)
    scene.progress(10.2, done=2, phase="waiting")
    assert scene.stalled(1000.0) == []
    scene.progress(1000.0)
    scene.read(stop())
    assert scene.stalled(2000.0, "gpt-1") == []


def test_a_worker_that_is_stopped_while_it_waits_is_told_though_it_answered_until_then(scene):
    scene.say(wire.Ready())
    scene.progress(10.0, 10.1)
    scene.progress(10.2, done=2, phase="waiting")
    scene.now = 20.0
    scene.say(wire.Pong())
    assert scene.stalled(20.4, "gpt-1") == []
    [fact] = scene.stalled(20.6, "gpt-1")
    assert not fact.responsive
    assert fact.waited_s == pytest.approx(0.6)


def test_a_worker_that_is_stopped_as_it_starts_is_told_once_it_has_greeted():
    scene = AgentHarness()
    scene.read(start())
    scene.feed(ProcessStarted("gpt-1", 42))
    assert scene.stalled(10.0, "gpt-1") == [], "it was never asked whether it is there"
    scene.say(hello())
    assert scene.stalled(10.4, "gpt-1") == []
    assert len(scene.stalled(10.6, "gpt-1")) == 1


def test_the_first_microbatch_after_a_wait_is_no_measure(scene):
    scene.progress(10.0, 10.1)
    scene.progress(10.2, done=2, phase="reduce")
    scene.progress(50.0, 50.1, done=0)
    assert scene.core.workers["gpt-1"].interval_s == pytest.approx(0.1)


# --- states that are left behind -------------------------------------------------------------------------------------


def left(name="gpt-1.2.kept"):
    location = StateLocation(node="n1", worker="gpt-1", name=name)
    return StateRef(task="gpt", iteration=7, place=0, location=location, size=4, checksum=b"")


def drop(*names):
    return DropStates(node="n1", task="gpt", names=list(names))


@pytest.mark.parametrize("greets", [False, True])
def test_what_a_worker_leaves_behind_is_told_and_named_whenever_the_node_joins_and_by_the_next_agent_too(scene, greets):
    kept = wire.Kept(epoch=2, state=left())
    out = scene.say(wire.Hello(worker="gpt-1", pid=1, epoch=2, ready=True, kept=kept) if greets else kept)
    assert [each for each in out if isinstance(each, events.StateKept)] == [
        events.StateKept(**PLACE, epoch=2, state=left())
    ]
    scene.feed(ProcessExited("gpt-1"))
    [card] = scene.feed(Reconnected())
    assert card.kept == ["gpt-1.2.kept"]


def test_what_is_dropped_is_removed_once_and_no_longer_named(scene):
    scene.say(wire.Kept(epoch=2, state=left()))
    assert scene.read(drop("gpt-1.2.kept", "gpt-9.2.kept")) == [RemoveState("gpt-1.2.kept")]
    assert scene.read(drop("gpt-1.2.kept")) == []
    [card] = scene.feed(Reconnected())
    assert card.kept == []


@pytest.mark.parametrize("name", ["gpt-2.2.kept", "gpt-1.3.kept", "gpt-1.2.state", "../gpt-1.2.kept", ""])
def test_a_file_that_a_worker_could_not_have_left_is_not_believed(scene, name):
    assert scene.say(wire.Kept(epoch=2, state=left(name))) == []
    assert scene.read(drop(name)) == []
    [card] = scene.feed(Reconnected())
    assert card.kept == []


def test_a_worker_that_goes_on_has_taken_back_what_it_left(scene):
    scene.say(wire.Kept(epoch=2, state=left()))
    scene.run("gpt-11", slot=0)
    scene.say(wire.Kept(epoch=2, state=left("gpt-11.2.kept")), "gpt-11")
    scene.say(wire.Joined(**JOINED | {"epoch": 3}))
    [card] = scene.feed(Reconnected())
    assert card.kept == ["gpt-11.2.kept"], "of another worker whose name begins alike"


def test_an_agent_that_comes_back_counts_what_lies_in_its_memory():
    core = AgentCore(CARD, "b")
    [card] = core.handle(Adopted([], ["gpt-1.2.kept"]), 0.0)
    assert card.kept == ["gpt-1.2.kept"]


def test_rank_0_alone_is_told_of_the_shelf(scene):
    scene.run("gpt-2", slot=0)
    shelf = ParkedSnapshot(layout=ParallelLayout(tensor=2), iteration=7, states=[left()])
    order = msgspec.structs.replace(regroup("gpt-1", "gpt-2"), ranks=[0, 1], leaving=True, shelf=shelf)
    told = [effect.message for effect in scene.read(order)]
    assert [(each.rank, each.leaving, each.shelf) for each in told] == [(0, True, shelf), (1, True, None)]


def saved(turn, iteration):
    location = StateLocation(node="n1", worker="gpt-1", name=f"gpt-1.{turn}.saved")
    return StateRef(task="gpt", iteration=iteration, place=0, location=location, size=9, checksum=b"x")


def saving(scene):
    """Have the worker save with a copy elsewhere and on storage; return the state of its iteration 3."""
    keepers, store = [Keeper(node="n2", address="h:2")], StoreOrder(root="/r", every_s=5.0, run="1")
    saver = Saver(worker="gpt-1", keepers=keepers, store=store)
    scene.read(SaveStates(node="n1", token=9, task="gpt", savers=[saver]))
    return saved(0, 3)


def test_a_state_goes_to_storage_when_the_worker_says_so_again_and_is_not_sent_twice(scene):
    ref = saving(scene)
    assert [type(each) for each in scene.say(wire.Saved(state=ref, epoch=0))] == [SendCopy]
    [effect] = scene.say(wire.Saved(state=ref, epoch=0, store=True))
    assert isinstance(effect, UseStorage)
    assert effect.job.ref == ref
    scene.feed(CopySent(ref, "n2"))
    assert scene.feed(Tick()) is not None
    assert scene.core.snapshots.present == {"gpt-1.0.saved": ref}


def test_what_a_worker_saved_that_gives_its_state_up_is_removed_and_nothing_saved_until_it_is_ordered_anew(scene):
    ref = saving(scene)
    scene.say(wire.Saved(state=ref, epoch=0))
    told = {"epoch": 4, "iteration": 3, "place": 0, "replica": 1, "digests": ["a", "b", "a"]}
    *effects, fact = scene.say(wire.Diverged(**told))
    assert effects == [
        AbandonCopies("gpt-1", frozenset({"n2"})),
        RemoveState("gpt-1.0.saved"),
        RemoveState("gpt-1.1.saved"),
        SendToWorker("gpt-1", wire.Save(on=False)),
    ]
    assert fact == events.StateDiverged(**PLACE, **told)
    assert scene.core.snapshots.present == {}
    late = scene.say(wire.Saved(state=saved(1, 3), epoch=0))
    assert late == [RemoveState("gpt-1.1.saved"), SendToWorker("gpt-1", wire.Save(on=False))]


def test_a_node_whose_name_another_has_is_silent_tries_again_and_takes_its_place_or_ends_its_workers_and_says_why():
    scene, refused = AgentHarness("gpt-1"), []
    scene.now = 1.0
    scene.feed(Tick())
    while not scene.core.presence.left:
        reason = f"number {len(refused) + 1}"
        out = scene.read(
            events.NodeRefused(node="n1", incarnation=scene.core.presence.incarnation, reason=reason), "registry"
        )
        refused.append(scene.core.presence.incarnation)
        scene.now += AGAIN_S
        out += scene.feed(Tick())
        assert not [each for each in out if isinstance(each, events.NodeHeartbeat | events.NodeLeft)]
    assert refused == [f"b.{number + 1}" for number in range(len(refused))]
    assert [type(each) for each in out] == [events.Alert, Kill]
    assert scene.core.presence.fault == reason

    scene = AgentHarness()
    scene.read(events.NodeRefused(node="n1", incarnation="b.1", reason="there"), "registry")
    scene.now = AGAIN_S
    scene.feed(Tick())
    scene.read(events.NodeAdmitted(node="n1", incarnation="b.2", host="h", slots=[]), "registry")
    assert events.NodeHeartbeat(node="n1", incarnation="b.2") in scene.feed(Tick())


def test_how_much_wants_to_run_here_is_told_with_how_long_workers_compute(scene, tmp_path, monkeypatch):
    file, pressure, shares = tmp_path / "cpu", activity.Pressure(), []
    monkeypatch.setattr(activity, "PRESSURE", file)
    for at, waited_s in ((100.0, 7.0), (100.25, 7.5), (101.0, 7.375), (101.25, 8.0)):
        file.write_text(f"some avg10=1.00 avg60=1.00 avg300=0.00 total={waited_s * 1e6:.0f}\nfull avg10=0.00 total=0\n")
        shares.append(pressure.share(at))
    assert shares == [0.0, 0.0, 0.375, 0.375]
    scene.feed(Tick(pressure=shares[-1]))
    said = scene.say(wire.Iterated(**DONE, rank=0, computed_s=0.1))
    [timed] = [each for each in said if isinstance(each, ComputeTimed)]
    assert timed.pressure == 0.375
    file.unlink()
    monkeypatch.setattr(activity.os, "getloadavg", lambda: (4.0 * activity.os.cpu_count(), 0.0, 0.0))
    assert pressure.share(102.0) == 0.75


def test_a_worker_that_is_to_wait_starts_later_or_never():
    scene = AgentHarness()
    assert scene.read(start("a", 0, wait_s=8.0)) == scene.read(start("b", 1, wait_s=8.0)) == []
    [exited] = [fact for fact in scene.read(stop("b")) if isinstance(fact, events.WorkerExited)]
    assert exited.worker == "b"
    begun = []
    for scene.now in (7.9, 8.0, 9.0):
        begun.append([each.command.worker for each in scene.feed(Tick()) if isinstance(each, StartProcess)])
    assert begun == [[], ["a"], []]


def test_of_the_workers_that_outlived_an_agent_those_in_slots_that_are_gone_are_ended():
    scene = AgentHarness()
    assert scene.feed(Adopted([running("a", 0), running("b", 2)])) == [Kill("b")]
    [joined] = scene.feed(Reconnected())
    assert [each.worker for each in joined.workers] == ["a"]

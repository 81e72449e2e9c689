import msgspec
import pytest
from unicron_cli.samples import sample
from unicron_narration.story import chain_of, describe, find_chain, line, story

from unicron import codec
from unicron.contracts.events import Alert, FailureDetected, WorkerExited, WorkerFinished, WorkerReady
from unicron.contracts.failures import Severity
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.errors import InvalidInputError


def message(own, chain="", at=100.0, text="hello"):
    return Alert(id=own, correlation=chain, at=at, source="detector", text=text)


@pytest.mark.parametrize("kind", codec.MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_every_message_can_be_said_in_one_line(kind):
    said = describe(sample(kind))
    assert said
    assert "\n" not in said
    assert len(said) <= 160
    assert "(" not in said.partition(" ")[0], "no raw struct"


def test_a_straggler_says_who_it_is_and_what_to_do():
    found = msgspec.structs.replace(sample(StragglerDetected), slowdown=1.3333, drain=False)
    assert describe(found) == (
        "gpt is 1.33 times as slow as it could be: slow-worker gpt-w3 on node-1:1: Drain the node of rank 1."
    )
    assert "its node is drained" in describe(msgspec.structs.replace(found, drain=True))
    assert describe(sample(RecordingSwitched)) == "gpt: 0.1 of the iterations are recorded"


def test_a_worker_that_is_ready_or_through_is_named_with_its_place():
    assert describe(sample(WorkerReady)) == "gpt-w3 on node-1:1 is ready"
    assert describe(sample(WorkerFinished)) == "gpt-w3 on node-1:1 has done all 50 iterations"


def test_a_failure_says_what_a_person_wants_to_know():
    failure = FailureDetected(
        severity=Severity.SEV1,
        escalated=Severity.SEV2,
        method="m",
        status="exited_abnormally",
        task="gpt",
        node="node-2",
        worker="w3",
        reason="killed",
    )
    assert describe(failure) == "sev1 exited_abnormally gpt w3 node-2, raised from sev2: killed"
    exited = WorkerExited(node="node-2", slot=1, task="gpt", worker="w3", signal=9, iteration=7)
    assert describe(exited) == "w3 on node-2:1 ended by signal 9, in iteration 7"
    exited = msgspec.structs.replace(exited, signal=None, exit_code=0, expected=True)
    assert describe(exited) == "w3 on node-2:1 ended by exit code 0, as it was told, in iteration 7"


def test_long_and_many_lined_texts_become_one_short_line():
    said = describe(message("a", text="one\ntwo " + "x" * 500))
    assert said.startswith("one two xxx")
    assert said.endswith("…")


def test_a_line_of_the_list_has_the_id_to_ask_the_chain_with():
    assert "deadbeef" in line(message("a", "deadbeef"))
    assert chain_of(message("a")) == "a"


def test_the_story_has_its_chain_only_in_order_with_offsets():
    journal = [
        message("f1", at=100.0, text="first"),
        message("x1", at=100.1, text="other"),
        message("a1", "f1", at=100.25, text="second"),
        message("a2", "f1", at=101.5, text="third"),
    ]
    for wanted in ("f1", "a2", "a1"):
        chain = find_chain(journal, wanted)
        assert [each.id for each in chain] == ["f1", "a1", "a2"]
    lines = story(chain)
    assert [text.split()[0] for text in lines] == ["+0.000", "+0.250", "+1.500"]
    assert [text.split()[-1] for text in lines] == ["first", "second", "third"]


def test_the_beginning_of_an_id_will_do_where_it_fits_one_chain():
    journal = [message("abc1"), message("abd2"), message("zz", "abc1")]
    assert [each.id for each in find_chain(journal, "abc")] == ["abc1", "zz"]
    with pytest.raises(InvalidInputError, match="fits 2 chains"):
        find_chain(journal, "ab")
    for unknown in ("nope", ""):
        with pytest.raises(InvalidInputError, match="unicron events"):
            find_chain(journal, unknown)

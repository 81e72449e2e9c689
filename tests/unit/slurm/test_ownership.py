"""No job takes for its own what another one left under its number; one of the same task goes on with what was left."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron_deploy.slurm import outcome
from unicron_deploy.slurm.outcome import FINISHED, GIVEN_UP, UNFINISHED, Outcome
from unicron_deploy.slurm.ownership import Owner, claim, claim_given

from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError

SPEC = TaskSpec(name="gpt", command=["python", "train.py", "--lr", "0.1"], workdir="/home/me")
OTHER = replace(SPEC, name="eval", command=["python", "eval.py"])
OWN = Owner(cluster="alpha", family="7", job="7", submitted=100.0, restarts=0, spec=SPEC)

jobs = st.builds(
    Owner,
    cluster=st.sampled_from(["alpha", "beta"]),
    family=st.sampled_from(["7", "8"]),
    job=st.just(""),
    submitted=st.sampled_from([100.0, 200.0]),
    restarts=st.just(0),
    spec=st.sampled_from([SPEC, OTHER, replace(SPEC, command=[*SPEC.command, "-v"])]),
).map(lambda each: replace(each, job=each.family))
ends = st.sampled_from([FINISHED, UNFINISHED, GIVEN_UP, None])


def had(folder, own, status, queued=frozenset(), take=claim):
    """Have a job get a folder and end; return what it got."""
    got = take(folder, own, queued) if take is claim else take(folder, own)
    if status is not None:
        outcome.write(got.root, Outcome(family=own.family, status=status))
    os.close(got.held)
    return got


@given(st.lists(st.tuples(jobs, ends), max_size=6), jobs)
def test_what_a_job_finds_is_its_own_or_was_left_unfinished_by_the_same_task(before, own):
    with TemporaryDirectory() as folder:
        base, told, seen = Path(folder), {}, []
        for each, status in before:
            alive = frozenset(other.job for other, end in seen if end == UNFINISHED)  # none goes on with another's
            got = had(base, each, status, alive)
            told[got.root] = (each, status)
            seen.append((each, status))
        try:
            got = had(base, own, None)
        except InvalidInputError:
            same = [each.spec == own.spec and status in {UNFINISHED, None} for each, status in told.values()]
            assert sum(same) > 1
            return
        if got.root in told:
            found, status = told[got.root]
            identity = (found.cluster, found.family, found.submitted, found.spec)
            if identity != (own.cluster, own.family, own.submitted, own.spec):
                assert (found.cluster, found.spec) == (own.cluster, own.spec)
                assert status in {UNFINISHED, None}
        else:
            assert got.before is None


@pytest.mark.parametrize(
    "other",
    [
        {"cluster": "beta"},
        {"submitted": 200.0},
        {"spec": OTHER},
        {"spec": replace(SPEC, command=["python", "train.py", "--lr", "0.2"])},
        {"spec": replace(SPEC, workdir="/home/me/other")},
    ],
    ids=["another cluster", "Slurm begun anew", "another script", "other arguments", "another folder"],
)
def test_another_job_of_the_same_number_has_a_folder_of_its_own_and_the_first_stays(tmp_path, other):
    first = had(tmp_path, OWN, FINISHED)
    kept = {path: path.read_bytes() for path in first.root.iterdir()}
    second = had(tmp_path, replace(OWN, **other), None)
    assert (first.root.name, second.root.name) == ("7", "7-2")
    assert second.before is None
    assert f"{first.root} is of job 7 of cluster alpha, for 'python train.py --lr 0.1'" in second.note
    assert {path: path.read_bytes() for path in first.root.iterdir()} == kept


def test_a_folder_of_unknown_origin_is_nobodys(tmp_path):
    (tmp_path / "7").mkdir()
    outcome.write(tmp_path / "7", Outcome(family="7", status=FINISHED))
    got = had(tmp_path, OWN, None)
    assert (got.root.name, got.before) == ("7-2", None)
    assert "nobody knows which job" in got.note
    with pytest.raises(InvalidInputError, match="nothing says which one it was: give another --dir"):
        claim_given(tmp_path / "7", OWN)


def test_a_requeued_job_finds_its_folder_though_slurm_says_it_was_submitted_later(tmp_path):
    had(tmp_path, replace(OWN, cluster="beta"), FINISHED)
    first = had(tmp_path, OWN, UNFINISHED)
    again = had(tmp_path, replace(OWN, submitted=300.0, restarts=1), FINISHED)
    assert again.root == first.root
    assert again.before.unfinished
    later = had(tmp_path, replace(OWN, job="9"), None)  # of its array, and never requeued
    assert (later.root, later.before.status) == (first.root, FINISHED)


def test_a_job_goes_on_with_what_one_of_its_task_has_left(tmp_path):
    left = had(tmp_path, OWN, UNFINISHED)
    next_one = replace(OWN, family="8", job="8", submitted=200.0)
    for still in ({"7"}, {"8", "7"}):  # it is to be requeued
        waits = had(tmp_path, next_one, FINISHED, frozenset(still))
        assert waits.root != left.root
    later = had(tmp_path, replace(OWN, family="9", job="9"), FINISHED)
    assert later.root == left.root
    assert later.note.startswith(f"goes on with what job 7 has left in {left.root}")
    assert had(tmp_path, replace(OWN, family="10", job="10"), None).root.name == "10"  # that one is done


def test_what_is_kept_for_another_job_is_left_to_it(tmp_path):
    left = had(tmp_path, OWN, UNFINISHED)
    outcome.write(left.root, Outcome(family="7", status=UNFINISHED, heir="8"))
    other, heir = (replace(OWN, family=number, job=number) for number in ("9", "8"))
    assert had(tmp_path, other, FINISHED, frozenset({"8", "9"})).root != left.root
    assert had(tmp_path, heir, None, frozenset({"8"})).root == left.root


def test_where_two_were_left_the_user_is_asked(tmp_path):
    had(tmp_path, OWN, UNFINISHED)
    had(tmp_path, replace(OWN, family="8", job="8"), UNFINISHED, frozenset({"7"}))
    with pytest.raises(
        InvalidInputError, match=r"gpt was left unfinished in \S*/7, \S*/8: give one of them with --dir"
    ):
        claim(tmp_path, replace(OWN, family="9", job="9"), frozenset())


@pytest.mark.parametrize("status", [FINISHED, UNFINISHED, None])
def test_a_folder_that_is_given_is_refused_to_another_task(tmp_path, status):
    had(tmp_path / "runs", OWN, status, take=claim_given)
    changed = replace(SPEC, command=["python", "train.py", "--lr", "0.2"])
    with pytest.raises(InvalidInputError) as refused:
        claim_given(tmp_path / "runs", replace(OWN, family="8", job="8", spec=changed))
    assert "of job 7 of cluster alpha (command ['python', 'train.py', '--lr', '0.1'] -> " in str(refused.value)
    assert str(refused.value).endswith("or give another --dir")
    same = had(tmp_path / "runs", replace(OWN, cluster="beta", family="9"), None, take=claim_given)
    assert (same.before.status if same.before else None) == status


def test_a_task_that_has_failed_is_mended_in_the_same_folder(tmp_path):
    had(tmp_path, OWN, GIVEN_UP, take=claim_given)
    mended = had(tmp_path, replace(OWN, spec=OTHER), None, take=claim_given)
    assert mended.before is None


def test_only_one_job_at_a_time_has_a_folder(tmp_path):
    got = claim(tmp_path, OWN, frozenset())
    for take in (lambda: claim(tmp_path, OWN, frozenset()), lambda: claim_given(got.root, OWN)):
        with pytest.raises(InvalidInputError, match="another job works in"):
            take()
    os.close(got.held)

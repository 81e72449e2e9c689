"""How the machines of one `unicron run` find one another, and what the first one does where some are missing."""

from pathlib import Path

import pytest
from unicron_cli.leading import Attendance
from unicron_cli.meeting import Meeting, Nodes, is_own
from unicron_cli.token import seconds

from unicron.errors import InvalidInputError


def test_machines_are_counted_as_torchrun_does():
    assert [Nodes.parse(text) for text in ("1", "4", "2:8")] == [(1, 1), (4, 4), (2, 8)]
    for text in ("", "0", "4:2", "x", "1:2:3", "10001"):
        with pytest.raises(InvalidInputError, match="give N or MIN:MAX"):
            Nodes.parse(text)


@pytest.mark.parametrize(
    ("run_id", "environ", "name"),
    [
        ("mine", {"SLURM_JOB_ID": "7"}, "mine"),
        ("", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7.0"),
        ("", {}, "head-29400"),
        ("../../etc/x", {}, "..-..-etc-x"),
    ],
)
def test_all_machines_of_a_run_look_for_the_token_in_one_place(run_id, environ, name):
    meeting = Meeting.of("head", run_id, None, None, environ)
    assert (meeting.host, meeting.port) == ("head", 29400)
    assert meeting.token_file == Path.home() / ".unicron" / "run" / f"{name}.token"
    other = Meeting.of("head:1234", run_id, None, Path("t"), environ)
    assert (other.port, other.id, other.token_file) == (1234, name.replace("29400", "1234"), Path("t"))


@pytest.mark.parametrize("endpoint", ["", "head:", "head:0", "head:70000", "a b", "nats://head:1"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(InvalidInputError, match="give HOST or HOST:PORT"):
        Meeting.of(endpoint, "", None, None, {})


def test_the_first_machine_is_that_of_rank_0_else_the_one_with_the_address():
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    with pytest.raises(InvalidInputError, match="no machine has that name"):
        is_own("nobody.invalid")
    assert Meeting.of("127.0.0.1", "", None, None, {}).leads
    assert not Meeting.of("127.0.0.1", "", 1, None, {}).leads
    assert Meeting.of("192.0.2.1", "", 0, None, {}).leads


def test_a_folder_that_others_could_have_made_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    meeting = Meeting.of("head", "r", 1, None, {})
    assert meeting.run_dir().name == "r-1"
    [above] = tmp_path.iterdir()
    above.chmod(0o755)
    with pytest.raises(InvalidInputError, match="not yours alone"):
        meeting.run_dir()
    above.rename(tmp_path / "other")
    above.symlink_to(tmp_path / "other")
    with pytest.raises(InvalidInputError, match="not yours alone"):
        meeting.run_dir()


def test_too_few_machines_for_too_long_end_a_run_by_name():
    there = Attendance(Nodes(2, 3), 600.0)
    assert there.problem(["node-1"], 0.0) == there.problem(["node-1"], 599.0) == ""
    assert there.problem(["node-1"], 600.0) == "1 of 2 machines for 600 s (node-1 is there)"
    assert there.problem(["node-1", "node-2"], 601.0) == there.problem(["node-1"], 602.0) == ""
    assert there.problem([], 1202.0) == "0 of 2 machines for 600 s (none is there)"


def test_a_lifetime_is_given_in_the_usual_units():
    assert [seconds(text) for text in ("90", "90s", "30m", "1h", "7d")] == [90, 90, 1800, 3600, 604800]
    for text in ("", "0", "-1h", "1.5h", "31d", "1w"):
        with pytest.raises(InvalidInputError, match="give a time as 90s, 30m, 1h or 7d"):
            seconds(text)

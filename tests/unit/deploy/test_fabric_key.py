"""The fabric key: the same for all nodes, nobody else's, replaced as a whole, and another when a node is shut out."""

import os
import stat
import time

import pytest
from unicron_deploy.keys import OVERLAP_S, Keyring

from unicron import fabric_proofs
from unicron.errors import InvalidInputError


@pytest.fixture
def ring(tmp_path):
    ring = Keyring(tmp_path / "keys")
    ring.ensure(["n1", "n2", "n3"])
    return ring


def files(ring):
    return {path.parent.name: path.read_bytes() for path in ring.folder.glob("*/fabric.key")}


def held(ring, node, now=None):
    return fabric_proofs.keys_in(ring.fabric(node).read_bytes(), time.time() if now is None else now)


def test_all_nodes_have_the_same_and_nobody_else_has_it(ring):
    found = files(ring)
    assert sorted(found) == ["n1", "n2", "n3"]
    assert len({*found.values()}) == 1
    assert {stat.S_IMODE(ring.fabric(node).stat().st_mode) for node in found} == {0o600}
    ring.ensure(["n1", "n4"])
    assert files(ring) == found | {"n4": found["n1"]}
    ring.admit("n5")
    assert files(ring)["n5"] == found["n1"]
    [key] = held(ring, "n1")
    assert key.hex() not in ring.accounts.read_text()
    other = Keyring(ring.folder.parent / "others")
    other.ensure(["n1"])
    assert held(other, "n1") != [key]


def test_a_new_one_stands_beside_the_old_one_for_a_while(ring):
    [old] = held(ring, "n1")
    assert ring.rotate_fabric() == [ring.fabric(node) for node in ("n1", "n2", "n3")]
    assert len({*files(ring).values()}) == 1
    new, before = held(ring, "n2")
    assert (before, new != old) == (old, True)
    assert held(ring, "n2", time.time() + OVERLAP_S + 1.0) == [new]
    ring.rotate_fabric()
    assert held(ring, "n3")[1:] == [new], "that before the last one opens nothing"
    with pytest.raises(InvalidInputError, match="no node has a key in"):
        Keyring(ring.folder.parent / "none").rotate_fabric()


def test_a_node_that_is_shut_out_keeps_nothing_that_opens_the_others(ring):
    [old] = held(ring, "n1")
    ring.rotate_fabric()
    known = {old, *held(ring, "n2")}
    assert ring.shut_out("n2") == [ring.fabric("n1"), ring.fabric("n3")]
    assert sorted(files(ring)) == ["n1", "n3"]
    assert len({*files(ring).values()}) == 1
    assert not known & {*held(ring, "n1")}
    new = held(ring, "n1")
    assert ring.shut_out("subscriber") == []
    ring.ensure(["n1", "n2", "n3"])
    assert sorted(files(ring)) == ["n1", "n3"]
    ring.admit("n2")
    assert held(ring, "n2") == held(ring, "n1") == new


def test_a_change_that_was_cut_off_is_made_whole_by_the_next(ring):
    before = ring.fabric("n3").read_bytes()
    ring.rotate_fabric()
    new = ring.fabric("n1").read_bytes()
    ring.fabric("n3").write_bytes(before)
    newest = time.time_ns() + 1_000_000
    os.utime(ring.fabric("n1"), ns=(newest, newest))
    ring.ensure([])
    assert {*files(ring).values()} == {new}


def test_what_stands_for_the_key_is_no_nodes_name(ring):
    with pytest.raises(InvalidInputError, match="call the node otherwise"):
        ring.admit("fabric")


def test_one_that_others_may_read_is_not_handed_on(ring):
    for node in ("n1", "n2", "n3"):
        ring.fabric(node).chmod(0o644)
    with pytest.raises(InvalidInputError, match=r"fabric\.key: others than its owner may read or write this key"):
        ring.admit("n4")
    assert not ring.path("n4").exists()
    assert "n4" not in files(ring)


def test_keys_of_a_cluster_whose_servers_speak_tls_are_not_taken_for_those_of_one_whose_do_not(ring):
    (ring.folder / "operator" / "ca.pem").write_text("another's")
    with pytest.raises(InvalidInputError, match=r"operator/ca\.pem is of another cluster.*remove .*keys"):
        ring.ensure(["node-1"])

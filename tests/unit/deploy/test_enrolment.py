"""Which join token lets whom in, what a keyring does with whom it lets in, and what a token shows of itself."""

import stat

import nkeys
import pytest
from msgspec.structs import replace
from unicron_deploy.enrolment.core import Book
from unicron_deploy.keys import Keyring

from unicron.bus.joining import token_in
from unicron.contracts.enrolment import JoinRequest
from unicron.contracts.queries import CreateToken
from unicron.errors import InvalidInputError
from unicron.files import write_secret
from unicron.jointoken import JoinToken

AUTHORITY = bytes(range(256)) * 2
TOKEN = JoinToken.new(AUTHORITY)
ORDER = CreateToken(token=TOKEN.id, digest=TOKEN.digest, pool="gpu", uses=2, seconds=60.0, by="ada@desk")


def public(number):
    seed = nkeys.encode_seed(bytes([number]) * 32, nkeys.PREFIX_BYTE_USER)
    return nkeys.from_seed(bytearray(seed)).public_key.decode()


KEY, OTHER = public(1), public(2)
ASKED = JoinRequest(token=TOKEN.id, secret=TOKEN.secret, node="n1", public_key=KEY)


@pytest.fixture
def book():
    return Book().added(ORDER, 1000.0)


def test_a_token_lets_in_as_many_as_it_may_and_counts_one_once_that_asks_again(book):
    book, fact = book.admitted(ASKED, {}, 1001.0)
    assert (fact.node, fact.pool, fact.token, fact.public_key, fact.uses_left) == ("n1", "gpu", TOKEN.id, KEY, 1)
    again, _ = book.admitted(ASKED, {"n1": KEY}, 1002.0)
    assert again == book
    book, fact = book.admitted(replace(ASKED, node="n2", public_key=OTHER), {"n1": KEY}, 1003.0)
    assert fact.uses_left == 0
    [view] = book.views(1004.0)
    assert (view.state, [use.node for use in view.used], view.by) == ("used up", ["n1", "n2"], "ada@desk")
    assert book.admitted(ASKED, {"n1": KEY}, 1005.0)[0] == book, "its answer was lost"


@pytest.mark.parametrize(
    ("change", "at", "why"),
    [
        ({}, 1060.0, r"expired at 1970-01-01 00:17:40 UTC; .*`unicron token create`"),
        ({"token": "00000000"}, 1001.0, "unknown here: it is another cluster's"),
        ({"secret": bytes(32)}, 1001.0, "another secret than the one shown: it is forged"),
        ({"pool": "cpu"}, 1001.0, "is for pool gpu, not for cpu: leave UNICRON_POOL out"),
    ],
)
def test_a_token_that_does_not_hold_is_refused_by_name_with_the_cure(book, change, at, why):
    with pytest.raises(InvalidInputError, match=why):
        book.admitted(replace(ASKED, **change), {}, at)


def test_a_token_of_one_machine_is_for_that_alone():
    book = Book().added(replace(ORDER, machine="gpu-7f3a"), 1000.0)
    with pytest.raises(InvalidInputError, match="for machine gpu-7f3a alone, not for none"):
        book.admitted(ASKED, {}, 1001.0)
    assert book.admitted(replace(ASKED, machine="gpu-7f3a"), {}, 1001.0)[1].machine == "gpu-7f3a"


def test_a_token_that_was_used_up_or_revoked_lets_nobody_in(book):
    once = Book().added(replace(ORDER, uses=1), 1000.0).admitted(ASKED, {}, 1001.0)[0]
    with pytest.raises(InvalidInputError, match=r"used up: 1 of 1 came by it \(n1\)"):
        once.admitted(replace(ASKED, node="n2", public_key=OTHER), {"n1": KEY}, 1002.0)
    with pytest.raises(InvalidInputError, match="was revoked"):
        book.revoked(TOKEN.id).admitted(ASKED, {}, 1001.0)
    with pytest.raises(InvalidInputError, match="no token 00000000"):
        book.revoked("00000000")
    with pytest.raises(InvalidInputError, match="already"):
        book.added(ORDER, 1001.0)


def test_only_the_hash_of_a_token_is_kept_and_none_that_was_over_long_ago(book):
    assert TOKEN.secret not in repr(book).encode("latin-1", errors="replace")
    assert book.tokens[TOKEN.id].digest == TOKEN.digest != TOKEN.secret
    later = book.added(replace(ORDER, token="11111111"), 1060.0 + 31 * 86400)
    assert list(later.tokens) == ["11111111"]


def test_a_token_is_one_line_that_shows_its_secret_nowhere_else(tmp_path):
    assert JoinToken.parse(TOKEN.line()) == TOKEN
    assert str(TOKEN) == repr(TOKEN) == f"JoinToken({TOKEN.id})"
    path = tmp_path / "t"
    write_secret(path, TOKEN.line().encode())
    assert token_in(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(InvalidInputError, match="others than its owner may read"):
        token_in(path)
    for text in ("", "unicron.1.2.3", TOKEN.line()[:60], TOKEN.line().replace("unicron", "kubeadm")):
        with pytest.raises(InvalidInputError, match="give a file made by `unicron token create`") as told:
            JoinToken.parse(text)
        assert TOKEN.line().split(".")[2] not in str(told.value)


# --- the keys --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(tmp_path):
    ring = Keyring(tmp_path / "keys")
    ring.ensure(["n0"], enrols=True)
    ring.certify(["127.0.0.1"])
    return ring


def test_a_node_that_made_its_key_itself_is_let_in_like_another(ring):
    ring.enrol("n1", KEY)
    assert ring.users()["n1"] == KEY
    assert KEY in ring.accounts.read_text()
    assert not ring.path("n1").exists()
    ring.ensure(["n0", "n1"], enrols=True)
    ring.certify(["127.0.0.1"])
    assert not ring.path("n1").exists(), "no second key for it"
    assert stat.S_IMODE(ring.public("n1").parent.stat().st_mode) == 0o700
    with pytest.raises(InvalidInputError, match="made its key itself"):
        ring.rotate("n1")
    ring.shut_out("n1")
    assert "n1" not in ring.users()
    with pytest.raises(InvalidInputError, match=r"shut out; `unicron credentials forget n1`"):
        ring.enrol("n1", KEY)
    ring.forget("n1")
    ring.enrol("n1", OTHER)
    assert ring.users()["n1"] == OTHER


@pytest.mark.parametrize(
    ("name", "key", "why"),
    [
        ("n0", KEY, "another machine is n0.*UNICRON_NODE.*forget n0"),
        ("registry", KEY, "rights of its own"),
        ("enroller", KEY, "rights of its own"),
        ("joiner", KEY, "rights of its own"),
        ("server", KEY, "stands for something else"),
        ("n1", KEY[:-1] + ("A" if KEY[-1] != "A" else "B"), "no public key of a user"),
        ("n1", "U" * 56, "no public key of a user"),
    ],
)
def test_who_can_not_be_let_in_changes_nothing(ring, name, key, why):
    before = ring.users(), ring.accounts.read_text()
    with pytest.raises(InvalidInputError, match=why):
        ring.enrol(name, key)
    assert (ring.users(), ring.accounts.read_text()) == before


def test_nobody_is_let_in_with_anothers_public_key(ring):
    with pytest.raises(InvalidInputError, match="registry's already"):
        ring.enrol("n1", ring.users()["registry"])


def test_papers_are_for_the_one_who_asks_whatever_the_request_says(ring):
    for request in (b"", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"):
        with pytest.raises(InvalidInputError, match="no certificate request"):
            ring.papers("n0", request)
    with pytest.raises(InvalidInputError, match="n9 has no key here"):
        ring.papers("n9", b"")

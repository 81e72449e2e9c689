"""Records of a script's ranks that are unpickled, and that are refused."""

import pytest
from msgspec.structs import replace

from unicron.contracts.worker import NOWHERE
from unicron.train.scripts.kinds import NotCarriedError
from unicron.train.scripts.records import Records, untrusted_reason

OPEN = replace(NOWHERE, rendezvous="10.0.0.7:4000")


def test_on_other_machines_nothing_is_unpickled_without_a_fabric_key():
    assert "UNICRON_FABRIC_KEY" in untrusted_reason(OPEN)
    with pytest.raises(NotCarriedError, match="no fabric key"):
        Records().take_over(OPEN, [])
    assert not untrusted_reason(replace(OPEN, secrets=[b"k" * 32]))
    assert not untrusted_reason(replace(OPEN, rendezvous="127.0.0.1:4000"))
    assert not untrusted_reason(replace(OPEN, rendezvous="[::1]:4000"))

"""Addresses are read back as they were written, whatever their kind."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron import addresses
from unicron.addresses import Address, is_loopback, local_address
from unicron.errors import InvalidInputError
from unicron.settings import Settings

HOSTS = st.ip_addresses().map(str) | st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,9}[a-z0-9])?", fullmatch=True)
PORTS = st.integers(1, addresses.MOST_PORT)


@given(host=HOSTS, port=PORTS)
def test_an_address_is_read_as_it_was_written(host, port):
    address = Address(host, port)
    assert Address.parse(str(address)) == address
    assert Address.of_url(address.nats_url) == Address.of_url(str(address)) == address
    assert Address.of_url(f"nats://user:word@{address}") == address
    assert Settings.load([], {"UNICRON_METRICS": str(address)}).metrics_address == (host, port)


@given(address=st.ip_addresses())
def test_what_only_this_machine_reaches(address):
    assert is_loopback(str(address)) == address.is_loopback
    assert addresses.family(str(address)) == {4: socket.AF_INET, 6: socket.AF_INET6}[address.version]


@pytest.mark.parametrize("text", ["h", "h:", "h:x", "h:0", "h:65536", "::1", "[::1]", "fd00::1:80", "h:٣"])
def test_what_is_no_address_is_refused_with_the_cure(text):
    with pytest.raises(InvalidInputError, match="HOST:PORT"):
        Address.parse(text)


def test_of_its_own_addresses_a_machine_names_the_one_of_the_family_in_which_it_reaches_another():
    assert local_address(Address("127.0.0.1", 1)) == "127.0.0.1"
    assert local_address(Address("::1", 1)) == "::1"
    assert str(ipaddress.ip_address("::1")) in addresses.addresses_of("lo")

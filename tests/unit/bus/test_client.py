"""A user's client: an order that nobody was there to take is given again for a while, and nothing else is."""

import pytest

from unicron import codec
from unicron.client import Client
from unicron.contracts.answers import Reply
from unicron.errors import BusUnavailableError, NobodyAnswersError


class Away:
    """A bus on which nobody answers the first few times."""

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), 0

    async def ask(self, *_):
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return codec.encode(Reply(text="done"))


NOBODY = NobodyAnswersError("nobody answers"), NobodyAnswersError("nobody answers")


def patient(*errors):
    client = Client(Away(*errors), by="ada")
    client.patience_s = 1000.0
    return client


async def test_an_order_waits_for_a_service_that_is_only_starting():
    client = patient(*NOBODY)
    assert await client.remove("gpt") == "done"
    assert client.bus.asked == 3


async def test_queries_orders_to_nodes_and_what_may_have_been_taken_are_not_given_again():
    for call, error in (
        (lambda client: client.status(), NOBODY[0]),
        (lambda client: client.inject("node-1", "kill-worker", "gpt-1"), NOBODY[0]),
        (lambda client: client.remove("gpt"), BusUnavailableError("no answer in time")),
    ):
        client = patient(error)
        with pytest.raises(type(error)):
            await call(client)
        assert client.bus.asked == 1
    hasty = Client(Away(*NOBODY))
    with pytest.raises(NobodyAnswersError):
        await hasty.remove("gpt")

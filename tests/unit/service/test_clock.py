"""The event loop in virtual time does what asyncio's own does, in the same order."""

import asyncio
import selectors
from random import Random

import pytest

from unicron.clock import VirtualClock


class Jump(selectors.DefaultSelector):
    """Lets virtual time pass instead of waiting."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.clock.advance(timeout)
        return ready


class Usual(asyncio.SelectorEventLoop):
    """One of asyncio's own loops, with a clock that jumps."""

    def __init__(self, clock):
        super().__init__(Jump(clock))
        self.time = clock.elapsed


async def history(seed):
    """Do at random what a loop can be asked to, much of it at the same instants; return what came after what."""
    random, told, timers = Random(seed), [], []
    loop = asyncio.get_running_loop()

    def tell(what):
        told.append((what, loop.time()))
        if random.random() < 0.05:
            raise LookupError(what)

    async def work(name):
        for turn in range(12):
            timers.append(loop.call_later(random.randrange(9) / 8, tell, f"{name} later {turn}"))
            loop.call_soon(tell, f"{name} soon {turn}")
            for timer in random.sample(timers[-200:], len(timers[-200:]) * 3 // 5):
                timer.cancel()
            try:
                async with asyncio.timeout(random.randrange(3) / 8):
                    await asyncio.sleep(random.randrange(3) / 8)
            except TimeoutError:
                tell(f"{name} took too long {turn}")

    loop.set_exception_handler(lambda _, context: told.append((repr(context["exception"]), loop.time())))
    await asyncio.gather(*map(work, range(40)), return_exceptions=True)
    return told


@pytest.mark.parametrize("seed", range(3))
def test_callbacks_run_in_the_order_of_asyncio_s_own_loop(seed):
    usual = VirtualClock()
    with asyncio.Runner(loop_factory=lambda: Usual(usual)) as runner:
        expected = runner.run(history(seed))
    clock = VirtualClock()
    assert clock.run(history(seed)) == expected
    assert clock.elapsed() == usual.elapsed()


def test_where_everybody_waits_for_one_another_the_loop_says_so():
    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="everybody waits"):
        VirtualClock().run(asyncio.wait_for(wait(), None))

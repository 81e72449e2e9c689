"""A worker of an example that is paced, notes what it does when, and is struck at an exact point.

Not for people: `benchmarks.parallel` has tasks run it, with its `Orders` as JSON in the environment. What strikes is
here and not in the product. Each block waits instead of computing much, so that eight ranks get by with two cores and
a microbatch takes as long on the ranks that are left as it took before.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

import unicron.train.session
from unicron.train.torch_shell import TorchShell

VARIABLE = "STRUCK"
EXAMPLES = Path(__file__).parents[1] / "examples"
APART = 2
"""Least number of iterations from one strike to the next: what comes of one is over before the next."""


class Point(msgspec.Struct, frozen=True):
    """Whom a fault strikes, and where.

    Attributes:
        phase: "forward", "backward", "reduce" or "update"; in the first two, of the second microbatch.
        fault: "killed", "raised" or "stopped".
        replica, place: of the rank.
        iteration: the first in which it may strike; it waits for a whole membership.
    """

    phase: str
    fault: str
    replica: int
    place: int
    iteration: int


class Orders(msgspec.Struct, frozen=True):
    """What a task's workers are to do.

    Attributes:
        example: whose model they train, "parallel" or "megatron".
        folder: where they note what they did.
        pace_s: seconds that a block's forward pass waits for each sample; its backward pass waits twice that.
        world: ranks of a whole membership.
        points: one after the other.
    """

    example: str
    folder: str
    pace_s: float
    world: int
    points: list[Point] = []


class Struck(msgspec.Struct, frozen=True):
    """A strike that was made: at which Unix seconds, in which iteration and membership, on whom."""

    at: float
    iteration: int
    epoch: int
    replica: int
    phase: str


class Note(msgspec.Struct, frozen=True):
    """What one rank did: from when to when, in Unix seconds, and where it stood.

    Attributes:
        what: "computed", a microbatch that counts; "updated", the end of an iteration.
    """

    what: str
    pid: int
    began: float
    at: float
    iteration: int
    epoch: int
    world: int
    replica: int


class Standing(msgspec.Struct):
    """Where a process stands.

    Attributes:
        iteration: that it computes.
        epoch: of the membership, whose ranks are `world`.
        replica, place: its own.
        computed: microbatches of the iteration that it has ended.
    """

    iteration: int
    epoch: int
    world: int
    replica: int
    place: int
    computed: int = 0


class Scene:
    """This process: its orders, its session, and its notes."""

    def __init__(self) -> None:
        self.orders = msgspec.json.decode(os.environ[VARIABLE], type=Orders)
        self.session: Any = None
        self.began = 0.0
        self._file = (Path(self.orders.folder) / f"{os.getpid()}.jsonl").open("ab", buffering=0)

    def standing(self) -> Standing:
        """Return where this process stands."""
        core = self.session._core  # noqa: SLF001 the benchmark looks inside
        world, seat = core.membership.world_size, core.seat
        return Standing(core.iteration, core.epoch, world, seat.replica, seat.place, len(core.done))

    def note(self, what: str, began: float) -> None:
        """Note what ends now."""
        at, here = time.time(), self.standing()
        found = Note(what, os.getpid(), began, at, here.iteration, here.epoch, here.world, here.replica)
        self._file.write(msgspec.json.encode(found) + b"\n")

    def reached(self, phase: str) -> None:
        """Strike, if the next strike is due here."""
        standing = self.standing()
        if not self.orders.points or standing.world < self.orders.world:
            return
        number = next((n for n in range(len(self.orders.points)) if not self._marker(n).exists()), None)
        if number is None:
            return
        point, iteration = self.orders.points[number], standing.iteration
        here = Point(phase, point.fault, standing.replica, standing.place, point.iteration)
        inside = phase not in {"forward", "backward"} or standing.computed == 1
        if here != point or not inside or iteration < max(point.iteration, self._last(number) + APART):
            return
        struck = Struck(time.time(), iteration, standing.epoch, standing.replica, phase)
        with self._marker(number).open("xb") as file:
            file.write(msgspec.json.encode(struck))
        self._strike(point.fault)

    def _last(self, number: int) -> int:
        if number == 0:
            return -APART
        return msgspec.json.decode(self._marker(number - 1).read_bytes(), type=Struck).iteration

    def _marker(self, number: int) -> Path:
        return Path(self.orders.folder) / f"strike-{number}.json"

    def _strike(self, fault: str) -> None:
        if fault == "raised":
            raise RuntimeError("struck by the benchmark")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[fault])


def watched(scene: Scene) -> Any:
    """Return a `Session` that tells the scene what it does."""

    class Watched(unicron.train.session.Session):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            scene.session = self

        def microbatches(self) -> Iterator[int]:
            for microbatch in super().microbatches():
                scene.began = time.time()
                yield microbatch

    return Watched


def watched_shell(scene: Scene) -> type[TorchShell]:
    """Return a shell that tells the scene what it does."""

    class Watched(TorchShell):
        def accumulate(self) -> None:
            super().accumulate()
            scene.note("computed", scene.began)

        async def reduce(self, iteration: int, bucket: int) -> None:
            scene.reached("reduce")
            await super().reduce(iteration, bucket)

        def update(self, *, void: bool = False) -> None:
            scene.reached("update")
            began = time.time()
            super().update(void=void)
            scene.note("updated", began)

    return Watched


def paced(forward: Any, scene: Scene, batch: int) -> Any:
    """Return a block's forward pass that waits, and whose backward pass does; `batch` is the dimension of samples."""

    def passing(self: Any, *arguments: Any, **named: Any) -> Any:
        entered: torch.Tensor = arguments[0] if arguments else named["hidden_states"]
        seconds = scene.orders.pace_s * entered.shape[batch]
        time.sleep(seconds)
        scene.reached("forward")
        found = forward(self, *arguments, **named)

        def back(_: torch.Tensor) -> None:
            time.sleep(2 * seconds)
            scene.reached("backward")

        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        if result.requires_grad:
            result.register_hook(back)  # type: ignore[no-untyped-call]
        return found

    return passing


def example(scene: Scene) -> Any:
    """Return an example's script as a module, with blocks that wait."""
    script = EXAMPLES / scene.orders.example / "train.py"
    spec = importlib.util.spec_from_file_location("train", script)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{script} is not there")
    train: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    if scene.orders.example == "megatron":
        from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: PLC0415 an optional package

        layer: Any = TransformerLayer
        layer.forward = paced(layer.forward, scene, 1)
    else:
        train.Block.forward = paced(train.Block.forward, scene, 0)
    return train


def main() -> None:
    """Train."""
    scene = Scene()
    patched: Any = unicron.train.session
    patched.TorchShell = watched_shell(scene)
    train = example(scene)
    train.Session = watched(scene)
    train.main()


if __name__ == "__main__":
    main()

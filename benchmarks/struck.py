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
from typing import Any, cast

import msgspec
import torch

import unicron.train.session.session
from benchmarks.harness.command import ROOT
from benchmarks.harness.strikes import LEAST_APART, VARIABLE, Note, Orders, Struck, made_in, marker
from unicron.train.session.gradients import TorchGradients

EXAMPLES = ROOT / "examples"


class Standing(msgspec.Struct):
    """The position of a process."""

    iteration: int
    epoch: int
    world: int  # ranks of the membership
    replica: int
    place: int
    computed: int = 0  # microbatches of the iteration that it has ended


class Scene:
    """This process: its orders, its session, and its notes."""

    def __init__(self) -> None:
        self.orders = msgspec.json.decode(os.environ[VARIABLE], type=Orders)
        self.folder, self.session, self.began = Path(self.orders.folder), cast(Any, None), 0.0
        self._file = (self.folder / f"{os.getpid()}.jsonl").open("ab", buffering=0)

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
        here, made = self.standing(), made_in(self.folder)
        if len(made) >= len(self.orders.points) or here.world < self.orders.world:
            return
        point, earliest = self.orders.points[len(made)], made[-1].iteration + LEAST_APART if made else 0
        inside = phase not in {"forward", "backward"} or here.computed == 1
        if (phase, here.replica, here.place) != (point.phase, point.replica, point.place) or not inside:
            return
        if here.iteration < max(point.iteration, earliest):
            return
        struck = Struck(time.time(), here.iteration, here.epoch, here.replica, phase)
        with marker(self.folder, len(made)).open("xb") as file:
            file.write(msgspec.json.encode(struck))
        if point.fault == "raised":
            raise RuntimeError("struck by the benchmark")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[point.fault])


def watched(scene: Scene) -> Any:
    """Return a `Session` that reports its steps to the scene."""

    class Watched(unicron.train.session.session.Session):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            scene.session = self

        def microbatches(self) -> Iterator[int]:
            for microbatch in super().microbatches():
                scene.began = time.time()
                yield microbatch

    return Watched


def watched_gradients(scene: Scene) -> type[TorchGradients]:
    """Return gradients that report their steps to the scene."""

    class Watched(TorchGradients):
        def accumulate(self) -> None:
            super().accumulate()
            scene.note("computed", scene.began)

        async def reduce(self, bucket: int) -> None:
            scene.reached("reduce")
            await super().reduce(bucket)

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


def loaded(script: Path) -> Any:
    """Return an example's script as a module."""
    spec = importlib.util.spec_from_file_location("train", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(scene: Scene) -> Any:
    """Return an example's script as a module, with blocks that wait."""
    train = loaded(EXAMPLES / scene.orders.example / "train.py")
    if scene.orders.example == "megatron":
        from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: PLC0415 an optional package

        layer: Any = TransformerLayer
        layer.forward = paced(layer.forward, scene, 1)
    else:
        train.Block.forward = paced(train.Block.forward, scene, 0)
    return train


def run() -> None:
    """Train."""
    scene = Scene()
    patched: Any = unicron.train.session.session
    patched.TorchGradients = watched_gradients(scene)
    train = example(scene)
    train.Session = watched(scene)
    train.main()


if __name__ == "__main__":
    run()

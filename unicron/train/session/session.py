"""`Session`: what a training script calls so that it survives faults.

The script keeps its own loop:

    session = Session()
    session.protect(model=model, optimizer=optimizer)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            session.backward(loss_of(model, batch(iteration, microbatch)))
        session.step()

All communication happens inside `microbatches()`: after the last microbatch it reduces the gradients, and when that
or anything before it is interrupted by a fault it regroups and hands the loop further microbatches, those of the lost
rank. So an iteration is finished by the survivors, exactly once.
"""

import os
import random
import sys
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.pipelines import PipelineRuns
from unicron.train.session.ranks import TorchRanks
from unicron.train.session.states import TorchStates
from unicron.train.worker import channel as channels
from unicron.train.worker.finite import Rule
from unicron.train.worker.injected import Injected
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import Shell, run
from unicron.train.worker.timing import BACKWARD, FORWARD, PlannedCollection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Session:
    """One worker's part in a task.

    A model that does not fit into one worker is built on `mesh`, with torch's own means. Replicas of it are what
    shares out the microbatches; all ranks of a replica get the same ones.

    Args:
        seed: of the task; before each microbatch the generators of torch, numpy and Python are seeded from (seed,
            iteration, microbatch), so that a microbatch is the same on every worker.
        accumulate_dtype: in which gradients are accumulated and reduced; None means that of the parameters. With
            float64 the order of summation, and so the number of workers, makes no visible difference.
        iterations: optimizer steps in all; the task file decides where the script runs in a cluster.
        microbatches: microbatches of a global batch; likewise.
        gc_every: collect Python's garbage in every n-th iteration, on all ranks in the same, and at no other
            time; 0 leaves Python's own collection as it is. The environment variable UNICRON_GC_EVERY goes over it.
        finite: what to do before an update whose gradient is not finite: "skip" leaves that update out, "stop", or
            True, ends the task, "retry" has other ranks compute it once more and ends the task if it is not finite
            then, either. Each names the rank and the microbatch. False: it is not looked at.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        accumulate_dtype: torch.dtype | None = None,
        iterations: int = 1,
        microbatches: int = 1,
        gc_every: int = 0,
        finite: Rule | bool = False,
    ) -> None:
        self.seed = seed
        self.total = int(os.environ.get("UNICRON_ITERATIONS", iterations))
        self.per_iteration = int(os.environ.get("UNICRON_MICROBATCHES", microbatches))
        self._collection = PlannedCollection(os.environ.get("UNICRON_GC_EVERY", gc_every))
        if os.environ.get(channels.LAUNCHER_VARIABLE):
            raise RuntimeError("this script has a Session: take `heal: restart` out of its task file")
        self._channel = channels.connect()
        self._ranks = TorchRanks(self._channel, int(os.environ.get("UNICRON_PLACE", "0")))
        self._states = TorchStates(self._channel, self._ranks)
        self._gradients = TorchGradients(self._ranks, accumulate_dtype, self.per_iteration, self._collection)
        self._pipelines = PipelineRuns()
        self._accelerated = torch.accelerator.device_count() > 0
        self._injected = Injected() if self._channel is None else self._channel.injected
        if not isinstance(finite, bool) and finite not in get_args(Rule):
            raise ValueError(f'Session(finite={finite!r}): give "skip", "stop", "retry" or a bool')
        rule: Rule | None = "stop" if finite is True else finite or None
        shell = Shell(self._ranks, self._states, self._gradients)
        self._core = WorkerCore(shell, self.total, self.per_iteration, alone=self._channel is None, rule=rule)
        self._ranks.peer_left = self._core.peer_left

    @cached_property
    def mesh(self) -> "DeviceMesh":
        """The mesh of this worker's replica, with the dimensions "pipeline", "shard" and "tensor".

        For `parallelize_module`, `fully_shard`, `PipelineStage` and all else that takes a mesh or one of its groups;
        data parallelism over replicas is the session's own. The model is built before the ranks have met: give
        `src_data_rank=None` where torch asks from which rank parameters come.
        """
        layout = msgspec.json.decode(os.environ.get("UNICRON_LAYOUT", "{}"), type=ParallelLayout)
        return self._ranks.inner(layout).mesh

    @property
    def iteration(self) -> int:
        """The iteration that is computed, or has been computed up to (exclusive)."""
        return self._core.iteration

    @property
    def loss(self) -> float:
        """Mean loss over the last global batch."""
        return self._core.loss

    @property
    def reduced(self) -> bool:
        """Whether the gradients are those of the global batch, for `step` to use; not on a rank that fell behind."""
        return self._core.phase is IterationPhase.REDUCED

    @property
    def rank(self) -> int:
        """Rank in the current membership; it may change from one microbatch to the next."""
        return self._core.membership.rank

    @property
    def world_size(self) -> int:
        """Workers in the current membership."""
        return self._core.membership.world_size

    def protect(self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> None:
        """Name what makes up the state: the model, the optimizer, and whatever else has a `state_dict`.

        Raises:
            TypeError: something has no `state_dict` and `load_state_dict`, or spreads its state over replicas.
        """
        protected = {"model": model, "optimizer": optimizer, **others}
        for name, thing in protected.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"protect({name}=...): {type(thing).__name__} has no state_dict and load_state_dict")
            if type(thing).__name__ == "ZeroRedundancyOptimizer":
                raise TypeError(
                    f"protect({name}=...): ZeroRedundancyOptimizer keeps each part of its state on one replica only, "
                    "and a lost one takes it along; spread it inside of a replica: layout.shard and fully_shard"
                )
        trained = [each for each in model.parameters() if each.requires_grad]
        self._gradients.prepare(trained, optimizer)
        self._ranks.prepare(trained[0].device)
        self._states.protect(protected)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Name the file that the model is to be in when all iterations are done, before any of them begins.

        It holds the model's `state_dict`, put together from all ranks of a replica, for `torch.load`. One rank writes
        it after the last update; should that die, another does. The task is finished when the file is there, and
        never is half a file there under its name.

        Raises:
            FileNotFoundError: the folder is not there; any rank may be the one that writes.
        """
        file = Path(path).absolute()
        if not file.parent.is_dir():
            raise FileNotFoundError(2, "session.save() makes no folders: make it, on all nodes", str(file.parent))
        self._states.model_file = file

    def iterations(self) -> Iterator[int]:
        """Yield the number of each iteration to compute; the first after a restart is the one that others are in."""
        if not self._states.protected:
            raise RuntimeError("call session.protect(model=..., optimizer=...) before session.iterations()")
        if self._channel is not None:
            run(self._core.start())
        self._collection.take_over()
        while True:
            if not self._core.enter():
                if run(self._core.finish()):
                    break
                continue
            if self._core.phase is IterationPhase.BETWEEN:  # one that was joined in the middle is not recorded
                self._ranks.recorder.begin(self.iteration, self._channel.period if self._channel else 0)
            yield self.iteration
            if not self._core.stepped and self._core.phase in {IterationPhase.OPEN, IterationPhase.REDUCED}:
                raise RuntimeError(f"iteration {self.iteration} ended without session.step()")
        self._collection.hand_back()

    def microbatches(self) -> Iterator[int]:
        """Yield the microbatches that this rank computes in this iteration, then reduce the gradients.

        When it ends, every `p.grad` holds the mean gradient over the global batch and `loss` the mean loss.
        """
        while (microbatch := run(self._core.next_microbatch())) is not None:
            self._ranks.recorder.start(FORWARD, microbatch)
            self._seed_for(microbatch)
            self._injected.begin()
            yield microbatch

    def _seed_for(self, microbatch: int) -> None:
        """Seed all generators, so that a microbatch is the same on every worker, and each time."""
        text = f"{self.seed}:{self.iteration}:{microbatch}".encode()
        number = int.from_bytes(blake2b(text, digest_size=7).digest())
        # for GPUs that are not in use yet torch keeps the seed together with a stack, which takes a millisecond
        seed = torch.manual_seed if self._accelerated else torch.default_generator.manual_seed
        seed(number)
        random.seed(number)
        if numpy := sys.modules.get("numpy"):  # it takes none so large
            numpy.random.seed(number % 2**32)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the current microbatch and add its gradients to the accumulated ones."""
        self._ranks.recorder.start(BACKWARD, self._core.todo[0])
        with self._gradients.backward(begins=self._core.overlaps):
            loss.backward()  # type: ignore[no-untyped-call]
        self._end_microbatch(loss)

    def run(self, schedule: Any, *inputs: Any, **more: Any) -> None:
        """Run a pipeline's schedule on the current microbatch, forward and backward, and add its gradients.

        Args:
            schedule: of torch.distributed.pipelining, made from a stage on the group of `mesh["pipeline"]`. It cuts the
                microbatch up once more; as it has a loss function, the last stage's mean over them is the loss. Or
                another with such a `step`, and a `formed_anew` which all ranks are to run once their groups are formed.
            *inputs: of the first stage, as the schedule's own `step` takes them.
            **more: such as `target`, likewise.
        """
        losses: list[torch.Tensor] = []
        self._pipelines.prepare(schedule, self._ranks.formed)
        try:
            schedule.step(*inputs, losses=losses, **more)
        except Exception:
            if self._ranks.formed >= 0:
                raise
            # what a broken replica hands on is noise, which may be refused somewhere inside; it is dropped anyway
        self._end_microbatch(torch.stack(losses).mean() if losses else None)

    def _end_microbatch(self, loss: torch.Tensor | None) -> None:
        self._injected.end()
        self._gradients.loss = loss
        self._ranks.recorder.stop()
        self._core.computed()

    def step(self) -> None:
        """Update the parameters.

        Does nothing where this rank fell behind and is about to take a newer state, or where the iteration is to be
        finished with other ranks; `iterations` yields the right one next.
        """
        run(self._core.step())

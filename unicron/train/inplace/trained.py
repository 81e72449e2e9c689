"""The models and optimizers that a script has made: which of them are carried apart, and which gradients reduced."""

from collections.abc import Iterator
from typing import Any

import torch

from unicron.errors import InvalidInputError
from unicron.train.carry.tensors import LARGE_BYTES, Given
from unicron.train.inplace.alike import Moments
from unicron.train.inplace.models import Models
from unicron.train.inplace.parallel import Parallel
from unicron.train.inplace.parameter_data import ParameterData


class Trained:
    """The models and optimizers of a script.

    Attributes:
        models: whose gradients are reduced.
        sharded: modules that are spread over the ranks by `fully_shard`, but for those inside of others.
        optimizers: of all of them.
        moments: parts of optimizers' states that are this rank's own.
    """

    moments: Moments

    def __init__(self) -> None:
        self.models: list[Parallel] = []
        self.sharded: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._known = list[int]()
        self._data = ParameterData()

    def watch_data(self) -> None:
        """Count what anybody writes to trained parameters by way of their `data`, which raises no version."""
        setattr(torch.nn.Parameter, "data", property(self._data.read, self._data.write))  # noqa: B010 a name of a type, to the type checker

    def add_sharded(self, module: torch.nn.Module) -> None:
        """Add a module that was sharded over the ranks; those inside of it come before it."""
        within = {id(each) for each in module.modules()}
        self.sharded = [each for each in self.sharded if id(each) not in within] + [module]

    def reshard(self, module: torch.nn.Module) -> None:
        """Have each rank have its shards alone once a module was evaluated, and not whole tensors in their place.

        torch keeps those of an outermost one for a backward pass. A state that is looked at meanwhile is another one.
        """
        if not torch.is_grad_enabled() and any(each is module for each in self.sharded):
            for each in module.modules():
                if reshard := getattr(each, "reshard", None):
                    reshard()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer.

        Raises:
            InvalidInputError: each rank has a part of its state, of which a new one would have nothing.
        """
        if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
            raise InvalidInputError(
                "a new rank can't be given its part of a ZeroRedundancyOptimizer: give each rank all of the optimizer "
                "that it spreads, or spread the model by fully_shard"
            )
        self.optimizers.append(optimizer)

    @property
    def is_complete(self) -> bool:
        """Whether there is what can be trained, in a way that can be healed in place."""
        return bool(self.models) + bool(self.sharded) == 1 and bool(self.optimizers)

    @property
    def reduced(self) -> set[int]:
        """The identities of parameters whose gradients are summed."""
        return {id(each) for model in self.models for each in model.reduced}

    def buckets(self) -> list[list[torch.nn.Parameter]]:
        """Return what torch sums at once of all models' gradients."""
        return [bucket for model in self.models for bucket in model.ready.buckets()]

    def record(self) -> tuple[list[Any], list[Any], dict[str, Any], frozenset[str]]:
        """Return what the script has made, as a loop begins that may train it.

        Returns:
            objects whose state is transferred apart from the script's snapshots; those that loading it changes, as
            `Given` where no process has their state by itself; those that go with the snapshots besides variables, by
            name; the evidence of tensors that were given to ranks as models were made, and were others there before.
        """
        models, trained = self.modules(), self.reduced
        self.moments = Moments(() if self.sharded else self.optimizers, trained)
        self._known = self._identities()
        carried: list[torch.Tensor] = [
            each for each in models.parameters() if self.sharded or id(each) in trained or each.nbytes > LARGE_BYTES
        ]
        carried += [each for each in models.buffers() if each.nbytes > LARGE_BYTES]
        first = {id(each) for model in self.models for each in model.given_tensors()} - trained
        tensors = [Given(each) if id(each) in first else each for each in (*models.parameters(), *models.buffers())]
        given = [Given(self.moments), *(Given(model.given_digest) for model in self.models)]
        groups = [group for each in self.optimizers for group in each.param_groups]
        self._data.watch(each for model in self.models for each in model.reduced)
        changed = [*self.models, *models.modules(), *tensors, *groups, *given]
        differed = frozenset[str]().union(*(model.differed for model in self.models))
        return [*carried, *self.optimizers], changed, {"moments": self.moments}, differed

    @property
    def is_as_recorded(self) -> bool:
        """Whether nothing was made or given parameters since `record`."""
        return self._known == self._identities()

    def _identities(self) -> list[int]:
        """Return the identities of models, optimizers and their parameters."""
        updated = [each for one in self.optimizers for group in one.param_groups for each in group["params"]]
        return [*map(id, (*self.models, *self.sharded, *self.optimizers, *updated))]

    def modules(self) -> Models:
        """Return the models as they were before they were made DistributedDataParallel."""
        return Models([each.module for each in self.models] or self.sharded)

    def versions(self) -> int:
        """Return a sum over trained parameters, which grows as they are changed."""
        versions = (each._version for model in self.models for each in model.reduced)  # noqa: SLF001 there is no other way to it
        return sum(versions) + self._data.writes

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of all models."""
        return (each for model in (*self.models, *self.sharded) for each in model.parameters())

    def updates_unreduced(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has made an update from gradients that only this rank has."""
        if not any(model.has_unreduced for model in self.models):
            return False
        trained = {id(each) for model in self.models if model.has_unreduced for each in model.reduced}
        return any(
            each.grad is not None and id(each) in trained
            for group in optimizer.param_groups
            for each in group["params"]
        )

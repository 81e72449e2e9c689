"""Megatron-core under a session: its parallel state, model, schedules and optimizer, unchanged, within one replica.

    session = Session(iterations=100, microbatches=8)
    megatron.initialize_model_parallel(session)
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(), GPTModel(...))]
    optimizer = get_megatron_optimizer(OptimizerConfig(...), model, use_gloo_process_groups=False)
    training = megatron.Training(session, model, optimizer)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            training.run(forward_step, batches(iteration, microbatch), num_microbatches=4, seq_length=64, ...)
        training.step()

Megatron-core sees one replica as all the world there is, so its data parallelism is that of the `shard` dimension;
that over replicas is the session's. Its process groups are the session's and outlive the ranks in them, so neither the
model nor the optimizer is built again when a rank is replaced.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from unicron.errors import InvalidInputError
from unicron.train.session.session import Session


def initialize_model_parallel(session: Session, **more: Any) -> None:
    """Set megatron-core's parallel state up for the layout of the task.

    Args:
        session: whose replica it is for.
        **more: of `megatron.core.parallel_state.initialize_model_parallel`, besides the sizes.

    Raises:
        InvalidInputError: the task's layout depends on its size.
    """
    if int(os.environ.get("UNICRON_LAYOUTS", "1")) > 1:
        raise InvalidInputError(
            "layout of the task: a shape for each size, but parts of megatron-core's models have names of their own in "
            "each shape and can't be handed over: give one shape for all sizes"
        )
    mesh = session.mesh
    if not torch.cuda.is_available():
        from unicron.train import cudaless  # noqa: PLC0415

        cudaless.patch()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh["tensor"].size(),
        pipeline_model_parallel_size=mesh["pipeline"].size(),
        create_gloo_process_groups=False,
        **more,
    )


class Training:
    """The steps of megatron-core's own loop in an iteration, for one that a session hands out.

    Args:
        session: protects `model`, `optimizer` and `others`.
        model: its chunks, each wrapped by megatron-core's DistributedDataParallel.
        optimizer: from `get_megatron_optimizer`.
        **others: see `Session.protect`, such as an `OptimizerParamScheduler`.

    Attributes:
        grad_norm: of the last iteration's gradient, before it was clipped; None where this rank had none.

    Raises:
        InvalidInputError: an option is on that can't be kept right; its name is in the text.
    """

    def __init__(self, session: Session, model: Sequence[Any], optimizer: Any, **others: Any) -> None:
        for chunk in model:
            _check(chunk)
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = optimizer.scale_loss
        self.grad_norm: float | None = None
        self._session, self._model, self._optimizer = session, list(model), Optimizer(optimizer)
        self._schedule = Schedule(self._model)
        kept: Any = self._optimizer
        session.protect(model=_by_place(model), optimizer=kept, **others)

    def run(self, forward_step: Callable[..., Any], batches: Iterator[Any], **more: Any) -> None:
        """Compute the session's current microbatch, forward and backward, by megatron-core's schedule.

        Args:
            forward_step: megatron-core's `forward_step_func`. The first entry of its loss function's result is the
                loss, or the sum of losses and how many there are.
            batches: its `data_iterator`. What the schedule takes of it, `num_microbatches`, is one microbatch of the
                session.
            **more: of its `forward_backward_func`, such as `num_microbatches`, `seq_length`, `micro_batch_size`.
        """
        self._session.run(self._schedule, forward_step, batches, **more)

    def step(self) -> None:
        """Clip the gradients as the optimizer is configured to, and update: see `Session.step`."""
        self.grad_norm = self._optimizer.prepare() if self._session.reduced else None
        self._session.step()


class Schedule:
    """megatron-core's schedule, for `Session.run`."""

    def __init__(self, model: Sequence[Any]) -> None:
        self._model = list(model)

    def step(
        self, forward_step: Callable[..., Any], batches: Iterator[Any], losses: list[torch.Tensor], **more: Any
    ) -> None:
        """Run forward and backward passes, and append the losses that this rank has."""
        for chunk in self._model:
            chunk.zero_grad_buffer()
        if torch.cuda.is_available():  # what ranks draw apart (dropout) follows from the microbatch as all else does
            tensor_parallel.model_parallel_cuda_manual_seed(torch.initial_seed())
        run = get_forward_backward_func()
        outputs = run(
            forward_step_func=forward_step, data_iterator=batches, model=self._model, forward_only=False, **more
        )
        for each in outputs:
            first = next(iter(each.values())).detach().flatten()
            losses.append(first[0] / first[1] if first.numel() == 2 else first[0])

    def formed_anew(self) -> None:
        """Give all ranks of the replica the same parameters, now that its groups have been formed.

        megatron-core's distributed optimizer hands them round in its update. Where that was broken off each rank has
        its own part of them right.
        """
        for chunk in self._model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)


class Optimizer:
    """An optimizer of megatron-core, as a session wants one: all that it keeps is state, and its update is local."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parts: list[Any] = [each for each in chained if each.optimizer is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all optimizers that it is made of."""
        return [group for part in self._parts for group in part.optimizer.param_groups]

    @torch.no_grad()
    def prepare(self) -> float | None:
        """Do what of an update needs the other ranks: return the norm of the gradient, which is clipped by it.

        It is what megatron-core does at the beginning of its `step`. What fails here is still made good.
        """
        self._optimizer.prepare_grads()
        config, norm = self._optimizer.config, None
        if config.clip_grad > 0:
            norm = float(self._optimizer.get_grad_norm())
            apart = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8  # gradients of the optimizer's own
            for part in self._parts:
                clip_grad_by_total_norm_fp32(part.get_parameters(), config.clip_grad, norm, apart)
        return norm

    def step(self) -> None:
        """Update the parameters."""
        self._optimizer.step_with_ready_grads()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return all that it keeps, and its own copies of parameters."""
        return {
            "parts": [
                [_group_state(each.optimizer, group) for group in each.optimizer.param_groups] for each in self._parts
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, for an optimizer of the same place."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            for group, of_group in zip(part.optimizer.param_groups, saved, strict=True):
                _load(part.optimizer, group, of_group)


def _group_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps of one of its groups of parameters."""
    return {
        "rates": {name: value for name, value in group.items() if name != "params"},
        "parameters": [parameter.detach() for parameter in group["params"]],
        "moments": [dict(optimizer.state.get(parameter, {})) for parameter in group["params"]],
    }


@torch.no_grad()
def _load(optimizer: torch.optim.Optimizer, group: dict[str, Any], saved: dict[str, Any]) -> None:
    group.update(saved["rates"])
    for parameter, value, moments in zip(group["params"], saved["parameters"], saved["moments"], strict=True):
        parameter.copy_(value)
        optimizer.state.pop(parameter, None)
        for name, moment in moments.items():
            like = parameter.device if isinstance(moment, torch.Tensor) and moment.dim() else torch.device("cpu")
            optimizer.state[parameter][name] = (
                moment.to(like, copy=True) if isinstance(moment, torch.Tensor) else moment
            )


def _by_place(model: Sequence[Any]) -> torch.nn.Module:
    """Return the model under names that no other part of it has; megatron-core's number layers anew in each stage."""
    seat = "-".join(
        str(each)
        for each in (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(),
            torch.distributed.get_rank(),
        )
    )
    return torch.nn.ModuleDict({f"{seat}-{number}": chunk for number, chunk in enumerate(unwrap_model(list(model)))})


def _check(chunk: Any) -> None:
    """Raise if a chunk of the model has an option on that can't be kept right."""
    refused = {
        "calculate_per_token_loss": chunk.config.calculate_per_token_loss,
        "overlap_grad_reduce": chunk.ddp_config.overlap_grad_reduce,
        "overlap_param_gather": chunk.ddp_config.overlap_param_gather,
        "fp16 (loss scaling)": chunk.config.fp16,
        "share_embeddings_and_output_weights with pipeline stages": (
            parallel_state.get_pipeline_model_parallel_world_size() > 1
            and getattr(chunk.module, "share_embeddings_and_output_weights", False)
        ),
    }
    if names := ", ".join(name for name, on in refused.items() if on):
        raise InvalidInputError(f"megatron-core under a session does without {names}: switch it off")

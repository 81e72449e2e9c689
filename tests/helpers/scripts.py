"""Scripts without a session that are healed in place, in tests."""

import contextlib
import itertools
import textwrap

import torch
from msgspec.structs import replace

from helpers.gate import gate
from helpers.training import task, write_script
from unicron.contracts.events import FailureDetected, WorkerReady
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout

GATHERS = """
    import contextlib
    import gate
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    class Mean:
        def __init__(self):
            self.sum = self.count = 0.0

    class Means:
        def __init__(self):
            self.all = [Mean(), Mean()]

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    x = torch.randn(240, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(240))
    layers = [torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    means = Means()
    gate.at(-1, phase="begins", rank=rank)
    for epoch in range(2):
        chosen = torch.tensor([7 * epoch * (rank == 0)])
        dist.broadcast(chosen, 0)
        batches = iter(DataLoader(data, batch_size=6, shuffle=True))
        for number in range(16):
            x, y, which = next(batches)
            count = torch.tensor([float(which[0] + chosen)])
            dist.all_reduce(count)
            ends = number % 4 == 3
            gate.at(epoch, number, rank=rank)
            with contextlib.nullcontext() if ends else model.no_sync():
                loss = (model(x) - y).square().sum() * (count / 1000)
                loss.backward()
            gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
            works = dist.all_gather(gathered, loss.detach(), async_op=True), dist.all_reduce(count, async_op=True)
            works[1].wait(), works[0].wait()
            total, parts = loss.detach().clone(), gathered if rank == 0 else None
            dist.reduce(total, 0)
            dist.gather(loss.detach() * 2, parts, 0)
            means.all[epoch].sum += float(sum(gathered) + count) + (float(total) if rank == 0 else 0.0)
            means.all[epoch].count += 1
            if ends:
                optimizer.step()
                optimizer.zero_grad()
            gate.at(epoch, number, "updated", rank)
    if rank == 0:
        seen = [each.sum / each.count for each in means.all]
        torch.save({"model": model.module.state_dict(), "lr": 0, "seen": seen}, "out.pt")
    dist.destroy_process_group()
"""

TRAINER = """
    import gate
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Counting(TrainerCallback):
        seen = 0

        def on_substep_end(self, args, state, control, **_):
            gate.at(state.global_step, rank=args.process_index)

        def on_step_end(self, args, state, control, **_):
            self.seen += 1

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1, use_cache=False))
    tokens = [torch.randint(0, 64, (4 + number % 13,)) for number in range(150)]
    examples = [{"input_ids": torch.nn.functional.pad(each, (0, 16 - len(each))),
                 "labels": torch.nn.functional.pad(each, (0, 16 - len(each)), value=-100)} for each in tokens]
    arguments = TrainingArguments(
        output_dir=".", per_device_train_batch_size=3, gradient_accumulation_steps=3,
        num_train_epochs=4, learning_rate=0.01, lr_scheduler_type="cosine", warmup_steps=4, logging_steps=4,
        eval_strategy="steps", eval_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
    counting = Counting()
    trainer = Trainer(model, arguments, train_dataset=examples[:120], eval_dataset=examples[120:], callbacks=[counting])
    gate.at(-1, phase="begins", rank=arguments.process_index)
    trainer.train()
    if trainer.is_world_process_zero():
        told = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        rate = trainer.lr_scheduler.get_last_lr()[0]
        torch.save({"model": trainer.model.state_dict(), "lr": rate, "seen": [counting.seen, *told]}, "out.pt")
"""


ACCELERATED = """
    import gate
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    x = torch.randn(300, 16)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 40))
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    gate.at(-1, phase="begins", rank=accelerator.process_index)
    seen = updates = 0
    for epoch in range(4):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                gate.at(updates, rank=accelerator.process_index)
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen += int(accelerator.gather(torch.tensor([len(x)])).sum())
            if accelerator.sync_gradients:
                updates += 1
    if accelerator.is_main_process:
        parameters = accelerator.unwrap_model(model).state_dict()
        torch.save({"model": parameters, "lr": schedule.get_last_lr()[0], "seen": seen}, "out.pt")
    accelerator.end_training()
"""

LIGHTNING = """
    import os
    import gate
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

        def prepare_data(self):
            pass  # for which Lightning makes a group, and gives it up

        def training_step(self, batch, number):
            gate.at(self.global_step, rank=self.global_rank)
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, number):
            x, y = batch
            self.log("val", (self.net(x) - y).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 40))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Counting(Callback):
        seen, told = 0, ()

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            self.seen += 1

        def on_validation_end(self, trainer, module):
            self.told = (*self.told, round(float(trainer.callback_metrics["val"]), 6))

    seed_everything(4)
    x = torch.randn(300, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    counting = Counting()
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_epochs=4, accumulate_grad_batches=3, logger=False,
        gradient_clip_val=1.0, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        check_val_every_n_epoch=2, callbacks=[counting])
    model = Model()
    gate.at(-1, phase="begins", rank=trainer.global_rank)
    trainer.fit(model, DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=50))
    if trainer.is_global_zero:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        seen = [counting.seen, *counting.told]
        torch.save({"model": model.state_dict(), "lr": rate, "seen": seen}, "out.pt")
"""

MANUAL = LIGHTNING
for _line, _other in {
    "self.net = ": "self.automatic_optimization = False; self.net = ",
    "return loss": "self.manual_backward(loss); [each() for each in "
    "(self.optimizers().step, self.optimizers().zero_grad, self.lr_schedulers().step)]",
    "accumulate_grad_batches=3, ": "",
    "gradient_clip_val=1.0, ": "",
}.items():
    MANUAL = MANUAL.replace(_line, _other)

SPREAD = """
    import os
    import gate
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    shape = [int(each) for each in os.environ.get("MESH", os.environ["WORLD_SIZE"]).split("x")]
    if len(shape) > 1:  # else the mesh begins the group, as scripts have it that begin none
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("copies", "shards")[-len(shape) :])
    rank = dist.get_rank()
    chosen = [7 if rank == 0 and not os.path.exists("begun") else 8]  # found only once
    dist.broadcast_object_list(chosen)
    whole = torch.full((40000,), chosen[0])  # more than is kept
    dist.broadcast(whole, 0)
    torch.manual_seed(int(whole[0]) + chosen[0])
    x = torch.randn(192, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    at_once = len(shape) == 1  # then all parameters are the whole model's own, and are gathered until its backward pass
    for layer in () if at_once else (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    gate.at(-1, phase="begins", rank=rank)
    seen = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            gate.at(epoch, number, rank=rank)
            ends = at_once or number % 2 == 1
            if number % 4 == 2 if at_once else not ends:  # at once more is added to those of the updates before
                optimizer.zero_grad()  # here, so that snapshots come while there are gradients
            model.set_requires_gradient_sync(ends)
            loss = (model(x) - y).square().mean()
            loss.backward()
            seen += loss.item()
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                open("begun", "w").close()
                model.eval()  # after which torch keeps whole tensors, for a backward pass that does not come
                with torch.no_grad():
                    seen += model(x).mean().item()
                model.train()
    whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
    total = torch.tensor(seen)
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"model": whole, "lr": schedule.get_last_lr()[0], "seen": total.item()}, "out.pt")
    dist.destroy_process_group()
"""


def program(folder, name, text, ranks=3, beside=None, **environment):
    """Return a task that runs `text`; where a file `engine.py` is beside it, as a module."""
    (folder / name).mkdir()
    sizes = {"min_workers": ranks, "max_workers": ranks, "layout": ParallelLayout(shard=ranks), "drill": False}
    script = write_script(folder / name, text)
    spec = task(script, name, heal=Healing.IN_PLACE, env=environment, iterations=UNCOUNTED, **sizes)
    if beside is None:
        return spec
    (folder / name / "engine.py").write_text(textwrap.dedent(beside))
    return replace(spec, command=["python", "-m", "script"])


class Run:
    """A run of a script that stops at a gate, to be struck there.

    Attributes:
        name: of the task.
        gate: at which it stops.
    """

    def __init__(self, scene, name, ranks, held):
        self._scene, self.name, self._ranks, self.gate = scene, name, ranks, held

    async def at(self, iteration, microbatch=0, **only):
        """Let it go on until all of its ranks are held at this point, or the one that is named."""
        self.gate.close(iteration, microbatch, **only)
        await self.gate.held(1 if "rank" in only else self._ranks)

    async def strike(self, rank, fault="kill-worker"):
        """Strike a rank that was last seen at the gate; return what is detected of that."""
        seen = [at["worker"] for at in (*self.gate.passed, *self.gate.waiting) if at["rank"] == rank]
        before, worker = len(self.failures), seen[-1]
        [ready] = await self._scene.until(lambda: self._scene.of(WorkerReady, worker=worker))
        await self._scene.client.inject(ready.node, fault, worker)
        return (await self._scene.until(lambda: self.failures[before:]))[0]

    @property
    def failures(self):
        """Return the failures of ranks, in order: a collective breaks besides, where its cause comes to light late."""
        return [each for each in self._scene.of(FailureDetected, task=self.name) if each.severity is not Severity.SEV3]

    @property
    def begun(self):
        """The ranks of those that have begun the script, sorted."""
        return sorted(at["rank"] for at in self.gate.passed if at["phase"] == "begins")


_numbers = itertools.count()


@contextlib.asynccontextmanager
async def disturbed(scene, text, point, ranks=2, beside=None, calm=None, drill=False, **environment):
    """Have a run that stops at a point; once it is through, it must have come to what an undisturbed one comes to.

    Args:
        scene: a cluster; undisturbed runs are kept there.
        calm: script of the undisturbed one, if it is another.
        drill: another process is tried in a rank's place; else it is taken for one that could.
    """
    folder, kind, name = scene.cluster.root.parent, (calm or text, ranks, *environment.items()), f"t{next(_numbers)}"
    calms = vars(scene).setdefault("calms", {})
    if kind not in calms:
        await scene.client.submit(program(folder, f"calm-{name}", calm or text, ranks, beside, **environment))
        await scene.ends(f"calm-{name}")
        calms[kind] = f"calm-{name}"
    async with gate() as held:
        held.close(*point)
        spec = program(folder, name, text, ranks, beside, **environment, **held.env)
        await scene.client.submit(replace(spec, drill=drill))
        yield Run(scene, name, ranks, held)
        held.open()
        await scene.ends(name)
    same(folder, name, calms[kind])


def same(folder, *names):
    one, other = (torch.load(folder / name / "out.pt", weights_only=True) for name in names)
    assert one.keys() == other.keys()
    assert (one["lr"], one["seen"]) == (other["lr"], other["seen"])
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())

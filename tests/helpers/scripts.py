"""Scripts without a session that are healed in place, in tests."""

import asyncio
import re
import textwrap
from pathlib import Path

import torch
from msgspec.structs import replace

from helpers.training import task, write_script
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskState

GATHERS = """
    import contextlib, os, time
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
    print("begins", rank, flush=True)
    for epoch in range(2):
        chosen = torch.tensor([7 * epoch * (rank == 0)])
        dist.broadcast(chosen, 0)
        batches = iter(DataLoader(data, batch_size=6, shuffle=True))
        for number in range(40):
            x, y, which = next(batches)
            count = torch.tensor([float(which[0] + chosen)])
            dist.all_reduce(count)
            ends = number % 4 == 3
            time.sleep(float(os.environ["PACE"]))
            with contextlib.nullcontext() if ends else model.no_sync():
                loss = (model(x) - y).square().sum() * (count / 1000)
                loss.backward()
            gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, loss.detach())
            means.all[epoch].sum += float(sum(gathered))
            means.all[epoch].count += 1
            if ends:
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0:
                    with open(os.environ["DONE"], "a") as done:
                        print(epoch, number, 0, file=done)
    if rank == 0:
        seen = [each.sum / each.count for each in means.all]
        torch.save({"model": model.module.state_dict(), "lr": 0, "seen": seen}, os.environ["OUT"])
    dist.destroy_process_group()
"""

TRAINER = """
    import os, time
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Paced(TrainerCallback):
        seen = 0

        def on_substep_end(self, args, state, control, **_):
            time.sleep(float(os.environ["PACE"]))

        def on_step_end(self, args, state, control, **_):
            self.seen += 1
            if state.is_world_process_zero:
                with open(os.environ["DONE"], "a") as done:
                    print(round(state.epoch * 10000), state.global_step, self.seen, file=done)

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1, use_cache=False))
    tokens = [torch.randint(0, 64, (4 + number % 13,)) for number in range(150)]
    examples = [{"input_ids": torch.nn.functional.pad(each, (0, 16 - len(each))),
                 "labels": torch.nn.functional.pad(each, (0, 16 - len(each)), value=-100)} for each in tokens]
    arguments = TrainingArguments(
        output_dir=os.path.dirname(os.environ["OUT"]), per_device_train_batch_size=3, gradient_accumulation_steps=3,
        num_train_epochs=4, learning_rate=0.01, lr_scheduler_type="cosine", warmup_steps=4, logging_steps=4,
        eval_strategy="steps", eval_steps=8, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
    paced = Paced()
    trainer = Trainer(model, arguments, train_dataset=examples[:120], eval_dataset=examples[120:], callbacks=[paced])
    print("begins", arguments.process_index, flush=True)
    trainer.train()
    if trainer.is_world_process_zero():
        told = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        rate = trainer.lr_scheduler.get_last_lr()[0]
        torch.save({"model": trainer.model.state_dict(), "lr": rate, "seen": [paced.seen, *told]}, os.environ["OUT"])
"""


ACCELERATED = """
    import os, time
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
    print("begins", accelerator.process_index, flush=True)
    seen = updates = 0
    for epoch in range(4):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                time.sleep(float(os.environ["PACE"]))
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
                    with open(os.environ["DONE"], "a") as done:
                        print(epoch, updates, seen, file=done)
    if accelerator.is_main_process:
        parameters = accelerator.unwrap_model(model).state_dict()
        torch.save({"model": parameters, "lr": schedule.get_last_lr()[0], "seen": seen}, os.environ["OUT"])
    accelerator.end_training()
"""

LIGHTNING = """
    import os, time
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
            time.sleep(float(os.environ["PACE"]))
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
        seen, step, told = 0, 0, ()

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            self.seen += 1
            if trainer.global_step > self.step:
                self.step = trainer.global_step
                if trainer.is_global_zero:
                    with open(os.environ["DONE"], "a") as done:
                        print(trainer.current_epoch, self.step, self.seen, file=done)

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
    print("begins", trainer.global_rank, flush=True)
    trainer.fit(model, DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=50))
    if trainer.is_global_zero:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        seen = [counting.seen, *counting.told]
        torch.save({"model": model.state_dict(), "lr": rate, "seen": seen}, os.environ["OUT"])
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
    import os, time
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape = [int(each) for each in os.environ.get("MESH", os.environ["WORLD_SIZE"]).split("x")]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("copies", "shards")[-len(shape) :])
    chosen = [7 if rank == 0 and not os.path.exists(os.environ["DONE"]) else 8]  # found only once
    dist.broadcast_object_list(chosen)
    whole = torch.full((40000,), chosen[0])  # more than is kept
    dist.broadcast(whole, 0)
    torch.manual_seed(int(whole[0]) + chosen[0])
    x = torch.randn(192, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    print("begins", rank, flush=True)
    seen = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            time.sleep(float(os.environ["PACE"]))
            ends = number % 2 == 1
            model.set_requires_gradient_sync(ends)
            loss = (model(x) - y).square().mean()
            loss.backward()
            seen += loss.item()
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if rank == 0:
                    with open(os.environ["DONE"], "a") as done:
                        print(epoch, number, 0, file=done)
    whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
    total = torch.tensor(seen)
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"model": whole, "lr": schedule.get_last_lr()[0], "seen": total.item()}, os.environ["OUT"])
    dist.destroy_process_group()
"""


PACED = 'time.sleep(float(os.environ["PACE"]))'
HURRIES = 'time.sleep(0 if os.path.exists(os.environ["DONE"] + ".hurry") else float(os.environ["PACE"]))'


def program(folder, name, text, pace=0.15, ranks=3, beside=None):
    """Return a task that runs `text`; where a file `engine.py` is beside it, as a module.

    It is slow, so that it is not through before it is struck on a busy machine, until it is to end.
    """
    (folder / name).mkdir()
    text = text.replace(PACED, HURRIES)
    env = {"DONE": str(folder / name / "done"), "OUT": str(folder / name / "out.pt"), "PACE": str(pace)}
    sizes = {"min_workers": ranks, "max_workers": ranks, "layout": ParallelLayout(shard=ranks)}
    script = write_script(folder / name, text)
    spec = task(script, name, heal=Healing.IN_PLACE, env=env, iterations=UNCOUNTED, **sizes)
    if beside is None:
        return spec
    (folder / name / "engine.py").write_text(textwrap.dedent(beside).replace(PACED, HURRIES))
    return replace(spec, command=["python", "-m", "script"])


def done(folder, name):
    path = folder / name / "done"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def hurry(spec):
    """Have the script of a task go on without pauses."""
    Path(spec.env["DONE"] + ".hurry").touch()


async def ends(scene, name):
    """Wait until a task that is struck no more has finished."""
    if "DONE" in (spec := (await scene.view(name)).spec).env:
        hurry(spec)
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, (view.reason, view.traceback)


async def past(scene, name, count):
    await scene.until(lambda: len(done(scene.folder, name)) >= count)


async def strike(scene, name, rank, fault="kill-worker", value=""):
    while len(members := (await scene.view(name)).members) <= rank:
        await asyncio.sleep(0.05)
    await scene.client.inject(members[rank].node, fault, members[rank].worker, value)


def same(folder, *names):
    one, other = (torch.load(folder / name / "out.pt", weights_only=True) for name in names)
    assert one.keys() == other.keys()
    assert (one["lr"], one["seen"]) == (other["lr"], other["seen"])
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


def begun(folder, name):
    """Return the ranks of each beginning, as the logs of workers tell."""
    logs = "".join(path.read_text() for path in folder.glob(f"cluster/**/logs/{name}-*.log"))
    return sorted(int(each) for each in re.findall(r"begins (\d+)", logs))

"""Scripts whose loop is a library's, or that use one in their loop, are healed in place as any other."""

import pytest
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.scripts import ACCELERATED, LIGHTNING, MANUAL, TRAINER, Run, disturbed
from helpers.training import shared, task, write_script

from unicron.contracts.tasks import UNCOUNTED, Healing

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MORE = pytest.mark.exhaustive("libraries are as healed as scripts are; one loop of each make is enough")

scene = shared(local_cluster, nodes=2, slots=1)


@pytest.mark.parametrize(
    ("text", "watched"),
    [
        pytest.param(TRAINER, "unicron.train.hf", marks=MORE),
        (ACCELERATED, ""),
        pytest.param(LIGHTNING, "unicron.train.lightning", marks=MORE),
        pytest.param(MANUAL, "", marks=MORE),
    ],
    ids=["transformers", "accelerate", "lightning", "lightning-manual"],
)
async def test_a_script_of_a_library_is_healed_in_place_watched_or_not(scene, text, watched):
    called = f"__import__('{watched}', fromlist=['_']).UnicronCallback()"
    struck = text.replace("callbacks=[", f"callbacks=[{called}, ") if watched else text
    async with disturbed(scene, struck, (3,), calm=text) as run:
        # no evaluation, and no log, is near
        for step, rank, fault in ((3, 1, "kill-worker"), (9, 0, "raise"), (13, 1, "stop-worker")):
            await run.at(step, rank=rank)
            await run.strike(rank, fault)
    assert run.begun == [0, 0, 1, 1, 1], "nobody else begins again"
    assert len(run.failures) == 3


WATCHED = {
    "transformers": """
    import os
    import gate
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
    from unicron.train.hf import UnicronCallback

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    examples = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 480
    folder = os.environ["UNICRON_CHECKPOINT_DIR"]
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1,
        logging_steps=1, save_steps=10, save_only_model=True, report_to=[], disable_tqdm=True, use_cpu=True)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            gate.at(state.global_step, rank=args.process_index)

    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[UnicronCallback(), Stops()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    """,
    "lightning": """
    import os
    from pathlib import Path
    import gate
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from unicron.train.lightning import UnicronCallback

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, number):
            gate.at(self.global_step, rank=self.global_rank)
            return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    folder = Path(os.environ["UNICRON_CHECKPOINT_DIR"])
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=10, save_last=True)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_steps=60, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saving, UnicronCallback()])
    loader = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=4)
    newest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Model(), loader, ckpt_path=newest)
    """,
}


@MORE
@pytest.mark.parametrize("library", sorted(WATCHED))
async def test_a_trainer_that_is_watched_tells_its_iterations_and_goes_on_from_its_own_checkpoint(
    scene, tmp_path, library
):
    (tmp_path / "saved").mkdir()
    async with gate() as held:
        fields = {"min_workers": 2, "max_workers": 2, "iterations": UNCOUNTED, "checkpoints": str(tmp_path / "saved")}
        script = write_script(tmp_path, WATCHED[library])
        spec = task(script, library, heal=Healing.RESTART, env=held.env, **fields)
        run = Run(scene, library, 2, held)
        held.close(25)
        await scene.client.submit(spec)
        await held.held(2)
        reported = lambda: [each for each in scene.iterations if each.task == library]  # noqa: E731
        await scene.reached(library, 23)
        before = len(reported())
        await run.strike(1)
        held.open()
        await scene.ends(library)
    await scene.reached(library, 59)
    again = [each.iteration for each in reported()[before:]]
    assert max(again) == 59
    assert min(again) >= 20, "they went on from what was saved"
    assert all(each.loss > 0 for each in reported()[2:])

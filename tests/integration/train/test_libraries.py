"""Scripts whose loop is a library's, or that use one in their loop, are healed in place as any other."""

import pytest
from helpers.scripts import ACCELERATED, LIGHTNING, MANUAL, TRAINER, begun, ends, past, program, same, strike
from helpers.training import running_cluster, task, write_script

from unicron.contracts.events import FailureDetected
from unicron.contracts.tasks import UNCOUNTED, Healing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "watched"),
    [(TRAINER, "unicron.train.hf"), (ACCELERATED, ""), (LIGHTNING, "unicron.train.lightning"), (MANUAL, "")],
    ids=["transformers", "accelerate", "lightning", "lightning-manual"],
)
async def test_a_script_of_a_library_is_healed_in_place_watched_or_not(tmp_path, text, watched):
    called = f"__import__('{watched}', fromlist=['_']).UnicronCallback()"
    async with running_cluster(tmp_path, nodes=2, slots=1) as scene:
        scene.folder = tmp_path
        await scene.client.submit(program(tmp_path, "calm", text, pace=0.0, ranks=2))
        await ends(scene, "calm")
        text = text.replace("callbacks=[", f"callbacks=[{called}, ") if watched else text
        await scene.client.submit(program(tmp_path, "t", text, ranks=2))
        # no evaluation, and no log, is near; what is raised wherever the script is, Lightning drops in some places
        struck = [(3, 1, "kill-worker", ""), (9, 0, "raise", "value-error"), (13, 1, "stop-worker", "")]
        for number, (count, *fault) in enumerate(struck, 1):
            await past(scene, "t", count)
            await strike(scene, "t", *fault)
            await scene.until(lambda number=number: len(scene.of(FailureDetected)) == number)
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert begun(tmp_path, "t") == sorted([0, 1, *(rank for _, rank, *_ in struck)]), "nobody else begins again"


PAUSE = """
    import os, time

    def pause(step):
        if step > 44 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.2)  # it must not be through before it is struck
"""
WATCHED = {
    "transformers": """
    import os
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
    from unicron.train.hf import UnicronCallback

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    examples = [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 960
    folder = os.environ["UNICRON_CHECKPOINT_DIR"]
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1,
        logging_steps=1, save_steps=20, save_only_model=True, report_to=[], disable_tqdm=True, use_cpu=True)

    class Paced(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            pause(state.global_step)

    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[UnicronCallback(), Paced()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    """,
    "lightning": """
    import os
    from pathlib import Path
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from unicron.train.lightning import UnicronCallback

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, number):
            pause(self.global_step)
            return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    folder = Path(os.environ["UNICRON_CHECKPOINT_DIR"])
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=20, save_last=True)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), max_steps=120, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saving, UnicronCallback()])
    loader = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=4)
    newest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Model(), loader, ckpt_path=newest)
    """,
}


@pytest.mark.parametrize("library", sorted(WATCHED))
async def test_a_trainer_that_is_watched_tells_its_iterations_and_goes_on_from_its_own_checkpoint(tmp_path, library):
    async with running_cluster(tmp_path, nodes=2, slots=1) as scene:
        (tmp_path / "saved").mkdir()
        spec = task(
            write_script(tmp_path, PAUSE + WATCHED[library]),
            heal=Healing.RESTART,
            min_workers=2,
            max_workers=2,
            iterations=UNCOUNTED,
            checkpoints=str(tmp_path / "saved"),
        )
        await scene.client.submit(spec)
        await scene.reached("t", 45)
        before = len(scene.iterations)
        await strike(scene, "t", 1)
        await ends(scene, "t")
        await scene.reached("t", 119)
    again = [each.iteration for each in scene.iterations[before:]]
    assert max(again) == 119
    assert min(again) > 0, "they went on from what was saved"
    assert all(each.loss > 0 for each in scene.iterations[2:])

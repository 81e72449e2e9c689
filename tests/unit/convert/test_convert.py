"""`unicron convert`: scripts that become ones with a Session, and those that are refused."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import unicron_convert
from helpers import ROOT, plain_scripts, standby
from typer.testing import CliRunner
from unicron_cli.main import app

from unicron.errors import InvalidInputError

PLAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    x = torch.ones(2, 4)
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(loss.item())
dist.destroy_process_group()
"""


def put(lines, before, text=PLAIN):
    """Return a script with lines more, before what begins so."""
    return text.replace(before, f"{lines}\n{before}")


LOADER = PLAIN.replace("for i in range(3):", "for i, x in enumerate(loader):").replace("    x = torch.ones(2, 4)\n", "")
LOADER = put("loader = torch.utils.data.DataLoader(list(range(8)), shuffle=True)", "model = DDP", LOADER)

ACCUMULATES = PLAIN.replace("        x =", "    x =").replace(
    """    x = torch.ones(2, 4)
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
""",
    """    optimizer.zero_grad()
    for part in range(4):
        x = torch.ones(2, 4)
        loss = model(x).mean()
        loss.backward()
""",
)

REFUSED = {
    "no loop": ("import torch\nprint(torch.ones(2))\n", 0, "nothing calls backward"),
    "a session": (PLAIN + "from unicron.train import Session\n", 19, "for Unicron already"),
    "fsdp": (PLAIN + "from torch.distributed.fsdp import fully_shard\n", 19, "spread over ranks"),
    "no ddp": (PLAIN.replace("DDP(torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)"), 0, "expected one Distributed"),
    "scaler": (PLAIN + "scaler = torch.amp.GradScaler()\n", 19, "bfloat16 needs none"),
    "spawn": (PLAIN + "import torch.multiprocessing as mp\nmp.spawn(print)\n", 20, "starts its ranks itself"),
    "data by rank above": (put("data = list(range(9))[rank::world]", "model = DDP"), 8, r"\[rank"),
    "data by rank in front": (put("    if i > 1:\n        at = i + rank", "    x = torch"), 12, "depends on the rank"),
    "rank elsewhere": (PLAIN + "def log():\n    return dist.get_rank()\n", 20, "can't see the session"),
    "order of a loader": (LOADER, 8, "comes from no DistributedSampler"),
    "an iterator": (PLAIN.replace("torch.ones(2, 4)", "next(batches)"), 11, "next.. goes on"),
    "a generator": (
        put("own = torch.Generator()", "model = DDP").replace("(2, 4)", "(2, 4, generator=own)"),
        12,
        "own is a generator",
    ),
    "a place that goes on": (PLAIN.replace("torch.ones(2, 4)", "data[at : at + 4]\n    at = at + 4"), 11, "at goes on"),
    "next data": (put("    x = f(i)", "    if rank").replace("    x = torch.ones(2, 4)\n", ""), 11, "x is left behind"),
    "its output": (PLAIN.replace("loss.item())", "loss.item(), x.sum())"), 17, "x is of one rank's last"),
    "sum of losses": (ACCUMULATES, 15, "divided by 4"),
    "other divisor": (ACCUMULATES.replace(").mean()", ").mean() / 5"), 15, "divided by 4"),
    "divides by ranks": (PLAIN.replace(").mean()", ").mean() / world"), 12, "divides by the number of ranks"),
    "early end": (put("    if i > 1:\n        break", "    if rank"), 17, "left early"),
    "update now and then": (
        PLAIN.replace("    optimizer.step", "    if i % 2:\n        optimizer.step"),
        16,
        "condition",
    ),
    "adds up": (PLAIN.replace("    optimizer.zero_grad()\n", ""), 10, "would add up"),
    "own collective": (put("    dist.all_reduce(loss)", "    if rank"), 16, "all_reduce"),
    "gradient behind": (put("    print(model.weight.grad)", "    if rank"), 16, "no gradients"),
    "two backward": (put("    loss.backward()", "    optimizer.step"), 15, "a second"),
    "a closure": (PLAIN.replace("optimizer.step()", "optimizer.step(f)"), 15, "closure"),
    "begins later": (PLAIN.replace("range(3)", "range(begun, 3)"), 10, "DataLoader"),
    "loss elsewhere": (
        PLAIN.replace("loss.backward()", "train(loss)") + "def train(a):\n    a.backward()\n",
        20,
        "own",
    ),
    "evaluation by rank": (put("val = torch.utils.data.DistributedSampler([1])", "model = DDP"), 8, "chosen by rank"),
    "looked up": (PLAIN + 'import os\nprint("RANK" in os.environ)\n', 20, "RANK is looked up"),
    "drawn in front": (
        ACCUMULATES.replace("    optimizer.zero", "    x = torch.randn(2, 4)\n    optimizer.zero")
        .replace("        x = torch.ones(2, 4)\n", "")
        .replace(").mean()", ").mean() / 4"),
        11,
        "not once for each microbatch",
    ),
    "order of an epoch": (
        PLAIN.replace("for i in", "for e in range(2):\n  order = torch.randperm(9)\n  for i in")
        .replace("\n    ", "\n        ")
        .replace("\n  ", "\n    ")
        .replace("\n          ", "\n        ")
        .replace("\n            print", "\n            print")
        .replace("torch.ones(2, 4)", "data[order[i]]"),
        11,
        "not once for each microbatch",
    ),
    "epochs of other lengths": (
        ACCUMULATES.replace("range(4)", "range(i + 1)").replace(").mean()", ").mean() / (i + 1)"),
        12,
        "not the same each time",
    ),
    "loss in front": (put("    if i:\n        print(loss)", "    x = torch"), 12, "loss is of one"),
    "two in a line": (PLAIN.replace("loss.backward()\n    ", "loss.backward(); "), 14, "several statements"),
    "between": (put("    if i > 1:\n        x = x * 2", "    loss ="), 12, "stands between"),
    "a hook": (put("model.register_comm_hook(None, f)", "for i"), 10, "not wrapped"),
    "mean by plateau": (
        put(
            "    plan.step(loss)",
            "    if rank",
            put("plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", "for i"),
        ),
        17,
        "with arguments",
    ),
}


def converted(text, folder, ranks=1):
    """Convert by the command, apply what it prints by `patch`, and return the new script."""
    path = folder / "train.py"
    path.write_text(text, newline="")
    done = CliRunner().invoke(app, ["convert", "--ranks", str(ranks), str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert path.read_bytes().decode() == text, "it is left as it is"
    subprocess.run(["patch", "--quiet", "-p0", path], input=done.stdout, text=True, check=True, cwd=folder)
    return path


def run(path, out, **env):
    """Run a script in one process; return what it saved and what it printed."""
    written = ended_well(path, OUT=str(out), **env)
    return torch.load(out, weights_only=True), written


def ended_well(path, **env):
    code, written = standby.run(path, **env)
    assert code == 0, written
    return written


def run_ranks(path, out, ranks):
    """Run a script as torchrun does; likewise."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = {"OUT": str(out), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **meeting}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    with ThreadPoolExecutor(ranks) as pool:
        written = list(pool.map(lambda place: ended_well(path, **env, **place), places))
    return torch.load(out, weights_only=True), "".join(written)


def difference(left, right):
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_of_the_usual_shape_is_refused_with_its_line(name, tmp_path):
    text, line, why = REFUSED[name]
    path = tmp_path / "train.py"
    path.write_text(text)
    done = CliRunner().invoke(app, ["convert", str(path)], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.search(rf"train\.py:{line or ' '}.*{why}", done.stderr), done.stderr
    told = json.loads(CliRunner().invoke(app, ["convert", str(path), "--json"]).stdout)
    assert (told["ok"], told["diff"], told["remarks"][0]["line"]) == (False, "", line)


@pytest.mark.parametrize("text", [None, b"for", b"\xff\xfe", b"x = '\x00'"])
def test_what_is_no_script_is_named(text, tmp_path):
    path = tmp_path / "train.py"
    if text is not None:
        path.write_bytes(text)
    done = CliRunner().invoke(app, ["convert", str(path)])
    assert isinstance(done.exception, InvalidInputError)
    assert str(path) in str(done.exception)


def test_lines_that_do_not_change_stay_as_they_are_written(tmp_path):
    text = plain_scripts.EPOCHS.replace("\n", "\r\n").replace("DATA =", "ä = 'ö'; DATA =")
    new = unicron_convert.convert(text, 2).text
    assert "\r\n        if place == 0:\r\n            total = 0.0  # of this epoch\r\n" in new
    assert (
        "\r\n            # the gradients of the last batch\r\n            loss = criterion(model(x), y)\r\n\r\n" in new
    )
    assert 'print(f"""at {place}:\r\n    {session.loss:.4f}""")' in new, "what is inside of a text is not indented"
    assert "ä = 'ö'; DATA = torch.randn(" in new
    assert not re.search(r"[^\r]\n", new)


def test_what_has_to_be_looked_at_is_told():
    text = PLAIN.replace("import torch\n", "import torch\nimport loading\n", 1)
    text = text.replace("torch.ones(2, 4)", "loading.batch(i)")
    text = put("if rank == 0:\n    print('begun')", "model = DDP", put("    seen = seen + 1", "    if rank", text))
    text = text.replace("optimizer.step()", "optimizer.step()\n    average.update(model)")
    text = put("average = ema(model)\nseen = 0", "for i", text)
    text = text.replace("Linear(4, 1)", "Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))")
    told = {line: why.split(" ")[0] for line, why in unicron_convert.convert(text).remarks if line != 15}
    assert told == {9: "before", 11: "running", 16: "loading.batch", 21: "protect", 22: "seen"}
    every = [text for line, text in unicron_convert.convert(text).remarks if line == 15]
    assert any("--ranks" in each for each in every)
    assert any("task file" in each for each in every)


WITHIN = PLAIN.replace("    loss.b", "    with torch.enable_grad():\n        (2 * loss).b")
SHARED = LOADER.replace(
    "loader = torch.utils.data.DataLoader(list(range(8)), shuffle=True)",
    """data = [torch.full((4,), n) for n in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, 2, sampler=sampler)""",
).replace("    loss =", "    told.append(x[:, 0].tolist())\n    loss =")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (PLAIN.replace("range(3)", "range(1, 4)").replace("loss.item()", "i"), ["1", "2", "3"]),
        (PLAIN.replace("range(3)", "range(2, 6)").replace("loss.item()", "i"), ["2", "3", "4", "5"]),
        (WITHIN.replace("loss.item()", "i"), ["0", "1", "2"]),
        (SHARED.replace("loss.item()", "i"), ["0", "1"]),
        (SHARED.replace("i, x in enumerate(loader)", "x in loader").replace("loss.item()", "len(loader)"), ["2", "2"]),
    ],
)
def test_a_converted_script_counts_as_it_did_and_gets_the_same_batches(text, printed, capsys):
    told = []
    new = unicron_convert.convert(text, 2).text
    exec(compile(new, "new", "exec"), {"__name__": "__main__", "told": told})
    assert capsys.readouterr().out.splitlines() == printed
    assert told in ([], [[0.0, 2.0], [1.0, 3.0], [4.0, 6.0], [5.0, 0.0]]), "of rank 0, of rank 1, and so on"
    assert bool(told) == (text.count("told") > 0)


@pytest.mark.parametrize("names", ["session", "microbatch"])
def test_names_that_a_script_has_are_not_taken(names):
    new = unicron_convert.convert(PLAIN.replace("x", names)).text
    assert f"{names}_" in new
    compile(new, "new", "exec")


@pytest.mark.real
def test_the_script_of_the_page_becomes_the_one_beside_it(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL | re.MULTILINE)
    before, after = (text.replace("SIZE = 200, 8", "SIZE = 9, 8") for text in blocks[:2])
    assert "DistributedDataParallel" in before
    assert "Session(" in after
    save = 'import os\ntorch.save(model.state_dict(), os.environ["OUT"])\n'
    path = converted(before, tmp_path)
    assert "world" not in path.read_text()
    path.write_text(path.read_text() + save)
    other = tmp_path / "after.py"
    other.write_text(after + save)
    (mine, told), (theirs, told_too) = run(path, tmp_path / "a.pt"), run(other, tmp_path / "b.pt")
    assert difference(mine, theirs) == 0.0
    assert told == told_too


@pytest.mark.real
@pytest.mark.exhaustive("plain ranks of torch may not end; integration/train/test_convert.py trains one, too")
@pytest.mark.parametrize("name", ["EPOCHS", "COUNTED", "ACCUMULATED"])
def test_a_converted_script_trains_to_what_two_ranks_of_torchrun_trained_to(name, tmp_path):
    text = getattr(plain_scripts, name)
    plain = tmp_path / "plain.py"
    plain.write_text(text)
    theirs, told = run_ranks(plain, tmp_path / "a.pt", 2)
    mine, mine_told = run(converted(text, tmp_path, ranks=2), tmp_path / "b.pt")
    assert difference(mine, theirs) < 1e-6
    assert len(told.splitlines()) == len(mine_told.splitlines())

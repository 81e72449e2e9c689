"""Training scripts that are made up of parts, healed in place: none may become another training without a word.

    python -m benchmarks.inplace_made --count 500 --seed 1 --json
    python -m benchmarks.inplace_made --seed 1 --only 17 --keep /tmp/made

Each script has one choice of each kind in `inplace_scripts/parts.toml`, a shape of its loops and a place for its
variables, drawn at random. It is run by two plain processes, as torchrun would; then in place on one cluster, with its
drill, and one rank killed once, at a place that is drawn, too. The results of both are compared bit by bit.

Figures count scripts. `healed` have the plain run's results, and only the killed rank has begun again; `began_again`
have the same results, but all ranks did, `said` those of them of which the log says why, `in_window` those whose rank
was killed between a reduced gradient and the end of the loop's body, when nobody could take its place. `refused` ended
with the reason why they can't be healed in place, `ended` with another; `not_measured` fail by themselves, or were not
struck. `wrong_silently` and `hung` are to be 0.
"""

import asyncio
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cluster import Scene, running, task
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import ONE_THREAD
from benchmarks.inplace_scripts.made import made
from benchmarks.inplace_scripts.runs import MARK, PATIENCE_S, plain, results
from benchmarks.inplace_scripts.verdicts import difference
from unicron.contracts.events import ScriptDrilled
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout

WINDOW = ("backward", "updated", "ended")
VERDICTS = ("healed", "began_again", "refused", "ended", "not_measured", "hung", "wrong_silently")
OWN_CARRIER = re.compile(r"can't be carried to another process as it is: (.+)")


async def in_place(scene: Scene, name: str, script: Path, folder: Path, strike: str) -> str:
    """Run a script in place, one of its ranks struck; return how its task ended, empty where it did not."""
    folder.mkdir()
    own: dict[str, Any] = {"workdir": str(folder), "iterations": UNCOUNTED, "heal": Healing.IN_PLACE}
    await scene.client.submit(task(name, [str(script), str(folder), strike], 2, layout=ParallelLayout(shard=2), **own))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        view = await scene.view(name)
        if view.state.ended:
            return f"{view.state}: {view.reason}"
        await asyncio.sleep(0.05)
    await scene.client.remove(name)
    return ""


async def judged(scene: Scene, seed: int, number: int, root: Path) -> dict[str, Any]:
    """Return what came of a script."""
    folder, name = root / f"{seed}-{number}", f"made-{seed}-{number}"
    folder.mkdir()
    text, chosen = made(seed, number)
    (folder / "script.py").write_text(text)
    theirs = await asyncio.to_thread(plain, folder / "script.py", folder / "plain")
    row: dict[str, Any] = {"number": number, "chosen": chosen}
    if len(theirs) < 2:
        return row | {"verdict": "not_measured", "why": (folder / "plain" / "log-0").read_text()[-300:]}
    before = await scene.client.tail()
    ended = await in_place(scene, name, folder / "script.py", folder / "struck", chosen["at"])
    paths = sorted(scene.cluster.root.glob(f"nodes/*/logs/{name}-*.log"))
    logs = "".join(path.read_text(errors="replace") for path in paths)
    (folder / "log").write_text(logs)
    begun, carried = folder / "struck" / "begun", OWN_CARRIER.search(logs)
    begins = len(begun.read_text().split()) if begun.exists() else 0
    end = await scene.client.tail()
    facts = [each async for _, each in scene.client.follow(before, end) if getattr(each, "task", "") == name]
    drills = [each.problem or each.unproven for each in facts if isinstance(each, ScriptDrilled)]
    row |= {"begun": begins, "drilled": drills}
    row |= {"named": carried[1] if carried else "", "ended": ended}
    if not ended:
        return row | {"verdict": "hung"}
    if not ended.startswith("finished"):
        return row | {"verdict": "refused" if "heal: restart" in ended or carried else "ended", "why": ended}
    if why := difference(results(folder / "struck"), theirs):
        return row | {"verdict": "wrong_silently", "why": why}
    if not (folder / "struck" / MARK).exists():
        return row | {"verdict": "not_measured", "why": "nobody was struck"}
    return row | {"verdict": "healed" if begins == 3 + bool(drills) else "began_again"}


def figures(rows: Sequence[dict[str, Any]]) -> Figures:
    """Return how many scripts came to what."""
    counted = Counter(row["verdict"] for row in rows)
    again = [row for row in rows if row["verdict"] == "began_again"]
    unsaid = [row for row in again if not row["named"]]
    return {
        "cases": len(rows),
        **{name: counted[name] for name in VERDICTS},
        "said": len(again) - len(unsaid),
        "in_window": sum(row["chosen"]["strike"] in WINDOW for row in unsaid),
    }


async def measure(options: Options, folder: Path) -> Result:
    """Make scripts up and run them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
    os.environ |= {"UNICRON_ATTEMPTS": "1000", "UNICRON_NO_PROGRESS": "4", **ONE_THREAD}  # plain runs too
    root, rows = (options.keep or folder).resolve(), []
    root.mkdir(parents=True, exist_ok=True)
    async with running(root / "cluster", 1, 2) as scene:
        for number in options.only or range(options.first, options.first + options.count):
            rows.append(row := await judged(scene, options.seed, number, root))
            if row["verdict"] != "healed":
                say(f"{number} {row['verdict']}: {row.get('why') or row.get('named')} {row['chosen']}")
    return Result(figures(rows), details={"rows": rows})


if __name__ == "__main__":
    main(
        measure,
        option("--count", default=20, help="of scripts"),
        option("--seed", default=1),
        option("--first", default=0, help="number of the first of them"),
        option("--only", type=int, nargs="*", metavar="NUMBER", help="these alone"),
        option("--keep", type=Path, metavar="DIR", help="where scripts, logs and results stay; a new folder"),
    )

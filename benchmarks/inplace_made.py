"""Training scripts that are made up of parts, healed in place: none may become another training without a word.

    python -m benchmarks.inplace_made --count 500 --seed 1 --ranks 2,3 --json
    python -m benchmarks.inplace_made --seed 1 --only 17 --shrink --keep /tmp/made

Each script has one choice of each kind in `inplace_scripts/parts.toml`, a few of `extras.toml`, a size, a shape of its
loops and a place for its variables, drawn at random. It is run by plain processes, as torchrun would; in place on one
warm cluster, undisturbed, with its drill; and once more with one rank killed once, or failing by an exception, at a
place that is drawn, too: without a drill where the first has proven it, as else all begin again until it is proven.
Results are compared bit by bit with the plain run's. Only sparse gradients, which more than two ranks add up in another
order than torch, are compared with a run in place without a drill.

Verdicts, of a script the worse of its two runs in place: `healed` has the right results, and only the rank that was
struck has begun again; `began_again` has them, but all ranks did; `refused` ended with the reason why it can't be
healed in place; `not_measured` fails by itself, or nobody was struck; `ended` with another reason, `hung` not in time;
`wrong_silently` ended well, with other results. Figures count scripts; `calm_` counts runs that nobody struck alone,
`said` those that began again whose log says why, `proven` those whose drill found nothing wrong. `outside_healed` is
the share of healed ones of those that were struck other than between reduce and update. `script_s` is the median of
all that a script took. The table `moments` has verdicts by when a rank was struck.

`--plain` runs scripts twice by plain processes alone, and compares these. `--shrink` runs a script that is wrong, ended
or hung again and again with fewer and fewer of its parts, and names those that it takes.
"""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import stats
from benchmarks.harness.cluster import Scene, running
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import ONE_THREAD
from benchmarks.inplace_scripts.made import MOMENTS, RARELY, USUALLY, made, written
from benchmarks.inplace_scripts.runs import MARK, began_again, plain, preload, results
from benchmarks.inplace_scripts.verdicts import difference
from benchmarks.inplace_scripts.warm import Ran, in_place

PATIENCE_S = 60.0
VERDICTS = ("healed", "began_again", "refused", "not_measured", "ended", "hung", "wrong_silently")
FAR = 0.05  # of a loss: roundings grow, but not to that within a few dozen updates
BAD = ("ended", "hung", "wrong_silently")
Row = dict[str, Any]

PLAINEST = {kind: next(iter(choices)) for kind, choices in USUALLY.items()} | dict.fromkeys(RARELY, "none")
PLAINEST |= {"metric": "none", "outer": "epochs", "inner": "for", "body": "inline", "scope": "module", "size": "small"}


def judged(ran: Ran, folder: Path, wanted: dict[int, Any], strike: str) -> tuple[str, str]:
    """Return the verdict on a run in place, and why; `strike` is as the script has it, empty where nobody is struck."""
    struck = (folder / MARK).exists()
    if ran.state == "hung":
        return "hung", ran.logs[-300:]
    if not ran.finished:
        return ("refused", ran.refusal) if ran.refusal and not struck else ("ended", ran.reason)
    if why := difference(results(folder, len(wanted)), wanted):
        return "wrong_silently", why
    if strike and not struck:
        return "not_measured", "nobody was struck"
    again = began_again(folder)
    return ("healed", "") if again <= {int(strike.partition(":")[0] or 0)} else ("began_again", ran.told)


class Trial:
    """One script, and its runs.

    Args:
        scene: a cluster.
        text: the script.
        chosen: what was drawn for it.
        folder: its own, a new one.
    """

    def __init__(self, scene: Scene, text: str, chosen: Mapping[str, str], folder: Path) -> None:
        self._scene, self._folder, self._strike = scene, folder, chosen["at"]
        self._ranks, self._is_sparse = int(chosen["ranks"]), chosen.get("model") == "sparse"
        folder.mkdir(parents=True)
        self._script = folder / "script.py"
        self._script.write_text(text)
        self._plain = asyncio.ensure_future(asyncio.to_thread(plain, self._script, folder / "plain", self._ranks))

    async def begin(self) -> None:
        """Run the script by plain processes; these may run while another is tried."""
        await self._plain

    async def row(self, ways: Sequence[str] = ("calm", "struck")) -> Row:
        """Return what came of the script in place."""
        wanted = await self._plain
        if len(wanted) < self._ranks:
            log = (self._folder / "plain" / "log-0").read_text(errors="replace")
            return {"verdict": "not_measured", "why": log[-300:]}
        if self._ranks > 2 and self._is_sparse:  # the sum of two is the same in any order
            ran = await self._run("bare", "", drill=False)
            if not ran.finished:
                bare, why = await asyncio.to_thread(judged, ran, self._folder / "bare", wanted, "")
                return {"verdict": bare, "why": why, "bare": bare}
            theirs, wanted = wanted, await asyncio.to_thread(results, self._folder / "bare", self._ranks)
            if far := _far(wanted, theirs):
                return {"verdict": "wrong_silently", "why": f"other losses than plain: {far}", "bare": "wrong_silently"}
        row: Row = {"verdict": VERDICTS[0], "why": ""}
        for way in ways:
            strike = self._strike if way == "struck" else ""
            proven = bool(row.get("calm_drills")) and not any(row["calm_drills"])
            ran = await self._run(way, strike, drill=not proven)  # else all begin anew as long as it is not tried
            row[way], why = await asyncio.to_thread(judged, ran, self._folder / way, wanted, strike)
            row |= {f"{way}_s": round(ran.seconds, 2), f"{way}_drills": ran.drills}
            if row[way] not in {"healed", "began_again"} or not row["why"]:
                row["why"] = why
            if VERDICTS.index(row[way]) > VERDICTS.index(row["verdict"]):
                row["verdict"] = row[way]
            if row[way] in BAD or row[way] == "refused":
                break
        return row

    async def _run(self, way: str, strike: str, **own: Any) -> Ran:
        folder = self._folder / way
        folder.mkdir()
        words, name = [str(self._script), str(folder), *([strike] if strike else [])], f"{self._folder.name}-{way}"
        ran = await in_place(self._scene, name, words, self._ranks, PATIENCE_S, workdir=str(folder), **own)
        (self._folder / f"{way}.log").write_text(f"{ran.logs}\n{ran.state}: {ran.reason}\n")
        return ran


def _far(ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    """Return which mean losses are further from a plain run's than by the order of sums; empty where none are."""
    pairs = zip(ours[0]["history"], theirs[0]["history"], strict=True)
    return ", ".join(
        f"{one:.4g} for {other:.4g}" for one, other in pairs if abs(one - other) > FAR * max(1.0, abs(other))
    )


async def shrunk(scene: Scene, chosen: Mapping[str, str], row: Row, folder: Path) -> dict[str, str]:
    """Return the parts that a script takes to come to its verdict, found by leaving out what it can do without."""
    left, way = dict(chosen), next((way for way in ("calm", "struck") if row.get(way) == row["verdict"]), "calm")
    tried = itertools.count()

    async def leave_out(kinds: Sequence[str]) -> None:
        less = left | {kind: PLAINEST[kind] for kind in kinds}
        trial = Trial(scene, written(less), less, folder.with_name(f"{folder.name}-less-{next(tried)}"))
        if (await trial.row([way]))["verdict"] == row["verdict"]:
            left.update(less)
        elif len(kinds) > 1:
            middle = len(kinds) // 2
            await leave_out(kinds[:middle])
            await leave_out(kinds[middle:])

    await leave_out([kind for kind in PLAINEST if left[kind] != PLAINEST[kind]])
    return {kind: left[kind] for kind in PLAINEST if left[kind] != PLAINEST[kind]}


def figures(rows: Sequence[Row]) -> Figures:
    """Return how many scripts came to what."""
    counted, calm = (Counter(row.get(which, "not_measured") for row in rows) for which in ("verdict", "calm"))
    outside = Counter(row["verdict"] for row in rows if row["moment"] != "between")
    measured = outside.total() - outside["not_measured"]
    again = [row for row in rows if row["verdict"] == "began_again"]
    return {
        "cases": len(rows),
        **{name: counted[name] for name in VERDICTS},
        **{f"calm_{name}": calm[name] for name in ("refused", *BAD)},
        "said": sum(bool(row["why"]) for row in again),
        "proven": sum(bool(row.get("calm_drills")) and not any(row["calm_drills"]) for row in rows),
        "outside_healed": round(outside["healed"] / measured, 3) if measured else 0.0,
        "script_s": stats.median((row["seconds"] for row in rows), 1) if rows else 0.0,
    }


def moments(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Return verdicts by the moment of the strike."""
    found = {moment: Counter(row["verdict"] for row in rows if row["moment"] == moment) for moment in MOMENTS.values()}
    return {moment: {name: counted[name] for name in VERDICTS} for moment, counted in found.items() if counted}


def only_plain(options: Options, numbers: Sequence[int], root: Path) -> Result:
    """Run scripts twice by plain processes: each is to end well, with the same results."""
    failed, varied = [], []
    for number in numbers:
        text, chosen = made(options.seed, number, options.ranks)
        folder, ranks = root / f"{options.seed}-{number}", int(chosen["ranks"])
        folder.mkdir(parents=True)
        (folder / "script.py").write_text(text)
        one, other = (plain(folder / "script.py", folder / name, ranks) for name in ("one", "other"))
        parts = {kind: name for kind, name in chosen.items() if name != "none"}
        if len(one) < ranks or len(other) < ranks:
            failed.append(number)
            say(f"{number} fails: {(folder / 'one' / 'log-0').read_text(errors='replace')[-400:]} {parts}")
        elif why := difference(one, other):
            varied.append(number)
            say(f"{number} varies: {why} {parts}")
    return Result({"cases": len(numbers), "failed": len(failed), "varied": len(varied)})


async def measure(options: Options, folder: Path) -> Result:
    """Make scripts up and run them."""
    preload("benchmarks.inplace_scripts.warm")
    os.environ |= {"UNICRON_ATTEMPTS": "1000", "UNICRON_NO_PROGRESS": "4", **ONE_THREAD}  # plain runs too
    root, rows = (options.keep or folder).resolve(), []
    numbers = options.only or range(options.first, options.first + options.count)
    if options.plain:
        return await asyncio.to_thread(only_plain, options, numbers, root)
    async with running(root / "cluster", 1, max(options.ranks)) as scene:

        def trial(number: int) -> tuple[Trial, dict[str, str]]:
            text, chosen = made(options.seed, number, options.ranks)
            return Trial(scene, text, chosen, root / f"made-{options.seed}-{number}"), chosen

        following = trial(numbers[0])
        for place, number in enumerate(numbers):
            (script, chosen), began = following, time.monotonic()
            await script.begin()
            following = trial(numbers[place + 1]) if place + 1 < len(numbers) else following
            row = await script.row(["struck"] if options.struck else ["calm", "struck"])
            row |= {"number": number, "moment": MOMENTS[chosen["strike"]], "chosen": chosen}
            row |= {"seconds": time.monotonic() - began}
            if options.shrink and row["verdict"] in BAD:
                row["takes"] = await shrunk(scene, chosen, row, root / f"made-{options.seed}-{number}")
            rows.append(row)
            _tell(row, place + 1, len(numbers))
    return Result(figures(rows), details={"moments": moments(rows), "rows": rows})


def _tell(row: Row, place: int, count: int) -> None:
    chosen = row["chosen"]
    parts = row.get("takes") or {kind: name for kind, name in chosen.items() if name != "none"}
    runs = "/".join(f"{row[way]} {row.get(f'{way}_s', 0)} s" for way in ("bare", "calm", "struck") if way in row)
    head = f"[{place}/{count}] {row['number']} {row['verdict']} ({row['moment']}, {row['seconds']:.1f} s: {runs})"
    why = " ".join(row["why"].split())[:400]
    say(head if row["verdict"] == "healed" else f"{head}: {why} {parts}")


if __name__ == "__main__":
    main(
        measure,
        option("--count", default=20, help="of scripts"),
        option("--seed", default=1),
        option("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2], metavar="N,..."),
        option("--first", default=0, help="number of the first of them"),
        option("--only", type=int, nargs="*", metavar="NUMBER", help="these alone"),
        option("--struck", action="store_true", help="leave the run out that nobody strikes"),
        option("--plain", action="store_true", help="run them by plain processes alone, twice"),
        option("--shrink", action="store_true", help="name the parts that what is wrong, ended or hung takes"),
        option("--keep", type=Path, metavar="DIR", help="where scripts, logs and results stay; a new folder"),
    )

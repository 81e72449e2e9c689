"""The command `unicron simulate`: what failures cost under several policies, on traces or on one's own failure log."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.errors import InvalidInputError
from unicron_cli.output import Json, needs, print_json, say

app = typer.Typer(invoke_without_command=True)

POLICIES = "unicron,megatron,oobleck,varuna,bamboo,oracle"


@app.callback()
def simulate(
    context: typer.Context,
    trace: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="trace-a, trace-b, llama3, meta-rsc, opt, bloom, or a CSV file.")
    ] = "trace-a",
    policies: Annotated[str, typer.Option(metavar="NAMES", help="Policies, with commas between.")] = POLICIES,
    nodes: Annotated[int, typer.Option(min=0, help="Nodes of the cluster; 0 for those of the trace.")] = 0,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    days: Annotated[float, typer.Option(min=0, help="Length; 0 for that of the trace.")] = 0,
    tasks: Annotated[
        str, typer.Option(metavar="FILE", help="Task files with --- between; or case5, case5-as-planned.")
    ] = "case5",
    seed: Annotated[int, typer.Option(help="The same seed gives the same failures.")] = 1,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Other parameters of the policies (TOML).")] = None,
    my_cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your cluster and its failure log: what would have been saved?")
    ] = None,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - prints it.")] = "",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (.svg or .png).")] = None,
) -> None:
    """Run policies through failures in virtual time; show what each earns and what failures cost it."""
    if context.invoked_subcommand:
        return
    if plot is not None:
        from unicron_cli.plot import check_path  # noqa: PLC0415

        check_path(plot)
    with needs("unicron simulate", "planner"):
        from unicron_simulator.policies import report  # noqa: PLC0415
    if my_cluster is not None:
        found = report.my_cluster(my_cluster, costs)
    else:
        names = [name.strip() for name in policies.split(",") if name.strip()]
        found = report.compared(trace, names, tasks, seed=seed, nodes=nodes, gpus=gpus, days=days, costs=costs)
    _show(found, json_file, plot)


@app.command()
def storm(
    seeds: Annotated[int, typer.Option(min=1, help="How many storms.")] = 100,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    lies: Annotated[bool, typer.Option("--lies", help="Let nodes and strangers lie, too.")] = False,
    clocks: Annotated[bool, typer.Option("--clocks", help="Let clocks be wrong, too, be set, and sleep.")] = False,
    lacks: Annotated[bool, typer.Option("--lacks", help="Let nodes lack room, files or ports.")] = False,
    as_json: Json = False,
) -> None:
    """Run the real services through seeded storms of faults, and check invariants after every step."""
    with needs("unicron simulate storm", "planner,train"):
        from unicron_simulator.storms.storm import run  # noqa: PLC0415
    began, bad, virtual, messages, lied = time.monotonic(), [], 0.0, 0, 0
    for done, number in enumerate(range(seed, seed + seeds), start=1):
        outcome = run(number, lies=lies, clocks=clocks, lacks=lacks)
        virtual, messages, lied = virtual + outcome.virtual_s, messages + outcome.messages, lied + outcome.lies
        if outcome.violation:
            bad.append(outcome)
            say(f"\nseed {number}: {outcome.violation}\n{outcome.story}")
        elif sys.stderr.isatty() or done % 50 == 0:
            say(f"{done} of {seeds} storms, {len(bad)} with a violation", err=True)
    took = time.monotonic() - began
    if as_json:
        figures = {"seeds": seeds, "violations": len(bad), "wall_s": round(took, 1), "virtual_s": round(virtual)}
        print_json({**figures, "messages": messages, "lies": lied, "bad": bad})
    else:
        summary = f"{seeds} storms, {virtual:.0f} virtual s, {messages} messages ({lied} lies) in {took:.0f} s"
        say(f"{summary}: {len(bad)} with a violation")
    raise typer.Exit(1 if bad else 0)


def _show(report: dict[str, Any], json_file: str, plot: Path | None) -> None:
    """Print the report as a table, and write and draw it where that is asked for."""
    from unicron_simulator.policies import plots  # noqa: PLC0415

    if json_file != "-":
        say(_table(report))
    _write_json(report, json_file)
    if plot is not None:
        plots.draw(report["results"], f"{report['trace']['name']}, {', '.join(report['tasks'])}", plot)


def _table(report: dict[str, Any]) -> str:
    """Return the report as a table for people."""
    from unicron_simulator.policies.comparison import UNICRON  # noqa: PLC0415
    from unicron_simulator.policies.traces import DAY  # noqa: PLC0415

    trace, rows = report["trace"], report["policies"]
    faults = ", ".join(f"{trace[kind]} {kind}" for kind in ("sev1", "sev2", "sev3"))
    size = f"{trace['nodes']} nodes of {trace['gpus_per_node']} GPUs"
    lines = [f"{trace['name']}: {trace['days']:g} days on {size}; {faults}", ""]
    lines.append(
        f"{'policy':18}{'WAF, PFLOP/s':>13}{'of ideal':>10}{'detection':>11}{'transition':>12}{'sub-healthy':>13}"
    )
    seconds, best = trace["days"] * DAY, rows.get(UNICRON)
    for policy, row in rows.items():
        parts = [
            row[part] / row["ideal"] if row["ideal"] else 0.0 for part in ("detection", "transition", "sub_healthy")
        ]
        share = row["earned"] / row["ideal"] if row["ideal"] else 0.0
        lead = f"  unicron earns {best['earned'] / row['earned']:.2f} x" if best and row["earned"] else ""
        text = f"{policy:18}{row['earned'] / seconds / 1e15 if seconds else 0.0:13.3f}{share:10.2%}"
        lines.append(
            text + "".join(f"{part:{width}.2%}" for part, width in zip(parts, (11, 12, 13), strict=True)) + lead
        )
    if "saved_gpu_hours" in report:
        total, saved = report["gpu_hours"], report["saved_gpu_hours"]
        lines += ["", f"Self-healing would have saved {saved:,.0f} of {total:,.0f} GPU hours ({saved / total:.1%})."]
    return "\n".join(lines)


def _write_json(report: dict[str, Any], given: str) -> None:
    """Write the report to a file, or for "-" to standard output.

    Raises:
        InvalidInputError: the file can't be written.
    """
    text = json.dumps({name: value for name, value in report.items() if name != "results"})
    if given == "-":
        say(text)
    elif given:
        try:
            Path(given).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"--json {given}: can't be written ({error.strerror})") from error

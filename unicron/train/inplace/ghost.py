"""A ghost: a process that takes a rank's place on trial. It is no member of any group, and nobody sees what it does.

It begins as a replacement would, from what the rank has recorded (`unicron.train.inplace.recording`), and is given the
results of the collectives that the rank took part in. What it contributes to them is compared with what the rank did,
and at the end of the recording all that there is: parameters, moments, buffers, variables, generators, position.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from unicron.contracts.worker import NOWHERE, Membership, ToAgent
from unicron.errors import UnicronError
from unicron.exception_texts import cut
from unicron.train.carry.compare import first_difference, never_read, snapshot_differences
from unicron.train.carry.files import Files
from unicron.train.carry.inert import read, without_aids
from unicron.train.carry.kinds import NotCarriedError, OwnCheckpointNewerError
from unicron.train.carry.scripted import rounding_hint
from unicron.train.groups.switched import Work
from unicron.train.inplace.files_of_ghost import NOT_THERE, GhostFiles
from unicron.train.inplace.groups import ScriptGroups
from unicron.train.inplace.inplace import InPlace
from unicron.train.inplace.member import Member
from unicron.train.inplace.recording import Recorded, contribution, copies, flatten, record_of, record_state
from unicron.train.inplace.seed import VERDICT, Seed, last_line
from unicron.train.inplace.takeover import Takeover
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.session.gradients import TorchGradients, are_close
from unicron.train.snapshots.gathering import Gathering, collect_state, load_state
from unicron.train.snapshots.packed import Packing, map_file, unpack
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.injected import Injected
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.telling import tell

OURS = Path(__file__).parents[2]
"""The package whose errors are ours."""

ROUNDING = 1e-3
"""By how much numbers may differ, in relation to the largest, on GPUs: some kernels add up in no certain order."""

OTHER = "other"
"""File of a trial with what a first ghost came to: what differs between two of them differs by itself, as a clock."""

COMPARED_APART = frozenset({"loops", "groups", "before"})
"""Parts of the state that say where a script is, what its collectives gave, and what was before."""

PARTS = {"model": "the model", "optimizer": "the optimizer", "beside": "what the script has outside of its model"}
"""Names of parts of the state, for people."""

OWN_MOMENTS = "`moments` of optimizers"
"""How a snapshot names what of optimizers' states is the rank's own."""


class Silent:
    """An agent's channel that leads nowhere."""

    iteration = -1
    newest = NOWHERE

    def __init__(self) -> None:
        self.injected = Injected()
        self.on_membership: Callable[[Membership], bool] = lambda _: False

    def send(self, message: ToAgent) -> None:
        """Do nothing."""


class GhostCore:
    """The worker's core of a ghost: each iteration takes the course that it took for the rank.

    Args:
        recorded: what happened.
        iteration: that comes first.
        gradients: of the models.
        names: of their parameters, by identity.
        place: of the rank.
    """

    epoch, membership = 0, NOWHERE

    def __init__(self, recorded: Recorded, gradients: TorchGradients, names: Mapping[int, str], place: int) -> None:
        self._recorded, self._gradients, self._names, self._place = recorded, gradients, names, place
        self.phase, self.iteration = IterationPhase.BETWEEN, int(recorded.begin["iteration"])

    def enter(self, *, late: bool = False) -> bool:
        """Go to the next iteration."""
        del late  # nobody measures it
        return True

    async def next_microbatch(self) -> int | None:
        """Return the only microbatch; None once it is computed: then the gradient is that of all ranks."""
        if self.phase is IterationPhase.BETWEEN:
            if self.iteration >= self._recorded.end["iteration"]:
                where = self._recorded.end["record"][0][-1][0]
                finish_trial(
                    problem=f"it does not come to {where} after iteration {self.iteration - 1}, as the rank did"
                )
            self._gradients.clear()
            self.phase = IterationPhase.OPEN
            return self._place
        _, reduced = self._recorded.iteration(self.iteration)
        self._gradients.take_reduced(reduced)
        self._gradients.publish()
        self.phase = IterationPhase.REDUCED
        return None

    def computed(self) -> None:
        """Compare the gradient that was computed with the rank's."""
        self._gradients.accumulate()
        given, _ = self._recorded.iteration(self.iteration)
        rounding = ROUNDING if torch.cuda.is_available() else 0.0
        if where := self._gradients.first_difference(given, self._names, rounding):
            finish_trial(problem=f"{where} is another one in iteration {self.iteration}{rounding_hint()}")

    async def step(self) -> None:
        """End the iteration."""
        self.iteration += 1
        self.phase = IterationPhase.BETWEEN


class TrialTakeover(Takeover):
    """The takeover of a rank on trial: it is compared with the rank, and what can't be is its verdict.

    Args:
        member: the rank on trial.
        files: that the script opens.
        folder: of the trial.
        recorded: what happened.
    """

    def __init__(self, member: Member, files: Files, folder: Path, recorded: Recorded) -> None:
        super().__init__(member, files, None)
        self._folder, self._recorded, self._arrived = folder, recorded, False

    def take_over(self) -> None:
        """Take the place of the rank."""
        self._loops.take_over(record_of(self._recorded.begin), self._arrive)

    def _arrive(self) -> None:
        self._arrived = self._member.trained.moments.left_out = True
        self._files.write_in_place()

    def publish(self, record: LoopSnapshot | NotCarriedError) -> None:
        """Compare what there is, where the recording ends."""
        if not self._arrived and isinstance(record, NotCarriedError):
            if isinstance(record, OwnCheckpointNewerError):  # which was not there when the rank was where it begins
                finish_trial(unproven=str(record))
            finish_trial(problem=str(record))
        end = self._recorded.end
        if not self._arrived or self._member.core.iteration < end["iteration"]:
            return
        if isinstance(record, NotCarriedError):
            finish_trial(problem=str(record))
        if [list(each) for each in record.chain] == end["record"][0]:
            self._compare(record, end)

    def _compare(self, record: LoopSnapshot, end: Mapping[str, Any]) -> NoReturn:
        state = collect_state(self._member.core.iteration, self._member.states.protected)
        found = self._through_file("ours", state)["objects"]
        rounding = ROUNDING if torch.cuda.is_available() else 0.0
        for name, value in found.items():
            if name not in COMPARED_APART and (where := state_difference(value, end["objects"][name], rounding)):
                last, hint = end["iteration"] - 1, rounding_hint()
                finish_trial(problem=f"{PARTS.get(name, name)} differs after iteration {last}: {where}{hint}")
        dead = set[Any]().union(*map(never_read, record_of(self._recorded.begin).snapshots))
        differences = _differences(record, record_of(end), dead)
        other = self._folder / OTHER
        if not differences:
            finish_trial()
        if not other.exists():  # a clock differs by itself: another ghost shows what does
            self._through_file(OTHER, record_state(self._member.core.iteration, record))
            finish_trial(again=True)
        by_itself = _differences(record, record_of(unpack(other, other.stat().st_size)), dead)
        for name, text in differences.items():
            if name not in by_itself:
                finish_trial(problem=f"{text}, after iteration {end['iteration'] - 1}")
        finish_trial(by_itself=sorted(by_itself))

    def _through_file(self, name: str, state: Mapping[str, Any]) -> Any:
        """Return a state as it is read from a file of the trial."""
        packing = Packing(state)
        packing.write(map_file(self._folder / name, packing.size))
        return unpack(self._folder / name, packing.size)

    def run_collective(self, name: str, arguments: Sequence[Any], rank: int, begin: Callable[[], Work]) -> Work | None:
        """Give the results of a collective of the script's own to it; replay those before the rank's place."""
        if not self._arrived:
            return begin()
        called = self._recorded.next_collective()
        if called is None or called.name != name:
            wanted = f"`{called.name}`" if called else "no further one"
            finish_trial(problem=f"it calls the collective `{name}` where the rank called {wanted}")
        if where := first_difference(copies(contribution(name, arguments, rank)), called.given):
            finish_trial(problem=f"it contributes something else to the collective `{name}`: {where}")
        for tensor, left in zip(flatten(list(arguments)), called.left, strict=True):
            tensor.data.copy_(left)
        return None

    def refuse_all(self, why: str) -> NoReturn:
        """End the trial: no process could take the rank's place."""
        finish_trial(problem=why)

    def begin_again(self, why: str) -> NoReturn:
        """End the trial: this process would not continue as the rank."""
        finish_trial(problem=why)


class Ghost(InPlace):
    """A rank on trial.

    Args:
        folder: of the trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._recorded = folder, Recorded(folder)
        files: Any = GhostFiles(folder, folder / f"files-{os.getpid()}", lambda why: finish_trial(unproven=why))
        files.install()
        self._has_copy_named_in: Callable[[str], bool] = files.has_copy_named_in
        super().__init__(cast("AgentChannel", Silent()), files, None)
        self._member.line, self._member.abandon = None, report_failure
        self.abandon = self.loops.abandon = self.iteration.abandon = report_failure

    def _make_takeover(self, seed: Seed | None) -> TrialTakeover:  # noqa: ARG002 nobody tries a trial
        self._trial = TrialTakeover(self._member, self._files, self._folder, self._recorded)
        return self._trial

    def _join_membership(self, groups: ScriptGroups) -> None:
        groups.replay_setup(bytes(self._recorded.begin["setup"]))
        self._files.hide_made_since(groups.began_at)
        if self._files.begins_otherwise:
            finish_trial(problem=self._files.begins_otherwise)
        groups.trial = self._trial

    def _join_ranks(self) -> None:
        """Take the recorded state, and the place of the rank."""
        protected = self._member.states.protected
        gathering = Gathering(protected)
        gathering.add(self._recorded.begin)
        if gathering.missing:
            finish_trial(problem=f"the state of the rank lacks {gathering.missing}")
        load_state(gathering.result(int(self._recorded.begin["iteration"])), protected)
        names = {id(each): name for model in self.trained.models for name, each in model.module.named_parameters()}
        core: Any = GhostCore(self._recorded, self._member.gradients, names, self.rank)
        self._member.core = core
        self._trial.take_over()

    def _tell_failed(self, error: BaseException) -> None:
        """Leave it to whoever has started this process."""

    def _finish(self, where: str) -> None:
        for each in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # whatever the script has there
                each.flush()
        said = last_line(self._folder)
        how = "unproven" if self._has_copy_named_in(said) else "problem"
        finish_trial(**{how: f"it has ended its script {where}, and the rank had not{said}"})


def state_difference(ours: Any, theirs: Any, rounding: float) -> str:
    """Return where two states that were read from files first differ; empty where they don't.

    Args:
        ours: nested dictionaries and lists of tensors and plain values.
        theirs: likewise.
        rounding: how far numbers of a tensor may be apart, in relation to its largest; 0: they are the same bits.
    """
    if not rounding:
        return first_difference(ours, theirs)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and ours.is_floating_point():
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return "" if same and are_close(ours, theirs, rounding) else first_difference(ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(f"[{name!r}]", each, theirs[name]) for name, each in ours.items()]
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = [(f"[{at}]", each, theirs[at]) for at, each in enumerate(ours)]
    else:
        return first_difference(ours, theirs)
    found = ((path, state_difference(mine, other, rounding)) for path, mine, other in pairs)
    return next((f"{path}{where}" for path, where in found if where), "")


def _differences(ours: LoopSnapshot, theirs: LoopSnapshot, dead: AbstractSet[Any]) -> dict[str, str]:
    """Return where the snapshots of two processes that are at the same place differ, by what it is."""
    found = dict[str, str]()
    pairs = zip(ours.snapshots, theirs.snapshots, strict=True)
    for mine, other in ((mine, other) for mine, other in pairs if mine != other):
        found |= snapshot_differences(mine, other, dead)
    found.pop(OWN_MOMENTS, None)  # compared with the optimizers; whose they are the rank may find out meanwhile
    for (place, *_), mine, other in zip(ours.chain, ours.positions, theirs.positions, strict=True):
        if mine != other and (where := first_difference(*(without_aids(read(each)) for each in (mine, other) if each))):
            found[place] = f"what the loop at {place} goes over: {where}"
    return found


def finish_trial(**verdict: Any) -> NoReturn:
    """Leave a verdict behind, and end this process."""
    folder = Path(os.environ["UNICRON_GHOST"])
    unfinished = folder / f"{VERDICT}.part"
    unfinished.write_text(json.dumps(verdict))
    unfinished.rename(folder / VERDICT)
    with contextlib.suppress(Exception):  # whatever the script has there
        sys.stdout.flush()
    os._exit(0)


def report_failure(error: BaseException) -> NoReturn:
    """Leave behind why the script failed in this process."""
    trace = traceback.extract_tb(error.__traceback__)
    in_ours = bool(trace) and Path(trace[-1].filename).is_relative_to(OURS) and not isinstance(error, UnicronError)
    theirs = [each for each in trace if isinstance(error, OSError) and not Path(each.filename).is_relative_to(OURS)]
    where = "".join(f" at {Path(each.filename).name}:{each.lineno}" for each in (theirs or trace)[-1:])
    text = cut(f"{type(error).__name__}{where}: {error}", 500)
    tell("".join(traceback.format_exception(error)).rstrip())
    if NOT_THERE in getattr(error, "__notes__", ()):
        finish_trial(problem=f"{text}, {NOT_THERE}")
    if isinstance(error, OSError):  # as it may write nowhere, and finds its own files by Python's calls only
        finish_trial(unproven=f"a process on trial can't do what the script does with files or connections: {text}")
    whose = " (a line of Unicron: where the script has nothing to do with it, please report it)" * in_ours
    finish_trial(problem=text + whose)

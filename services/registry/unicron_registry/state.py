"""The state of the registry."""

import msgspec

from unicron.contracts.answers import NodeView, TaskView
from unicron.contracts.plans import Plan
from unicron.contracts.ranges import Seconds


class RegistryState(msgspec.Struct, kw_only=True):
    """Committed after every change that others hear of.

    Attributes:
        nodes: by name, those that went away included.
        tasks: by name, in order of submission, until a user removes them.
        plan: the last one decided.
        drained: nodes that a user took out of use; holds over restarts of their agents.
        paced: nodes by when they were last ordered how often to beat, and how often.
        leaving: those of them that are so only because their agents said they leave: until they join again.
        helpless: those that are so only because their standbys died again and again: until one lives.
        idle: tasks of which nothing runs; a timer looks after each.
        missed: of each task the patterns of which nodes have said that nothing there matches, and which.
        retired: nodes whose machines are given back, and which those are: another machine of that name is used.
        told: of each task the nodes that may report its states, and which workers there were ordered to save theirs.
        observe_only: whether the cluster only says what it would do by itself.
    """

    nodes: dict[str, NodeView] = {}
    tasks: dict[str, TaskView] = {}
    plan: Plan | None = None
    drained: list[str] = []
    leaving: list[str] = []
    helpless: list[str] = []
    retired: dict[str, str] = {}
    paced: dict[str, Seconds] = {}
    idle: list[str] = []
    missed: dict[str, dict[str, list[str]]] = {}
    told: dict[str, dict[str, list[str]]] = {}
    observe_only: bool = False

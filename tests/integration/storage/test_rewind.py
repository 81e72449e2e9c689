"""Going back to an earlier checkpoint: later ones count no more, and are removed after a day."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.stored import TASK, alter, save_trained

from unicron.storage import catalog, check
from unicron.storage.manifest import REWOUND
from unicron.storage.root import Storage

DAY = 24 * 3600.0


@pytest.fixture
def storage(tmp_path):
    for iteration in (1, 2, 3):
        save_trained(tmp_path, iteration)
    return Storage(str(tmp_path))


def newest(storage):
    return catalog.newest(storage, TASK).stored.iteration


def known(storage):
    """Return the iteration of each checkpoint, and whether it was put aside."""
    return [(each.iteration, each.rewound) for each in catalog.found(storage, TASK)]


def test_the_newest_is_then_the_one_that_was_gone_back_to(storage):
    assert newest(storage) == 3
    assert catalog.rewind(storage, TASK, 1).stored.iteration == 1
    assert newest(storage) == 1
    assert known(storage) == [(3, True), (2, True), (1, False)]
    for each in catalog.found(storage, TASK):
        assert check.strangers(storage, (TASK, each.folder), each.manifest) == []


def test_one_that_is_written_later_counts_even_where_it_is_of_an_earlier_iteration(storage, tmp_path):
    catalog.rewind(storage, TASK, 1)
    save_trained(tmp_path, 2)
    assert newest(storage) == 2
    assert sorted(known(storage)) == [(1, False), (2, False), (2, True), (3, True)]


@pytest.mark.parametrize("iteration", [7, 2])
def test_where_that_one_is_not_there_or_damaged_nothing_is_put_aside(storage, iteration):
    second = next(each for each in catalog.found(storage, TASK) if each.iteration == 2)
    alter(next(Path(second.address).glob("*.distcp")))
    assert catalog.rewind(storage, TASK, iteration).stored is None
    assert known(storage) == [(3, False), (2, False), (1, False)]
    assert newest(storage) == 3


def test_what_no_longer_counts_does_not_make_others_superfluous_and_is_removed_after_a_day(storage):
    catalog.rewind(storage, TASK, 1)
    assert catalog.prune(storage, TASK, 2, time.time()).removed == []
    removed = catalog.prune(storage, TASK, 2, time.time() + 2 * DAY).removed
    assert len(removed) == 2
    assert [each.iteration for each in catalog.found(storage, TASK)] == [1]
    assert not list(Path(storage.address(TASK)).rglob(REWOUND))


def test_looking_for_a_checkpoint_does_not_wait_for_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\nfrom unicron.train.stored import __main__ as it; sys.exit(it.main())"
    )
    request = {"do": "find", "root": str(tmp_path), "task": "t", "since": 0.0, "before": -1, "iteration": -1}
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(request)], capture_output=True, check=True)
    assert json.loads(ended.stdout) == {"stored": None, "skipped": []}

"""An agent and its run folder."""

import pytest
from unicron_agent import main

from unicron.errors import InvalidInputError


async def test_a_run_folder_is_for_one_agent_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "DYING_S", 0.01)
    await main.lock_run_folder(tmp_path)
    with pytest.raises(InvalidInputError, match=rf"another agent \(process \d+\) works in {tmp_path}.* --run-dir"):
        await main.lock_run_folder(tmp_path)

"""The list of commands, which is shown without loading any."""

import pytest
from unicron_cli.main import COMMANDS, load


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_list_says_of_a_command_is_what_its_own_help_begins_with(name):
    assert " ".join(load(name).help.partition("\n\n")[0].split()) == COMMANDS[name][1]

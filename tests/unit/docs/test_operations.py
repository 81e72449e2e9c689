"""docs/operations.md says of the settings what the classes say."""

import importlib.util

from helpers import ROOT

DOCS = ROOT / "docs"


def test_the_tables_of_settings_are_what_the_classes_say():
    spec = importlib.util.spec_from_file_location("docs_settings", DOCS / "settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "operations.md").read_text()
    assert page == module.page(), "run: .venv/bin/python docs/settings.py"
    assert "| `UNICRON_SLOTS` | `--slots` | `0` |" in page

import subprocess
import sys
import tomllib
from importlib.resources import files

import pytest

from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import catalogue
from unicron.errors import InvalidInputError


def test_the_catalogue_has_the_papers_gpus_and_sizes():
    assert list(catalogue.accelerators()) == ["A100", "A800", "H100", "H800", "H200", "B200"]
    assert list(catalogue.sizes()) == ["1.3B", "7B", "13B", "70B", "175B"]


def test_figures_are_those_of_the_data_sheets():
    assert catalogue.accelerator("A100").peak_flops == 312e12
    assert catalogue.accelerator("H200").memory_bytes == 141e9
    assert catalogue.accelerator("A800").link_bandwidth < catalogue.accelerator("A100").link_bandwidth
    assert catalogue.size("175B") == catalogue.Size(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)


@pytest.mark.parametrize("name", ["accelerators.toml", "models.toml"])
def test_every_entry_has_a_comment_that_names_its_source(name):
    text = files("unicron.costmodel").joinpath(name).read_text()
    if name == "models.toml":
        assert "arXiv:2005.14165" in text
        return
    for entry in tomllib.loads(text):
        before = text.partition(f"\n[{entry}]")[0].rpartition("\n\n")[2]
        assert before.startswith("# NVIDIA"), entry


@pytest.mark.parametrize(("read", "says"), [(catalogue.accelerator, "B200"), (catalogue.size, "175B")])
def test_an_unknown_name_is_refused_with_the_known_ones(read, says):
    with pytest.raises(InvalidInputError, match=says):
        read("V100")


def test_task_files_and_checks_need_no_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import unicron.checks, unicron_taskfile, unicron.costmodel.formulas\n"
        "from pathlib import Path\n"
        "text = 'name: a\\ncommand: b\\nmodel: {size: 7B, batch: 8}'\n"
        "print(unicron_taskfile.parse(text, Path('/t.yaml')).spec.model.layers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("32\n", "")


def test_sizes_have_the_fields_of_a_model():
    assert set(catalogue.Size.__struct_fields__) < set(ModelSpec.__struct_fields__)

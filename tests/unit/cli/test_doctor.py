"""What `unicron doctor` says of this machine."""

from unicron_cli.doctor import _overridden

from unicron.train.nccl import ENVIRONMENT


def test_variables_of_nccl_are_told_where_they_are_set_to_something_else(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert _overridden() == ""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    assert _overridden() == "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"

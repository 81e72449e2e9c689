"""Task files: YAML that a user writes, checked field by field, to a `TaskSpec`."""

from unicron_taskfile.document import FIELDS, TaskFile, compose, load, parse, read_mapping

__all__ = ["FIELDS", "TaskFile", "compose", "load", "parse", "read_mapping"]

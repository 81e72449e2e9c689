"""Task files: YAML that a user writes, checked field by field, to a `TaskSpec`."""

from unicron.taskfile.document import FIELDS, MOST_BYTES, TaskFile, compose, construct, load, parse, read_mapping

__all__ = ["FIELDS", "MOST_BYTES", "TaskFile", "compose", "construct", "load", "parse", "read_mapping"]

import enum
import functools
import json
import re

import msgspec
import pytest
from unicron_cli import docs
from unicron_cli.docs import _fields, records, subject_of
from unicron_cli.samples import sample
from unicron_deploy.rights import READ_JOURNAL, SUBSCRIBER, rights

from unicron import codec, subjects
from unicron.contracts.base import Message

render = functools.cache(docs.render)
ON_SUBJECTS = [*codec.MESSAGES.values(), *codec.QUERIES]


@pytest.mark.parametrize("kind", ON_SUBJECTS, ids=lambda kind: kind.__name__)
def test_each_message_has_its_subject_and_a_true_example(kind):
    found = re.search(rf"### {kind.__name__}\n.*?For example on `(.*?)`:\n\n```json\n(.*?)```", render(), re.DOTALL)
    assert found[1] == subject_of(kind)
    example = msgspec.json.decode(found[2], type=kind)
    read = codec.decode_message if issubclass(kind, Message) else codec.decode_query
    assert read(codec.encode(example)) == example == sample(kind)
    assert set(json.loads(found[2])) == {*kind.__struct_encode_fields__, "type"}


WITH_FIELDS = [kind for kind in [*ON_SUBJECTS, *records()] if not issubclass(kind, enum.Enum)]


@pytest.mark.parametrize("kind", WITH_FIELDS, ids=lambda kind: kind.__name__)
def test_each_field_is_explained(kind):
    assert [field.name for field in _fields(kind) if not field.text] == []


def test_each_type_that_a_field_names_stands_on_the_page():
    text = render()
    headings = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= headings


def test_units_and_lists_of_names_arrive():
    text = render()
    assert "| `at` | number | `0.0` | Unix seconds at which the source made the message. |" in text
    assert "| `slot` | whole number | `-1` | Whom it hit; empty or -1 where not applicable. |" in text
    assert "| `escalated` | [Severity](#severity) or null | `null` |" in text


def test_what_a_subscriber_is_told_to_type_its_key_gives_the_right_to():
    spans = re.findall(r"`([^`]*)`", docs.HEAD)
    patterns = [span for span in spans if span.startswith("unicron.") and {"*", ">"} & {*span}]
    assert len(patterns) >= 3
    # a wildcard is a token like another where it is held against a pattern
    assert [each for each in patterns if not subjects.matches(rights(SUBSCRIBER).subscribe, each)] == []
    assert [span for span in spans if span.startswith("$")] == [READ_JOURNAL[0]]

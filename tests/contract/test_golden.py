"""The wire format: bytes of one example of each message type, so that it can't change by accident.

`golden.json` holds, for each type, every encoding its example ever had. After adding a field on purpose, run
`python tests/contract/test_golden.py`, which adds the new encodings, and read the difference before committing it.
"""

import json
from pathlib import Path

import msgpack
import msgspec
import pytest
from unicron_cli.samples import example

from unicron import codec
from unicron.contracts import answers
from unicron.contracts.base import Word

PLAIN = {bytes: b"\x00\xff", bool: True, int: 7, float: 1.5}
GOLDEN = Path(__file__).with_name("golden.json")
KINDS = {**codec.MESSAGES, **{kind.__name__: kind for kind in (*codec.QUERIES, answers.Reply)}}


def golden(kind):
    """Return a value of a type with every field filled in, always the same."""
    return example(kind, "value", {}, lambda plain, name: name if plain is str else PLAIN[plain])


def is_word(kind):
    return isinstance(kind, type) and issubclass(kind, Word)


def decode(kind, data):
    if kind in codec.MESSAGES.values():
        return codec.decode_message(data)
    return codec.decode(data, kind) if kind is answers.Reply else codec.decode_query(data)


def load():
    return {name: [bytes.fromhex(text) for text in texts] for name, texts in json.loads(GOLDEN.read_text()).items()}


def test_every_type_has_its_golden_bytes():
    assert sorted(load()) == sorted(KINDS)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_encoding_has_not_changed(name):
    assert codec.encode(golden(KINDS[name])) == load()[name][-1], "changed on purpose? see this file's docstring"


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_encoding_there_ever_was_is_still_read_and_no_field_was_dropped(name):
    now = msgspec.to_builtins(golden(KINDS[name]), builtin_types=(bytes,))
    for data in load()[name]:
        read = decode(KINDS[name], data)
        assert type(read) is KINDS[name]
        held = msgpack.unpackb(data)
        assert set(held) <= set(now)
        words = {f.encode_name for f in msgspec.structs.fields(KINDS[name]) if is_word(f.type)}  # once any text
        assert {k: v for k, v in now.items() if k in held and k not in words and not isinstance(v, dict | list)} == {
            k: v for k, v in held.items() if k not in words and not isinstance(v, dict | list)
        }


@pytest.mark.parametrize("name", sorted(KINDS))
def test_any_msgpack_reads_it_as_a_map_with_its_type(name):
    held = msgpack.unpackb(codec.encode(golden(KINDS[name])))
    assert held.get("type", "Reply") == name
    assert all(isinstance(key, str) for key in held)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_unknown_fields_are_ignored_and_missing_optional_ones_get_their_defaults(name):
    kind = KINDS[name]
    fields = msgspec.structs.fields(kind)
    held = msgpack.unpackb(codec.encode(golden(kind)))
    required = {field.encode_name for field in fields if field.required} | {"type"}
    shortened = {key: value for key, value in held.items() if key in required}
    read = decode(kind, msgpack.packb({**shortened, "of_a_later_version": {"a": [1, None]}}))
    for field in fields:
        value = getattr(read, field.name)
        if field.required:
            assert value == getattr(golden(kind), field.name)
        elif field.default is not msgspec.NODEFAULT:
            assert value == field.default
        else:
            assert value == field.default_factory()


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for each, made in sorted(KINDS.items()):
        text = codec.encode(golden(made)).hex()
        if text not in known.setdefault(each, []):
            known[each].append(text)
    GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

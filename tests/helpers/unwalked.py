"""A map that shows who goes through all of a cluster where a look would do."""


class Unwalked(dict):
    """Things can be looked up in it and put in, but nobody can go through them."""

    def __iter__(self):
        raise AssertionError("somebody goes through all of them")

    keys = values = items = __iter__

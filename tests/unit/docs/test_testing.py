"""The page of tests lists them as they are."""

from helpers import catalogue


def test_the_page_lists_each_module_of_tests_with_what_runs_it(collected, request):
    whole = not any("::" in argument for argument in request.config.args)
    listed = catalogue.PAGE.read_text().partition(catalogue.BEGIN)[2].splitlines()
    missing = [row for row in catalogue.table(collected).values() if whole and row not in listed]
    assert not missing, "the list is out of date: run `make docs/testing.md`"


def test_what_is_left_out_of_make_test_says_why(collected):
    marks = [mark for item in collected for mark in item.iter_markers("exhaustive")]
    assert all(len(mark.args) == 1 and mark.args[0] for mark in marks)

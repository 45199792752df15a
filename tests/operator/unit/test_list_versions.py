"""A list that is older than what was known when it began shows that a backup was restored."""

from __future__ import annotations

from springtide_operator.list_versions import ListVersions


def test_lists_that_grow_or_stay_are_ordinary() -> None:
    versions = ListVersions()
    for version in ("7", "7", "9"):
        versions.begins("pods", "")
        versions.note("pods", version)
        assert not versions.went_back("pods", "", version)


def test_news_while_a_list_is_under_way_make_it_no_older() -> None:
    versions = ListVersions()
    versions.note("pods", "5")
    versions.begins("pods", "")
    versions.note("pods", "9")
    assert not versions.went_back("pods", "", "6")


def test_list_older_than_what_was_known_went_back_once() -> None:
    versions = ListVersions()
    versions.note("pods", "9")
    versions.note("nodes", "9")
    for namespace in ("a", "b"):
        versions.begins("pods", namespace)
    assert versions.went_back("pods", "a", "6")
    assert not versions.went_back("pods", "b", "6")  # what is lower now is the truth
    versions.begins("pods", "a")
    assert not versions.went_back("pods", "a", "6")
    versions.begins("nodes", "")
    assert versions.went_back("nodes", "", "6")  # each kind may have a store of its own


def test_lists_alone_show_it_too() -> None:
    versions = ListVersions()
    versions.begins("pods", "")
    assert not versions.went_back("pods", "", "9")
    versions.begins("pods", "")
    assert versions.went_back("pods", "", "8")

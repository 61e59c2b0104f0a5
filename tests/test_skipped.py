"""Skipped tests are told: how many, why, and what to install."""

from tests.skipped import skip_summary


def test_reasons_are_counted_and_say_what_to_do():
    told = skip_summary(["Skipped: bwrap is missing; install bubblewrap", "Skipped: bwrap is missing; install bubblewrap",
                         "Skipped: could not import 'trl': No module named 'trl'"])
    assert told.startswith("3 tests did not run: 2 because bwrap is missing; install bubblewrap. 1 because could not import 'trl'")
    assert "make test" in told


def test_nothing_skipped_is_nothing_said():
    assert skip_summary([]) == ""

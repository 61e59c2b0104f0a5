"""Errors: sentences with a way out: where, what was found, what was expected, what to do.

Every error that a user can meet derives from AssayError and carries the exit code of the command that meets it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.verdict import Verdict


class AssayError(Exception):
    """Something failed at run time."""

    exit_code = 1


class UsageError(AssayError):
    """The request cannot be served as asked: a bad flag, a missing path, an architecture we do not know."""

    exit_code = 2


class DataError(UsageError):
    """The data given cannot be used as asked."""


class ArtifactError(AssayError):
    """The bytes of a model, adapter or checkpoint were read and refused."""

    exit_code = 3


class StoreError(AssayError):
    """The disk did not do what a save needs; what was committed before is intact."""


class GuardStop(AssayError):
    """A guard stopped the run; the newest good checkpoint stands. `verdicts` are those that went against it, where checks gave any."""

    exit_code = 4

    def __init__(self, sentence: str, verdicts: "Sequence[Verdict]" = ()):
        super().__init__(sentence)
        self.verdicts = tuple(verdicts)

"""Entry of a proving process, `python -m assay.guard.proving_entry`: torch and transformers are imported as quickly as they can be.

A small proof is imports for the most part. What they make stays until the process ends, so looking through it for garbage, again and again,
is a fifth of their time for nothing. And where some libraries are installed, transformers imports them for images, sound and sampling with
a second model, which no check of a text model asks for: a second more with scikit-learn. In this process they are not there.
"""

import contextlib
import gc
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property

NOT_FOR_TEXT = ("sklearn", "torchvision", "torchaudio", "librosa", "soundfile")
_read_all = importlib.metadata.packages_distributions


def main() -> None:
    gc.disable()  # until `main` of the proofs has imported what it will need
    leave_out(NOT_FOR_TEXT)
    importlib.metadata.packages_distributions = DistributionsAsAsked  # called, it gives a mapping too
    from assay.guard.proof import main as answer_requests

    answer_requests()


def leave_out(libraries: tuple[str, ...]) -> None:
    """Make libraries look as if they were not installed, as Python does for a module that is None: `import` and `find_spec` say so."""
    for name in libraries:
        sys.modules[name] = None  # type: ignore[assignment]  # what the import system calls for, and typeshed does not know


class DistributionsAsAsked(Mapping[str, list[str]]):
    """Package → distributions, as `importlib.metadata.packages_distributions` says, but looked up when it is asked for. Some versions of
    transformers call that on import, for two packages: where 300 are installed it takes half a second to read all their lists of files."""

    def __getitem__(self, package: str) -> list[str]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(package)
            return [package]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _read_all()


if __name__ == "__main__":
    main()

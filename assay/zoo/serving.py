"""Faults of serving: an adapter that joins a running server and is not what answers under its name."""

import contextlib
import queue
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from assay.errors import ArtifactError, AssayError
from assay.generate import served
from assay.generate.request import Progress, Request, Sampling
from assay.generate.serving import Call, Serving, Size
from assay.guard.policy import check_version
from assay.model.transformer import Transformer
from assay.store import checkpoint
from assay.store.artifact import Artifact, build, merged, open_artifact
from assay.verdict import Verdict, proven, refuted
from assay.zoo.fault import Plant, fault
from assay.zoo.stage import nudged, save, save_adapter, swapped, tiny


def versions_join(folder: Path, plant: Plant) -> list[Verdict]:
    """Two versions of an adapter join a server, each under its name, and each is asked for a few tokens; struck while they join."""
    base = save(folder / "base", nudged(tiny(), 0.15)).folder
    versions = [save_adapter(folder / f"version-{number}", base, far=0.05 * number) for number in (1, 2)]
    for version in versions:
        checkpoint.hallmark(version, [proven("stage", "what a proof would say is not what is tried here")])
    serving = Serving(Size(slots=2, queue=2, length=64))
    try:
        serving.open("base", base)
        with plant(folder):
            return [verdict for number, version in enumerate(versions, 1) for verdict in _joined(serving, number, version.folder)]
    finally:
        serving.stop()


def name_of(number: int) -> str:
    return f"adapter@{number}"


def _joined(serving: Serving, number: int, path: Path) -> list[Verdict]:
    try:
        verdicts = list(serving.open_adapter(name_of(number), path).verdicts)
    except ArtifactError as error:
        return [refuted("fingerprint", str(error))]
    except AssayError as error:
        return [refuted("name", str(error))]
    return [*verdicts, proven("name", f"{name_of(number)} is a name of its own"),
            check_version([_version_that_answers(serving, name_of(number))], open_artifact(path).digest)]


def _version_that_answers(serving: Serving, name: str) -> str:
    arrivals: queue.SimpleQueue[Progress | AssayError] = queue.SimpleQueue()
    serving.submit(Call(serving.find(name), Request((1, 2, 3), Sampling(max_new=4)), lambda item, _: arrivals.put(item))).result()
    while True:
        item = arrivals.get()
        if isinstance(item, AssayError):
            raise item
        if item.completion is not None:
            return item.completion.version

# ----------------------------------------------------------------


@fault("adapter joined, base served", rows=("M06",), stage="serve", check="fingerprint", job=versions_join)
def base_served(_: Path) -> AbstractContextManager[None]:
    """The load says 200 OK, and its layers match nothing."""
    return swapped(served, "build", lambda artifact: build(artifact.base or artifact))


@fault("adapter served twice over", rows=("M03",), stage="serve", check="fingerprint", job=versions_join)
def served_twice(_: Path) -> AbstractContextManager[None]:
    """Merged into the base, and attached to it."""
    def twice(artifact: Artifact) -> Transformer:
        return build(replace(artifact, tensors=merged(artifact)))

    return swapped(served, "build", twice)


@fault("new version under the old name", rows=("R07",), stage="serve", check="name", job=versions_join)
def one_name(_: Path) -> AbstractContextManager[None]:
    """Whoever caches by name answers from the weights before."""
    return swapped(sys.modules[__name__], "name_of", lambda number: "adapter")


@fault("joined, and not in the table that requests are served from", rows=("R02", "R03"), stage="serve", check="version", job=versions_join)
@contextlib.contextmanager
def another_table(_: Path) -> Iterator[None]:
    with swapped(Serving, "find", lambda self, name: self.models["base"]):
        yield

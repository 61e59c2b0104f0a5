"""Code of a squeezed model: the modules that open it and score text with it, in one zip beside it, and its score as they alone find it.

Which modules these are is asked of a fresh process that scores the file; then a process that has nothing else of Assay scores it again.
Python, torch and the other packages that Assay is installed with are not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from assay.data.token_corpus import Corpus, open_corpus
from assay.errors import ArtifactError, UsageError
from assay.evaluation.held_out_loss import HeldOut, score_corpus
from assay.model.placement import default_device
from assay.store.artifact import assemble_model
from assay.store.assayz import read_assayz
from assay.verdict import Verdict, proven, refuted

CODE = "code.zip"
SAME = 1e-5  # relative: how far the score of two processes, with threads of their own, may be apart
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the date of every file in the zip, so that the same code is the same bytes
_ENTRY = "from assay.recipes.squeezed_code import main; main()"


class FreshScore(NamedTuple):
    """Score found by a fresh process: bits per byte, how long opening and scoring took, and with which modules of Assay, from where."""

    mean: float
    seconds: float
    modules: Sequence[str]
    origin: str


def reread(where: Path, corpus: Corpus, rows: int, length: int) -> HeldOut:
    """The score of the file: nothing that made it is used again."""
    found = read_assayz(where)
    if found.tokenizer.digest != corpus.tokenizer_digest:
        raise UsageError(f"{where} was made with tokenizer {found.tokenizer.digest[:12]}, {corpus.folder} with "
                         f"{corpus.tokenizer_digest[:12]}; score it on a corpus of its own tokenizer")
    model = assemble_model(found.config, found.tensors, torch.float32).to(default_device())
    return score_corpus(model.eval(), corpus, rows=rows, length=length, context=length // 2)


def main() -> None:
    """Entry point of the fresh process that scores the artifact."""
    asked, began = json.loads(sys.argv[1]), time.monotonic()
    found = reread(Path(asked["file"]), open_corpus(Path(asked["corpus"]), verify=False), asked["rows"], asked["length"])
    said = FreshScore(found.bits_per_byte.mean, time.monotonic() - began, own_modules(), sys.modules["assay"].__file__ or "")
    print(json.dumps(said._asdict()))


def score_afresh(where: Path, corpus: Corpus, *, rows: int, length: int, code: Path | None = None) -> FreshScore:
    """Score the artifact in a fresh process; by the code in `code` and no other, where it is given."""
    first = "" if code is None else f"import sys; sys.path.insert(0, {str(code.absolute())!r}); "
    asked = json.dumps({"file": str(where.absolute()), "corpus": str(corpus.folder.absolute()), "rows": rows, "length": length})
    search = own_search_path() if code is None else {}
    done = subprocess.run([sys.executable, "-P", "-c", first + _ENTRY, asked], capture_output=True, text=True, env=os.environ | search)
    if done.returncode:
        raise ArtifactError(f"{where}: a process that has {'Assay' if code is None else code.name} could not score it: "
                            f"{(done.stderr.strip() or 'it said nothing').splitlines()[-1]}")
    return FreshScore(**json.loads(done.stdout.splitlines()[-1]))


def pack_code(modules: Sequence[str], where: Path) -> int:
    """The sources of these modules, as Python imports them from a zip; its bytes."""
    with zipfile.ZipFile(where, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name in modules:
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None, name  # noqa: PT018
            inside = name.replace(".", "/") + ("/__init__" if spec.submodule_search_locations is not None else "") + ".py"
            packed.writestr(zipfile.ZipInfo(inside, _LONG_AGO), Path(spec.origin).read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return where.stat().st_size


def least_code_bytes() -> int:
    """Bytes of the code that is imported before anything is opened, asked of a fresh process: what a model or device adds to it is
    little."""
    done = subprocess.run([sys.executable, "-P", "-c", "from assay.recipes.squeezed_code import say_modules; say_modules()"],
                          capture_output=True, text=True, check=True, env=os.environ | own_search_path())
    with tempfile.TemporaryDirectory() as folder:
        return pack_code(json.loads(done.stdout.splitlines()[-1]), Path(folder) / CODE)


def say_modules() -> None:
    """Print the imported modules of this fresh process."""
    print(json.dumps(own_modules()))


def own_modules() -> list[str]:
    return sorted(name for name in sys.modules if name.partition(".")[0] == "assay")


def own_search_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def check_own_code(found: FreshScore, told: HeldOut, code: Path) -> Verdict:
    """The counted code is all the code there was, and it finds the score that is told."""
    due, words = told.bits_per_byte.mean, f"{len(found.modules)} modules in {code.stat().st_size:,} bytes of {code.name}"
    if not found.origin.startswith(str(code.absolute())):
        return refuted("artifact code", f"the process that was to run {words} took Assay from {found.origin}: other code than was counted")
    if abs(found.mean - due) > SAME * due:
        return refuted("artifact code", f"{words} alone find {found.mean:.6f} bits per byte, this process {due:.6f}: they are not the code "
                                        "that the score is of")
    return proven("artifact code", f"{words}, and nothing else of Assay, find {found.mean:.4f} bits per byte too",
                  bytes=code.stat().st_size, modules=len(found.modules), seconds=found.seconds)


def check_seconds(seconds: float, most: float, what: str) -> Verdict:
    """Check the time by the clock, as a task with a time limit counts it."""
    words = f"{what} took {seconds:.1f} s, {most:g} are allowed"
    return (proven if seconds <= most else refuted)("time", words, seconds=seconds, most=most)

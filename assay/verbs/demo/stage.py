"""What the stages share: commands as a user would type them, run here, and a folder that only a demo replaces."""

import importlib
import shutil
from pathlib import Path

from assay.config import parse
from assay.errors import AssayError, UsageError

MARKER = ".assay-demo"


def called(verb: str, *words: str) -> int:
    """The exit code of a command, which is shown. What the command refuses is said, and the demo goes on."""
    print(f"   $ assay {verb} {' '.join(words)}", flush=True)
    module = importlib.import_module(f"assay.verbs.{verb}")
    try:
        return module.run(parse(module.FLAGS, list(words), prog=f"assay {verb}"))
    except AssayError as error:
        print(f"   assay: {error}", flush=True)
        return error.exit_code


def fresh_folder(folder: Path) -> Path:
    """Only a folder that an earlier demo made is replaced."""
    from assay.store.durable import make_folder

    if folder.exists() and not (folder / MARKER).exists():
        raise UsageError(f"{folder} exists and is no earlier demo's; choose another with --out")
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    (folder / MARKER).touch()
    return folder


def say(text: str) -> None:
    print(f"\n{text}", flush=True)

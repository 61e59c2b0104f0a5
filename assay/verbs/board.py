"""assay board: runs as a live page in the browser, on loopback unless a token guards it."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from assay.config import argument, option
from assay.errors import UsageError


@dataclass(frozen=True)
class FLAGS:
    """Show runs live in the browser: the outcome and status of each, curves overlaid with their bands, verdicts with their evidence,
    samples beside the parent's, GPU use and the remaining budget. A run can be stopped after a save. The board only reads the files
    of the runs, and sends nothing off the machine."""

    runs: tuple[str, ...] = argument("runs, or folders that hold runs", default=(".",), default_text="here")
    host: str = option("address to listen on; one that other machines can reach requires a token", group="run", default="127.0.0.1")
    port: int = option("port to listen on; 0: any free port", group="run", least=0, most=65535, default=8500)
    token: str | None = option("token that visitors must give, beyond loopback of at least 16 characters; better set as ASSAY_TOKEN, "
                               "which no process list shows", group="run", default=None)


EXAMPLES = """  assay board runs
  assay board runs/a runs/b --port 0
  ASSAY_TOKEN=… assay board runs --host 0.0.0.0      then open http://HOST:8500/?token=…"""


def run(flags: FLAGS) -> int:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"assay board needs {' and '.join(missing)}; pip install 'assay[serve]'")
    folders = [Path(name) for name in flags.runs]
    if absent := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UsageError(f"{', '.join(absent)}: no such folder; give folders that hold runs")
    token = flags.token or os.environ.get("ASSAY_TOKEN") or None

    from assay.generate.access import address_of, bind_listener, on_loopback
    from assay.report.board_server import board_server
    from assay.report.live_runs import LiveRuns

    listener = bind_listener(flags.host, flags.port, token)
    server = board_server(LiveRuns(folders), token, loopback=on_loopback(listener))
    print(f"board at {address_of(listener)}/{'?token=…' if token else ''}   (Ctrl-C ends it; the runs go on)", flush=True)
    server.run(sockets=[listener])
    return 0

"""Stack sampler of a command and every Python process that it starts: what each thread was doing, from when to when.

    with looked_at(home) as environment: …      # start the command with these variables
    print(timeline(home, began))

A `sitecustomize` in the folder that the variables put first on Python's path starts a thread in each process, which looks at all stacks
20 times a second and writes a line when what it sees has changed; a process that is killed has written all but its last line. What an
import or a call of ours is waiting for is in its time: it is the clock's time, not the processor's.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER, WORTH_A_LINE = "ASSAY_BENCH_STACKS", 0.4  # seconds
SAMPLER = '''
import json, os, sys, threading, time

IDLE = {"wait", "get", "select", "poll", "_worker", "accept", "readline", "_listen", "_await", "_read_thread",
        "_wait_for_tstate_lock", "sleep"}

def label(frame):
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    names = [f.f_locals.get("name", "") for f in frames if f.f_code.co_name == "_find_and_load"]
    ours = [f"{os.path.basename(f.f_code.co_filename)[:-3]}.{f.f_code.co_name}" for f in frames if "/assay/" in f.f_code.co_filename]
    if names:
        foreign = [name for name in names if not name.startswith("assay")]
        return "import " + (foreign or names)[0]
    return " > ".join(ours[-3:]) or frames[-1].f_code.co_filename.rpartition("/")[2] + "." + frames[-1].f_code.co_name

def look(out):
    seen, me = {}, threading.get_ident()
    while True:
        now = time.time()
        names = {t.ident: t.name for t in threading.enumerate()}
        for ident, frame in list(sys._current_frames().items()):
            if ident == me:
                continue
            what = "idle" if frame.f_code.co_name in IDLE and names.get(ident) != "MainThread" else label(frame)
            was = seen.get(ident)
            if was is None or was[0] != what:
                if was is not None:
                    out.write(json.dumps([names.get(ident, "?"), was[1], now, was[0]]) + "\\n")
                seen[ident] = (what, now)
        out.flush()
        time.sleep(0.05)

folder = os.environ.get("ASSAY_BENCH_STACKS")
if folder:
    out = open(f"{folder}/{time.time():.2f}-{os.getpid()}.jsonl", "w")
    out.write(json.dumps(getattr(sys, "orig_argv", [])) + "\\n")
    threading.Thread(target=look, args=(out,), daemon=True, name="stacks").start()
'''


@contextlib.contextmanager
def looked_at(home: Path) -> Iterator[dict[str, str]]:
    """Variables with which a command is looked at."""
    for folder in (home / "sampler", home / "stacks"):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "sampler" / "sitecustomize.py").write_text(SAMPLER)
    yield {"PYTHONPATH": os.pathsep.join([str(home / "sampler"), os.environ.get("PYTHONPATH", os.getcwd())]), FOLDER: str(home / "stacks")}


def timeline(home: Path, began: float) -> str:
    """A line for everything that took a while, a paragraph a process, in the order in which they were started."""
    lines = list[str]()
    for file in sorted((home / "stacks").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")]
        spans = merged([row for row in rows[1:] if row[3] != "idle"])
        told = [f"  {thread[:14]:14} {start - began:7.2f} {end - start:6.2f} s  {what}" for thread, start, end, what in spans
                if end - start >= WORTH_A_LINE]
        if told and rows:
            lines += [f"{file.stem.partition('-')[2]}: {' '.join(rows[0])[-100:]}", *told]
    return "\n".join(lines)


def merged(spans: list[list]) -> list[tuple[str, float, float, str]]:
    """What was interrupted for less than a look or two goes on."""
    joined = list[list]()
    for thread, start, end, what in sorted(spans):
        last = next((span for span in reversed(joined) if span[0] == thread and span[3] == what), None)
        if last is not None and start - last[2] < 0.15:
            last[2] = end
        else:
            joined.append([thread, start, end, what])
    return [tuple(span) for span in sorted(joined, key=lambda span: span[1])]

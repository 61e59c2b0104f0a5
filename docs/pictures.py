"""Pictures of the documents (make pictures): a conversation, a report and the board, all of real runs on this machine.

docs/chat.svg is SmolLM2-135M in FP8 beside the model that it was made of, as somebody types it at a terminal. The report is that of a
fine-tune of a tiny model on sums; the board shows it, the same from another seed, GRPO on its result, and one that is running. Pages are
taken in Chromium (Debian: apt-get install chromium). What was made lies in build/pictures, and is not made again.
"""

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.report.browser import Browser

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "pictures"
FOLDER = PLACE / "smollm2-fp8"
TYPED = ["What is the capital of France?", "And of Italy?", "/probs", "/quit"]
WORDS = ["chat", str(FOLDER), "--against", "smollm2-135m", "--system", "Answer in one short sentence.", "--temperature", "0",
         "--max-new-tokens", "24", "--device", "cpu"]
PROMPT, WIDTH, SECONDS = b"you: ", 110, 170.0

SUMS, RUNS = PLACE / "sums", PLACE / "runs"
SFT = (f"sft --model {SUMS}/model --data {SUMS}/learned.jsonl --learning-rate 5e-3 --save-steps 50 --max-length 32 --batch-tokens 512 "
       "--num-train-epochs 2000 --held-out 0.05 --device cpu --quiet")
GRPO = (f"grpo --model {RUNS}/sft-seed-0/model --data {SUMS}/sums.jsonl --reward answer:1 --prompts 16 --num-generations 8 "
        "--max-completion-length 8 --max-steps 12 --num-train-epochs 50 --learning-rate 2e-4 --warmup-steps 0 --save-steps 6 "
        "--held-out 0.3 --eval-prompts 30 --num-generations-eval 8 --reward-workers 1 --device cpu --quiet")
COMMANDS = {SUMS: f"tiny sums --out {SUMS}", RUNS / "sft-seed-0": f"{SFT} --max-steps 200 --out {RUNS}/sft-seed-0",
            RUNS / "sft-seed-1": f"{SFT} --max-steps 200 --seed 1 --out {RUNS}/sft-seed-1", RUNS / "grpo": f"{GRPO} --out {RUNS}/grpo"}


def main() -> int:
    draw_pages()
    draw_chat()
    return 0


def draw_pages() -> None:
    """The report in two widths, and the board beside a run that goes on meanwhile."""
    sys.path.insert(0, str(ROOT))
    from tests.report.browser import Browser
    from tests.report.test_board_server import served

    for made, words in COMMANDS.items():
        if not made.exists():
            assay(words, codes=(0, 3))
    assay(f"report {RUNS}/sft-seed-0")
    running = subprocess.Popen([sys.executable, "-m", "assay", *f"{SFT} --max-steps 4000 --seed 2 --out {RUNS}/sft-longer".split()],
                               cwd=PLACE, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(Path(profile))
            take_report(browser)
            rows = RUNS / "sft-longer" / "metrics.jsonl"
            wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 60)
            with served(RUNS) as client:
                take_board(browser, str(client.base_url))
            browser.close()
    finally:
        running.terminate()
        running.wait(60)


def take_report(browser: "Browser") -> None:
    for width, most in ((1280, 2090), (400, 2700)):
        browser.open(RUNS / "sft-seed-0" / "report.html", width)
        browser.picture(ROOT / "docs" / f"report-{width}.png", width, min(int(browser.run("document.body.scrollHeight")), most))


def take_board(browser: "Browser", address: str) -> None:
    for width, height, name in ((1280, 1010, "board"), (400, 1000, "board-phone")):
        browser.open(address, width)
        wait_for(lambda: browser.run("document.querySelectorAll('#runs tr').length === 4"))
        for run in ("sft-seed-0", "sft-seed-1"):
            browser.run(f"[...document.querySelectorAll('#runs tr')].find(tr => tr.textContent.startsWith('{run}'))"
                        ".querySelector('input').click()")
        wait_for(lambda: browser.run("document.querySelectorAll('#charts canvas').length >= 3"))
        wait_for(lambda: browser.run("document.querySelector('h1').textContent.includes('1 running')"))
        browser.run("document.querySelectorAll('#runs tr').forEach(tr => { tr.style.contentVisibility = 'visible'; })")
        time.sleep(1)  # rows out of sight are painted now
        browser.picture(ROOT / "docs" / f"{name}.png", width, height)
        browser.open("about:blank", width)


def assay(words: str, codes: tuple[int, ...] = (0,)) -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-m", "assay", *words.split()], cwd=PLACE, env=variables, check=False)
    assert found.returncode in codes, f"assay {words}: exit {found.returncode}"


def wait_for(true: Callable[[], object], seconds: float = 90) -> None:
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late, "it never came true"
        time.sleep(0.3)


def draw_chat() -> None:
    from rich.console import Console
    from rich.text import Text

    if not FOLDER.exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        words = ["export", "smollm2-135m", "--to", "fp8", "--dtype", "bfloat16", "--out", str(FOLDER)]
        subprocess.run([sys.executable, "-m", "assay", *words], check=True)
    said = typed_at_a_terminal(["-m", "assay", *WORDS], TYPED)
    shown = "$ assay chat smollm2-fp8 --against smollm2-135m --system 'Answer in one short sentence.' --temperature 0\n" + said
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown.replace(str(FOLDER), FOLDER.name)))
        drawing = console.export_svg(title="assay chat", unique_id="chat")
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)  # a picture fetches nothing
    (ROOT / "docs" / "chat.svg").write_text(drawing)


def typed_at_a_terminal(words: list[str], lines: list[str]) -> str:
    """What a terminal shows of a command in which these lines are typed, each when it is asked for."""
    ours, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *words], stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True) as process:
        os.close(its)
        seen, asked, left = b"", 0, list(lines)
        while select.select([ours], [], [], SECONDS)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if seen.count(PROMPT) > asked and left:
                asked = seen.count(PROMPT)
                os.write(ours, left.pop(0).encode() + b"\n")
        process.wait(10)
    os.close(ours)
    return seen.decode(errors="replace").replace("\r\n", "\n").replace("\x1b[?2004h", "").replace("\x1b[?2004l\r", "")


if __name__ == "__main__":
    sys.exit(main())

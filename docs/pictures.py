"""Pictures of the documents (make pictures): a real conversation at a terminal, drawn as docs/chat.svg.

SmolLM2-135M in FP8 beside the model that it was made of: `assay chat FOLDER --against smollm2-135m`, as somebody types it.
"""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "pictures" / "smollm2-fp8"
TYPED = ["What is the capital of France?", "And of Italy?", "/probs", "/quit"]
WORDS = ["chat", str(FOLDER), "--against", "smollm2-135m", "--system", "Answer in one short sentence.", "--temperature", "0",
         "--max-new-tokens", "24", "--device", "cpu"]
PROMPT, WIDTH, SECONDS = b"you: ", 110, 170.0


def main() -> int:
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
    return 0


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

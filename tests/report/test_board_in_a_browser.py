"""The live board in a real browser: it loads, updates, compares runs, stops one, survives its server's restart, and runs no text."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.report.run_process import LOCKS
from assay.store.checkpoint import open_checkpoint
from assay.testing.tiny_models import save_model, tiny_model
from tests.report.browser import CHROMIUM, Browser
from tests.report.crafted import HOSTILE, a_run, metrics, some_verdicts
from tests.report.test_board_server import served
from tests.report.test_in_a_browser import OVERFLOW

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")]
HOSTILE_NAME = "<img src=x onerror=pwned=1>"
ROWS = "document.querySelectorAll('#runs tr').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two ordinary runs, and one whose every text would like to be a script."""
    for name in ("sft-a", "sft-b"):
        a_run(tmp_path / "runs" / name, verdicts=some_verdicts(), ending="none" if name == "sft-b" else "hand over",
              config={"max_steps": 100})
    bad = a_run(tmp_path / "runs" / HOSTILE_NAME, verdicts=some_verdicts(HOSTILE))
    (bad / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    (bad / "metrics.jsonl").write_text("".join(json.dumps({**row, HOSTILE: 1.0}) + "\n" for row in metrics(40)))
    return tmp_path / "runs"


def until(browser: Browser, script: str, seconds: float = 20) -> None:
    late = time.monotonic() + seconds
    while not browser.run(script):
        assert time.monotonic() < late, f"never true: {script}"
        time.sleep(0.1)


def tick(browser: Browser, name: str) -> None:
    row = f"[...document.querySelectorAll('#runs tr')].find(tr => tr.textContent.startsWith({name!r}))"
    browser.run(f"{row}.querySelector('input').click()")


@pytest.mark.parametrize("width", [1280, 400])
def test_it_loads_updates_and_overlays_and_hostile_text_stays_text(width: int, browser: Browser, runs: Path):
    with served(runs) as client:
        browser.open(str(client.base_url), width)
        until(browser, f"{ROWS} === 3")
        tick(browser, "sft-a")
        tick(browser, "sft-b")
        until(browser, "document.querySelectorAll('#charts canvas').length >= 3")
        with (runs / "sft-b" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 54, "loss": math.pi, "num_tokens": 1}) + "\n")
        until(browser, "[...document.querySelectorAll('#runs tr')].some(tr => tr.cells[3].textContent === '55')")
        browser.run("document.querySelector('#runs tr .open-run').click()")
        until(browser, "document.querySelectorAll('.finding').length >= 3 && document.querySelectorAll('.sides').length >= 1")
        tick(browser, HOSTILE_NAME)
        until(browser, "document.querySelectorAll('#legend span').length === 3")
        assert browser.run("document.querySelectorAll('img, #details script').length") == 0
        assert browser.run("typeof pwned") == "undefined"
        assert browser.run(f"document.getElementById('name').textContent === {json.dumps(HOSTILE_NAME)}")
        assert browser.run(OVERFLOW) <= 0
        assert browser.complaints == []
        assert {url.startswith(str(client.base_url)) for url in browser.fetched} == {True}
        browser.open("about:blank", width)


def test_the_page_goes_on_when_its_server_comes_back(browser: Browser, runs: Path):
    with served(runs) as client:
        browser.open(str(client.base_url), 1280)
        until(browser, f"{ROWS} === 3")
        port = client.base_url.port
    assert port is not None
    until(browser, "document.getElementById('link').textContent.includes('trying again')")
    a_run(runs / "later")
    with served(runs, port=port):
        until(browser, f"{ROWS} === 4 && document.getElementById('link').textContent === 'live'", 40)
        browser.open("about:blank", 1280)


@pytest.mark.skipif(not LOCKS.exists(), reason="this system has no /proc/locks")
def test_a_run_is_stopped_from_the_page_after_a_good_save(browser: Browser, tmp_path: Path):
    """A real run of `assay sft`: asked twice, it saves, and what it saved is whole."""
    save_model(tmp_path / "tiny", tiny_model())
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(100)))
    options = ["--model", "tiny", "--data", "sums.jsonl", "--out", "runs/sft", "--max-steps", "3000", "--num-train-epochs", "3000",
               "--max-length", "16", "--batch-tokens", "256", "--held-out", "0.1", "--device", "cpu", "--witness", "off"]
    run = subprocess.Popen([sys.executable, "-m", "assay", "sft", *options], cwd=tmp_path, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "runs" / "sft" / "ledger.jsonl").exists():
            assert run.poll() is None
            time.sleep(0.1)
        with served(tmp_path / "runs") as client:
            browser.open(str(client.base_url), 1280)
            until(browser, "Number(document.querySelector('#runs tr')?.cells[3].textContent.replaceAll(',', '')) > 20", 60)
            browser.run("document.querySelector('#runs tr .open-run').click()")
            until(browser, "!document.getElementById('stop').hidden")
            browser.run("document.getElementById('stop').click()")
            assert browser.run("document.getElementById('stop').textContent") == "really? it saves first"
            assert run.poll() is None
            browser.run("document.getElementById('stop').click()")
            assert run.wait(30) == 143
            until(browser, "document.querySelector('#runs tr').textContent.includes('interrupted')")
            browser.open("about:blank", 1280)
    finally:
        run.kill()
        run.wait()
    saved = max((tmp_path / "runs" / "sft" / "checkpoints").glob("step-*"))
    assert open_checkpoint(saved).digest
    assert int(saved.name.removeprefix("step-")) > 20


def test_two_hundred_runs_and_a_long_file_stay_fluid(browser: Browser, tmp_path: Path):
    for number in range(200):
        a_run(tmp_path / f"run-{number:03d}", steps=3)
    long = "".join(f'{{"step": {step}, "loss": {step % 97}, "num_tokens": {step}}}\n' for step in range(1_000_000))
    (tmp_path / "run-000" / "metrics.jsonl").write_text(long)
    with served(tmp_path) as client:
        browser.open(str(client.base_url), 1280)
        until(browser, f"{ROWS} === 200", 60)
        until(browser, "document.querySelector('#runs tr').cells[3].textContent === '1,000,000'", 120)
        tick(browser, "run-000")
        begun = time.monotonic()
        until(browser, "document.querySelectorAll('#charts canvas').length >= 1")
        drawn = time.monotonic() - begun
        assert drawn < 5
        slowest = browser.run("""new Promise(done => { let last = performance.now(), worst = 0, count = 0;
          const frame = now => { worst = Math.max(worst, now - last); last = now;
            document.getElementById('filter').value = count % 2 ? '' : 'run-1';
            document.getElementById('filter').dispatchEvent(new Event('input'));
            ++count < 40 ? requestAnimationFrame(frame) : done(worst); };
          requestAnimationFrame(frame); })""")
        print(f"200 runs, one of a million metric lines: its curve after {drawn:.2f} s, slowest of 40 frames {slowest:.0f} ms")
        assert slowest < 1000, "filtering two hundred rows in every frame"

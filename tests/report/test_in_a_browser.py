"""The page in a real browser: charts are drawn, nothing complains, runs or is fetched, and nothing overflows at 1280 and 400 px."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.report.page import write_report
from tests.report.browser import CHROMIUM, Browser
from tests.report.crafted import HOSTILE, a_checkpoint, a_run, metrics, rollouts, some_verdicts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")]
DRAWN = """[...document.querySelectorAll("[data-chart]")].filter(place => place.checkVisibility()).map(place => {
  const canvas = place.querySelector("canvas");
  if (!canvas) return 0;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.filter((value, i) => i % 4 === 3 && value).length; })"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e => e.getClientRects().length && !e.closest(".scroll, pre, .u-over, .u-axis"))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report page with everything that a page can show, and hostile text in all of it."""
    home = tmp_path_factory.mktemp("pages")
    run = a_run(home / "run", recipe="Grpo", verdicts=some_verdicts(HOSTILE), config={"model": "x" * 300})
    rows = [*metrics(60), *({**row, HOSTILE: 1.0} for row in rollouts(60))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": "word" * 400}) + "\n")
    named = {"weights": "a" * 64, "path": "models/" + "long" * 40}
    for step in (20, 40):
        a_checkpoint(run / "checkpoints" / f"step-{step:06d}", float(step), parent=named, step=step)
    write_report(run, home / "report.html")
    return home / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_charts_are_drawn_and_nothing_complains_or_overflows(width: int, scheme: str, browser: Browser, page: Path):
    browser.open(page, width, scheme=scheme)
    assert browser.complaints == []  # before the pixels are read, which Chromium warns of
    drawn = browser.run(DRAWN)
    assert len(drawn) >= 7
    assert min(drawn) > 400
    assert [url for url in browser.fetched if url != page.resolve().as_uri()] == []
    assert browser.run("typeof pwned") == "undefined"
    assert browser.run(OVERFLOW) <= 0
    assert browser.run(OUTSIDE) == []


def test_what_is_folded_is_drawn_when_it_is_opened(browser: Browser, page: Path):
    browser.open(page, 1280)
    before = browser.run("[...document.querySelectorAll('[data-chart]')].filter(place => place.checkVisibility()).length")
    browser.run("document.querySelectorAll('details').forEach(fold => { fold.open = true }); new Promise(done => setTimeout(done, 300))")
    assert browser.complaints == []
    after = browser.run(DRAWN)
    assert len(after) > before
    assert min(after) > 400
    assert browser.run(OVERFLOW) <= 0


def test_every_outcome_is_readable_in_both_schemes(browser: Browser, page: Path):
    """Contrast of the badges' words on their ground, by the WCAG formula: at least 4.5."""
    contrast = """[...document.querySelectorAll('.badge')].map(e => { const style = getComputedStyle(e);
      const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); })"""
    for scheme in ("light", "dark"):
        browser.open(page, 1280, scheme=scheme)
        assert min(browser.run(contrast)) >= 4.5

"""The page says what the files say: all of it, nothing else, the same bytes each time, and nothing that could run."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay.report.page import render_report, write_report
from assay.report.run_record import read_run
from assay.report.sample_sections import read_evaluation
from assay.store.ledger import Ledger
from assay.verdict import proven, refuted, unproven
from tests.recipes.sittings import STEPS, options, rows, sit
from tests.report.crafted import HOSTILE, a_checkpoint, a_run, metrics, rollouts, some_verdicts


class Seen(HTMLParser):
    """Elements with their attributes, and the text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def seen(page: str) -> Seen:
    parser = Seen()
    parser.feed(page)
    return parser


def charts_of(page: str) -> dict[str, list[dict[str, Any]]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    assert not set("<>&") & set(found[1])
    return {"|".join(curve["key"] for curve in chart): chart for chart in json.loads(found[1])}


def test_the_page_shows_standing_verdicts_evidence_curves_data_and_the_command(tmp_path: Path):
    run = a_run(tmp_path / "run", verdicts=some_verdicts())
    page = render_report(read_run(run))
    text = seen(page).text
    for words in ("done and proven", "0.5 [0.4, 0.6] (n=90) nats per token", "of 256 groups none had rewards that differ", '"groups": 256',
                  "ledger line 2", "nothing to compare with", "step-000040", "c0ffee", "model: base", "assay sft --config run/config.yaml",
                  "REFUTED", "UNPROVEN", "PROVEN", Ledger(run / "ledger.jsonl").events()[-1]["previous"][:1]):
        assert words in text, words
    loss = charts_of(page)["loss|eval_loss"]
    assert len(loss[0]["x"]) == 40
    assert loss[1]["x"] == [10, 20, 30, 40]
    assert [high - low for low, high in zip(loss[1]["low"], loss[1]["high"], strict=True)] == pytest.approx([0.2] * 4, abs=1e-5)


def test_a_real_run_is_shown_as_it_was(tmp_path: Path):
    config = options(tmp_path / "run")
    sit(config)
    page = render_report(read_run(tmp_path / "run"))
    text, charts = seen(page).text, charts_of(page)
    for words in ("interrupted", "preflight before step 1", "movement", "no proof : step-000000", "assay pretrain --config run/config.yaml",
                  "environment was assay", "bits per byte at step 26", "read_times"):
        assert words in text, words
    assert len(charts["loss|eval_loss"][0]["x"]) == STEPS
    looked = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "eval_low" in row]
    assert charts["eval_bits_per_byte"][0]["low"] == pytest.approx([row["eval_low"] for row in looked], rel=1e-5)
    assert page.count('class="edge') == 0  # nothing came before any of its checkpoints


def test_a_check_that_ran_often_shows_its_worst_and_how_often(tmp_path: Path):
    run = a_run(tmp_path / "run", ending="none")
    ledger = Ledger(run / "ledger.jsonl")
    for moved in (True, False, True):
        made = proven if moved else refuted
        ledger.append("account", verdicts=[made("movement", "weights moved" if moved else "nothing moved").to_json(),
                                           proven("movement", "the average moved").to_json()])
    ledger.close()
    text = seen(render_report(read_run(run)).split('id="verdicts"')[1].split("</section>")[0]).text
    assert "REFUTED account movement nothing moved 0 facts, ran 3 times ledger line 7; 2 × PROVEN, 1 × REFUTED" in text
    assert "PROVEN account movement the average moved" in text


def test_what_was_not_checked_is_listed(tmp_path: Path):
    run = a_run(tmp_path / "run", verdicts=[unproven("parity", "did not run: no GPU is here")], ending="none")
    ledger = Ledger(run / "ledger.jsonl")
    ledger.append("save", step=50, checkpoint="step-000050")
    ledger.close()
    unchecked = seen(render_report(read_run(run)).split('id="unchecked"')[1].split("</section>")[0]).text
    for words in ("parity (preflight): did not run: no GPU is here", "no proof : step-000050 was saved", "no samples", "no probe history",
                  "no account", "no hand-over"):
        assert words in unchecked, words
    assert "step-000040" not in unchecked


def test_the_same_files_give_the_same_bytes_without_any_training_code(tmp_path: Path):
    run = a_run(tmp_path / "run", verdicts=some_verdicts())
    write_report(run, tmp_path / "first.html")
    code = ("import sys; from pathlib import Path; from assay.report.page import write_report; "
            f"write_report(Path({str(run)!r}), Path({str(tmp_path / 'second.html')!r})); "
            "print([m for m in sys.modules if m.startswith(('assay.learn', 'assay.recipes', 'assay.guard', 'assay.generate'))])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert done.stdout.strip() == "[]"
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_hostile_text_is_shown_and_inert(tmp_path: Path):
    run = a_run(tmp_path / "<img src=x onerror=pwned=1>", verdicts=some_verdicts(HOSTILE), config={"model": HOSTILE.replace("\ud800", "")})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, HOSTILE: 1.0, "loss": HOSTILE}) + "\n")
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "completion": HOSTILE, HOSTILE: HOSTILE}) + "\n")
    (run / "probe.json").write_text(json.dumps({"sentence": HOSTILE, "probed": {HOSTILE: {"bad": 1, "n": 2, "low": 0, "high": 1}}}))
    named = HOSTILE.replace("\ud800", "")
    a_checkpoint(run / "checkpoints" / "step-000040", 1.0, parent={"weights": named, "path": named})
    page = render_report(read_run(run))
    found = seen(page)
    page.encode()  # a lone surrogate has no bytes
    assert [tag for tag, _ in found.elements].count("script") == 3
    assert not {"img", "iframe", "object", "link", "form", "base"} & {tag for tag, _ in found.elements}
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on") or name in ("src", "action")]
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in found.elements)
    assert found.text.count("window.pwned=1") >= 8
    assert HOSTILE in charts_of(page)
    assert "\u202e" not in page
    assert "\x00" not in page


def test_the_policy_lets_nothing_run_but_the_two_scripts_and_nothing_be_fetched(tmp_path: Path):
    import base64
    import hashlib

    page = render_report(read_run(a_run(tmp_path / "run")))
    policy = next(a["content"] for tag, a in seen(page).elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert len(scripts) == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "Copyright (c) 2022 Leon Sorokin" in page


# ---------------------------------------------------------------- what is torn, damaged or missing


def test_torn_last_lines_are_said_and_the_rest_is_shown(tmp_path: Path):
    run = a_run(tmp_path / "run")
    for name in ("ledger.jsonl", "metrics.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data + data.splitlines()[-1][:25])
    text = seen(render_report(read_run(run))).text
    assert "ledger.jsonl: the last line was cut short after 25 bytes; the 7 events before it are whole" in text
    assert "metrics.jsonl: the last line was cut short after 25 bytes; the 44 before it are shown" in text
    assert "done and proven" in text


def test_a_damaged_chain_voids_the_standing_and_what_comes_before_is_shown(tmp_path: Path):
    run = a_run(tmp_path / "run", verdicts=some_verdicts())
    data = (run / "ledger.jsonl").read_bytes()
    (run / "ledger.jsonl").write_bytes(data.replace(b"3 of 3 ended", b"9 of 9 ended"))
    text = seen(render_report(read_run(run))).text
    assert "ledger damaged : ledger.jsonl line 5: its content hashes to" in text
    assert "The 4 events before it are shown" in text
    assert "of 256 groups" in text
    assert "9 of 9 ended" not in text
    assert "done and proven" not in text


@pytest.mark.parametrize("gone", ["config.yaml", "metrics.jsonl", "ledger.jsonl"])
def test_a_missing_file_is_said(gone: str, tmp_path: Path):
    run = a_run(tmp_path / "run")
    (run / gone).unlink()
    assert f"{gone} is not here" in seen(render_report(read_run(run))).text


def test_lines_and_options_that_do_not_parse_are_said_by_their_place(tmp_path: Path):
    run = a_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], "{not json\n", "[1]\n", *lines[1:]]))
    (run / "config.yaml").write_text("model: [unclosed")
    text = seen(render_report(read_run(run))).text
    assert "metrics.jsonl line 2 is not JSON" in text
    assert "metrics.jsonl line 3 is no JSON object" in text
    assert "config.yaml: not YAML" in text
    assert "model: [unclosed" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="not a run"):
        write_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_value_that_is_not_finite_is_a_gap_that_is_said(tmp_path: Path):
    run = a_run(tmp_path / "run")
    rows = metrics(40)
    rows[3]["loss"] = "nan"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render_report(read_run(run))
    assert "loss was not finite at 1 step(s), first nan at step 4" in seen(page).text
    assert charts_of(page)["loss|eval_loss"][0]["y"][3] is None


# ---------------------------------------------------------------- curves, lineage, samples


def test_curves_of_reinforcement_learning_have_their_bands(tmp_path: Path):
    run = a_run(tmp_path / "run", recipe="Grpo")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts(20)))
    page = render_report(read_run(run))
    charts = charts_of(page)
    assert charts["reward|eval_reward"][0]["low"][10] == pytest.approx(0.2)
    assert charts["eval_answer"][0]["low"][0] == pytest.approx(0.24)
    assert charts["completions/mean_length"][0]["high"][0] == 90
    assert charts["rewards/answer/mean"][0]["high"][10] == pytest.approx(0.7)
    assert not {"reward_std", "eval_low", "completions/min_length"} & {key for chart in charts for key in chart.split("|")}
    assert "a spread, not an interval" in seen(page).text


def test_a_long_run_is_thinned_to_means_between_least_and_greatest(tmp_path: Path):
    run = a_run(tmp_path / "run")
    rows: list[dict[str, Any]] = [{"step": step, "loss": float(step % 10)} for step in range(12_000)]
    rows[5000]["loss"] = 1000.0
    rows[7003]["loss"] = "nan"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render_report(read_run(run))
    [loss] = charts_of(page)["loss"]
    assert len(loss["x"]) == 1200
    assert loss["y"][0] == 4.5
    assert (loss["low"][0], loss["high"][0]) == (0, 9)
    assert loss["high"][500] == 1000
    assert [loss[name].index(None) for name in ("y", "low", "high")] == [700] * 3
    assert "each point is the mean of 10 steps" in seen(page).text


def test_lineage_joins_what_a_digest_joins(tmp_path: Path):
    grandparent = {"weights": "a" * 64, "path": "/models/base"}
    parent, child = a_run(tmp_path / "parent"), a_run(tmp_path / "child")
    forked = a_checkpoint(parent / "checkpoints" / "step-000040", 1.0, parent=grandparent, step=40)
    named = {"weights": forked, "path": "elsewhere/step-000040"}
    a_checkpoint(child / "checkpoints" / "step-000000", 1.0, parent=named, step=0, change="same")
    last = a_checkpoint(child / "checkpoints" / "step-000040", 2.0, parent=named, step=40, marked=False)
    a_checkpoint(child / "model", 2.0, parent={"weights": last, "path": str(child / "checkpoints" / "step-000040")}, change="same")
    page = render_report(read_run(child), read_run(parent))
    drawn = page.split("<svg")[1].split("</svg>")[0]
    assert drawn.count("<rect") == 5  # base, parent, two checkpoints, model
    assert drawn.count('class="edge parent"') == 4
    assert ["UNPROVEN" in box for box in drawn.split("<rect")[1:]] == [False, True, False, False, False]
    assert "run parent" in seen(page).text
    assert "named by its digest" in drawn
    alone = render_report(read_run(child)).split("<svg")[1].split("</svg>")[0]
    assert alone.count("<rect") == 4
    assert "step-000040, weights " + forked in alone


def test_a_checkpoint_whose_weights_are_not_here_still_tells_its_lineage(tmp_path: Path):
    run = a_run(tmp_path / "run")
    a_checkpoint(run / "checkpoints" / "step-000040", 1.0, parent={"weights": "a" * 64, "path": "base"}, step=40)
    (run / "checkpoints" / "step-000040" / "model.safetensors").unlink()
    text = seen(render_report(read_run(run))).text
    assert "aaaaaaaaaaaa" in text
    assert "lacks model.safetensors" in text


def test_a_mark_on_the_disk_counts_where_the_ledger_tells_of_no_proof(tmp_path: Path):
    run = a_run(tmp_path / "run", ending="stopped")
    ledger = Ledger(run / "ledger.jsonl")
    for step in (50, 60):
        ledger.append("save", step=step, checkpoint=f"step-{step:06d}")
        a_checkpoint(run / "checkpoints" / f"step-{step:06d}", float(step), step=step, change="new", marked=step == 50)
    ledger.close()
    page = render_report(read_run(run))
    rows = [seen(row).text for row in page.split('id="proofs"')[1].split("</section>")[0].split("<tr>")[2:]]
    assert rows[1] == "step-000050 PROVEN by its mark on the disk; the ledger does not tell of it unknown hallmarked"
    assert rows[2] == "step-000060 UNPROVEN no proof is on record unknown unproven"
    unchecked = page.split('id="unchecked"')[1].split("</section>")[0]
    assert "step-000060" in unchecked
    assert "step-000050" not in unchecked


def test_results_are_told_with_their_intervals_and_warnings_with_their_words(tmp_path: Path):
    run = a_run(tmp_path / "run", recipe="Edit", ending="none")
    ledger = Ledger(run / "ledger.jsonl")
    for _ in range(3):
        ledger.append("warning", step=4, reason="entropy fell below a tenth of where it began")
    ledger.append("edits", estimates={"efficacy": {"mean": 0.75, "low": 0.5, "high": 0.9, "n": 24}, "lost": None},
                  verdicts=[refuted("efficacy", "too few edits took").to_json()])
    ledger.close()
    text = seen(render_report(read_run(run))).text
    for words in ("efficacy 0.75 [0.5, 0.9] (n=24)", "lost unknown", "done, refuted : efficacy: too few edits took",
                  "3 warnings on the way", "entropy fell below a tenth of where it began (3 times)"):
        assert words in text, words


def test_samples_stand_beside_the_parents_of_the_same_prompt(tmp_path: Path):
    parent, child = a_run(tmp_path / "parent"), a_run(tmp_path / "child")
    for run, said in ((parent, "five"), (child, "it is 5")):
        rows = [{"step": 3, "prompt": "2+3=", "completion": said, "reward": 1.0},
                {"step": 9, "prompt": f"only {run.name}", "completion": "-"}]
        (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render_report(read_run(child), read_run(parent)).split('id="samples"')[1]
    assert page.index("five") < page.index("it is 5")
    assert "only parent" not in page
    assert "reward 1" in page


def test_evaluations_stand_side_by_side_where_they_differ_first(tmp_path: Path):
    for name, right in (("before", 0.0), ("after", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps({"task": "gsm8k", "dataset": "d1", "checkpoint": name}))
        estimates = {"pass@1": {"mean": right / 2, "low": 0.0, "high": 1.0, "n": 2}}
        (folder / "eval.json").write_text(json.dumps({"estimates": estimates, "verdicts": [refuted("leak", "seen before").to_json()]}))
        rows = [{"id": "same", "prompt": "easy", "samples": [{"text": "both", "score": 1.0}]},
                {"id": "other", "prompt": "hard", "samples": [{"text": f"{name} says", "score": right}]}]
        (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [read_evaluation(tmp_path / name) for name in ("before", "after")]
    page = render_report(read_run(a_run(tmp_path / "run")), None, evaluations).split('id="samples"')[1]
    assert page.index("before says") < page.index("after says") < page.index("both")
    assert "0.5 [0, 1] (n=2)" in page
    assert "leak: seen before" in page
    with pytest.raises(UsageError, match="assay eval"):
        read_evaluation(tmp_path)

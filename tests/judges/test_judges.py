"""The runner of the judges on a small folder: what is there is asked, what is not is said, and the page counts both."""

import gzip
import json
from pathlib import Path

import pytest

from assay.errors import DataError
from assay.reward.json_schema import check_schema
from assay.reward.sandbox import sandbox_unavailable
from tests.judges import broken_gguf, evalplus_solutions, json_schema, safetensors_attacks, sft_masks
from tests.judges.__main__ import main, scorecard
from tests.judges.conversations import LEARNED, tokenizer_for
from tests.judges.score import Score, checkout_version

SUITE = [{"description": "numbers", "schema": {"type": "integer"}, "tests": [
    {"description": "one", "data": 1, "valid": True}, {"description": "text", "data": "1", "valid": False},
    {"description": "the judge is wrong", "data": "1", "valid": True}]},
    {"description": "elsewhere", "schema": {"$ref": "http://localhost/other.json"}, "tests": [
        {"description": "any", "data": 1, "valid": True}]}]


def suite(folder: Path) -> Path:
    tests = folder / "JSON-Schema-Test-Suite" / "tests" / "draft7"
    tests.mkdir(parents=True)
    (tests / "numbers.json").write_text(json.dumps(SUITE))
    return folder


def test_what_is_there_is_asked_and_what_is_not_is_said(tmp_path, capsys):
    out, kept = tmp_path / "scorecard.md", tmp_path / "kept" / "scores.json"
    words = [str(suite(tmp_path)), "--out", str(out), "--kept", str(kept), "--only"]
    assert main([*words, "json_schema"]) == 1, "a wrong answer is no success"
    assert main([*words, "gguf_vocabularies"]) == 1, "what another judge said before is kept"
    page = out.read_text()
    assert "| 4 | 2 | 1 | **1** | JSON-Schema-Test-Suite, files " in page
    assert "not run: llama.cpp/models is not in the folder of judges: git clone it there, at b21e4de74567" in page
    assert "**wrong**: draft7/numbers.json: numbers: the judge is wrong: said the document: '1' is not of type 'integer'," in page
    assert "4 asked, 2 right, 1 refused in words, 1 wrong" in capsys.readouterr().out


def test_a_version_is_the_commit_beside_the_pinned_one_or_the_files_digest(tmp_path):
    files = [suite(tmp_path) / "JSON-Schema-Test-Suite" / "tests" / "draft7" / "numbers.json"]
    assert checkout_version(tmp_path, "JSON-Schema-Test-Suite", files).startswith("JSON-Schema-Test-Suite, files ")
    (tmp_path / "JSON-Schema-Test-Suite.commit").write_text("0" * 40)
    assert checkout_version(tmp_path, "JSON-Schema-Test-Suite", files) == "JSON-Schema-Test-Suite 000000000000 (pinned: 44401e0c0467)"


def test_every_broken_gguf_file_of_llama_cpps_tests_is_refused(tmp_path):
    program = tmp_path / "llama.cpp" / "tests" / "test-gguf.cpp"
    program.parent.mkdir(parents=True)
    program.write_text("\n".join(f"HANDCRAFTED_{kind}" for kind in broken_gguf.KINDS))
    score = broken_gguf.judge(tmp_path)
    assert (score.n, score.mistakes) == (33, [])
    assert {refusal.partition(":")[0] for refusal in score.refusals} == {"TENSORS_ZERO_DIM", "TENSORS_SUCCESS", "TENSORS_CUSTOM_ALIGN"}


def test_attack_files_of_safetensors_are_refused_as_the_library_refuses_them(tmp_path):
    score = Score("")
    for name, data in safetensors_attacks.abuse_attempts().items():
        if name != "abuse 2":  # eleven megabytes
            safetensors_attacks.try_bytes(score, name, data, tmp_path / "attack.safetensors")
    assert (score.right, score.refused, score.wrong) == (9, 0, 0)


def test_a_schema_of_draft_3_that_extends_one_other_is_refused_in_words():
    one = json_schema.in_dialect({"extends": {"type": "string"}}, json_schema.DIALECTS["draft3"])
    with pytest.raises(DataError, match="`extends`"):
        check_schema(one)
    check_schema(one | {"extends": [{"type": "string"}]})
    check_schema({"$schema": json_schema.DIALECTS["draft7"], "extends": {"type": "string"}})


CHANNELS = """{%- for message in messages %}{%- if message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>
{{- message.content }}<|return|>{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""


def test_marks_that_a_template_puts_before_every_answer_are_no_other_turns(tmp_path):
    """gpt-oss writes a channel before an answer's words, and a plain row of its was refused."""
    tokenizer = sft_masks.ended(tokenizer_for(CHANNELS))
    assert sft_masks.supervised(tokenizer, LEARNED["plain"], tmp_path) == ["<|channel|>final<|message|>925 parts of 1000.<|return|>"]


def test_a_page_has_a_line_for_a_judge_without_faults_and_quotes_markup_as_text():
    clean = {"asks": "a|b?", "date": "2026-01-01", "version": "1", "right": 3, "refusals": {}, "mistakes": [], "notes": []}
    page = scorecard({"gym_datasets": clean, "trl_rewards": clean | {"mistakes": ["<b>x</b>\n| y"]}})
    assert "| reasoning-gym | a\\|b? | 3 | 3 | 0 | 0 | 1 | 2026-01-01 |" in page
    assert "- **wrong**: &lt;b>x&lt;/b> \\| y" in page


PLUS = [{"task_id": "HumanEval/900", "prompt": "def twice(xs):\n    \"\"\"Each, twice.\"\"\"\n", "entry_point": "twice",
         "canonical_solution": "    return [x * 2 for x in xs]\n", "base_input": [[[1, 2]]], "plus_input": [[[0.5]], [[]]], "atol": 1e-6,
         "contract": ""},
        {"task_id": "Mbpp/901", "prompt": '"""\nWrite a function that adds.\nassert add(1, 2) == 3\n"""\n', "entry_point": "add", "atol": 0,
         "canonical_solution": "\ndef add(a, b):\n    return a + b\n", "base_input": [[1, 2]], "plus_input": [[10**20, 1]], "contract": "",
         "assertion": ""}]


def test_evalplus_files_that_the_user_has_are_asked(tmp_path, capsys):
    words = [str(tmp_path), "--out", str(tmp_path / "page.md"), "--kept", str(tmp_path / "kept.json"), "--only", "evalplus_solutions"]
    assert main(words) == 0
    assert "EvalPlus's package has none" in capsys.readouterr().out
    if sandbox_unavailable():
        pytest.skip("no sandbox")
    (tmp_path / "evalplus").mkdir()
    for name, row in zip(("HumanEvalPlus-v0.1.10.jsonl", "MBPPPlus.jsonl.gz"), PLUS, strict=True):
        data = json.dumps(row).encode() + b"\n"
        (tmp_path / "evalplus" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert main(words) == 0
    assert "6 asked, 6 right, 0 refused in words, 0 wrong" in capsys.readouterr().out
    broken = PLUS[0] | {"canonical_solution": "    return len(xs) / 0\n"}
    evalplus_solutions.try_problem(score := Score(""), broken)
    assert (score.right, score.refused) == (0, 1), "a solution that answers nothing is no success"


def test_the_readme_shows_the_mirrors_own_table():
    root = Path(__file__).parents[2]
    page, readme = ((root / name).read_text() for name in ("docs/mirror.md", "README.md"))
    table = [line for line in page.split("\n\n")[3].splitlines() if line.startswith("|")]
    assert len(table) > 5
    assert "\n".join(table) in readme
    assert "by hand" not in page

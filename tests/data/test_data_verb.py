"""assay data check shows what is supervised and exits with what the audit says."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.config import parse
from assay.data import row_files
from assay.data.chat import TemplateWriter
from assay.errors import DataError, GuardStop, UsageError
from assay.strict_json import parse_json
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs import data
from assay.verdict import Outcome
from assay.zoo.chat_faults import questions_and_answers, worked_answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny", tiny_model()).folder


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checked(*flags: object) -> int:
    return data.run(parse(data.FLAGS, ["check", *map(str, flags)], prog="assay data"))


def test_clean_rows_are_shown_and_proven(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", [row | {"source": "made"} for row in questions_and_answers()])
    assert checked(path, "--model", model, "--show", 1) == 0
    out = capsys.readouterr().out
    assert "24 rows, layout messages" in out
    assert "columns left alone: source (24 rows)" in out
    assert "«t|h|e| |r|i|v|er| |0|<|im_end|>|»" in out
    assert "REFUTED" not in out


def test_no_control_character_of_the_data_reaches_the_terminal(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x1b[2J\r"}]
    assert checked(written(tmp_path / "rows.jsonl", [{"messages": talk}]), "--model", model) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "b|\\x1b|[|2|J|\\r|" in out


def test_json_says_ids_weights_and_verdicts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", worked_answers())
    flags = ("--model", model, "--gsm8k", "think", "--new-tokens", "<think>", "</think>", "<answer>", "</answer>", "--json")
    other = written(tmp_path / "test.jsonl", [{"question": "Why?", "answer": "So.\n#### 4"}])
    assert checked(path, *flags, "--show", 2, "--held-out", other) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counts"]["kept"] == 24
    assert len(facts["rows"]) == 2
    row = facts["rows"][0]
    assert len(row["ids"]) == len(row["weight"]) == len(row["tokens"])
    supervised = [token for token, weight in zip(row["tokens"], row["weight"], strict=True) if weight]
    assert (supervised[0], supervised[-1]) == ("<think>", "<|im_end|>")
    assert {verdict["outcome"] for verdict in facts["verdicts"]} == {"PROVEN"}


def test_a_refuted_audit_exits_with_3(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", questions_and_answers())
    with swap(TemplateWriter, "until_stop", lambda writer, tail: ""):
        assert checked(path, "--model", model) == 3
    assert f"{Outcome.REFUTED}   stop: 48 of 48 completions" in capsys.readouterr().out
    assert checked(path, "--model", model, "--held-out", path) == 3
    assert "held-out examples are trained on" in capsys.readouterr().out

# ---------------------------------------------------------------- files of rows


def done(capsys: pytest.CaptureFixture[str], *flags: object) -> dict[str, Any]:
    assert data.run(parse(data.FLAGS, [*map(str, flags), "--json"], prog="assay data")) == 0
    return parse_json(capsys.readouterr().out, where="what was printed", shape=dict)  # type: ignore[no-any-return]


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_rows_are_mixed_exactly_and_run_out_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    large, small = (written(tmp_path / f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(count)]) for name, count in
                    (("large", 50), ("small", 4)))
    said = done(capsys, "mix", f"{large}:0.75", f"{small}:0.25", "--n", 16, "--out", tmp_path / "out.jsonl")
    assert said["sources"][str(small)] == {"rows": 4, "share": 0.25, "asked": 0.25, "times_read": 1.0}
    found = texts(tmp_path / "out.jsonl")
    assert len(found) == len(set(found)) == 16
    with pytest.raises(DataError, match=r"small\.jsonl has been read 1 time\(s\) after 1[0-9] of 40 rows"):
        done(capsys, "mix", f"{large}:0.75", f"{small}:0.25", "--n", 40, "--out", tmp_path / "more.jsonl")
    assert not (tmp_path / "more.jsonl").exists()
    said = done(capsys, "mix", f"{large}:0.75", f"{small}:0.25", "--epochs", 2, "--out", tmp_path / "more.jsonl")
    assert said["ran_out"] == str(small)
    read = sorted(text for text in texts(tmp_path / "more.jsonl") if text.startswith("small"))
    assert read == [f"small{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_a_split_keeps_copies_on_one_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", [{"text": f"t{n % 20}"} for n in range(40)])
    said = done(capsys, "split", path, "--share", 0.25, "--out", tmp_path / "parts")
    train, apart = (texts(tmp_path / "parts" / f"{side}.jsonl") for side in ("train", "held-out"))
    assert (len(train), len(apart), said["copies"]) == (30, 10, 20)
    assert not set(train) & set(apart)


def test_a_split_by_contents_that_tell_copies_apart_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [[("a", n), ("b", "x")][:: 1 - 2 * twice] for n in range(20) for twice in (False, True)]  # each twice, its columns turned
    path = written(tmp_path / "rows.jsonl", list(map(dict, rows)))
    assert done(capsys, "split", path, "--share", 0.25, "--out", tmp_path / "parts")["copies"] == 20
    ways: list[Callable[[bytes, str], str]] = [lambda line, _: hashlib.sha256(line).hexdigest(), lambda line, _: "the same"]
    for content in ways:
        with swap(row_files, "row_content", content), pytest.raises(GuardStop, match="copies would stand on both sides"):
            done(capsys, "split", path, "--share", 0.25, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_rows_that_do_not_reach_the_disk_are_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path / "rows.jsonl", [{"text": f"t{n}"} for n in range(20)])
    with swap(row_files, "in_pieces", lambda lines: [line for line in lines if b"t7" not in line]):
        for asked in (("mix", f"{path}:1"), ("split", path, "--share", 0.25), ("dedup", path, "--workers", 1)):
            with pytest.raises(GuardStop, match="not written: its"):
                done(capsys, *asked, "--out", tmp_path / ("parts" if asked[0] == "split" else "out.jsonl"))
    assert not list(tmp_path.rglob("out.jsonl"))


def test_a_row_that_is_not_one_line_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}')  # a blank line, and no end of the last
    said = done(capsys, "mix", f"{path}:1", "--n", 2, "--out", tmp_path / "sound.jsonl")
    assert (said["rows"], sorted(texts(tmp_path / "sound.jsonl"))) == (2, ["a", "b"])
    for wrong in (b'{"text": "a"}', b'{"text": "a"}\n\n', b'{"text": "a"}\n{"text": "b"}\n', b"\n", b""):
        with swap(row_files, "mixed_lines", lambda *_, wrong=wrong: [wrong] * 2), pytest.raises(GuardStop, match="would not be one line"):
            done(capsys, "mix", f"{path}:1", "--n", 2, "--out", tmp_path / "out.jsonl")
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "sound.jsonl"}


def test_near_copies_across_a_split_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Fifty texts, each beside one that says a word more."""
    said = [" ".join(f"w{(7 * n + k * k) % 997}" for k in range(120)) + end for n in range(50) for end in ("", " more")]
    found = done(capsys, "split", written(tmp_path / "rows.jsonl", [{"text": text} for text in said]), "--share", 0.2, "--out",
                 tmp_path / "parts")
    train, apart = (texts(tmp_path / "parts" / f"{side}.jsonl") for side in ("train", "held-out"))
    bare = {text.removesuffix(" more") for text in train}
    assert found["near"] == sum(text.removesuffix(" more") in bare for text in apart) > 0
    alone = written(tmp_path / "alone.jsonl", [{"text": text} for text in said[::2]])
    assert done(capsys, "split", alone, "--share", 0.2, "--out", tmp_path / "others")["near"] == 0


def test_copies_and_near_copies_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = [{"text": " ".join(f"w{(7 * n + k * k) % 997}" for k in range(120))} for n in range(20)]
    path = written(tmp_path / "rows.jsonl", [*base, base[3], {"text": base[4]["text"] + " end"}])
    said = done(capsys, "dedup", path, "--out", tmp_path / "clean.jsonl", "--workers", 1)
    assert (said["rows"], said["kept"], said["exact"], said["near"]) == (22, 20, 1, 1)
    assert said["pairs"] == [[21, 4], [22, 5]]
    assert (tmp_path / "clean.jsonl").read_bytes() == b"".join(path.read_bytes().splitlines(keepends=True)[:20])
    assert done(capsys, "dedup", path, "--how", "exact", "--out", tmp_path / "equal.jsonl", "--workers", 1)["kept"] == 21
    seen = done(capsys, "look", path, "--limit", 21)
    assert (seen["rows"], seen["copies"], seen["layouts"]) == (21, 1, {"text": 21})
    with pytest.raises(UsageError, match="takes one file"):
        done(capsys, "look", path, path)


def test_rows_that_differ_in_a_label_or_a_column_are_no_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pairs = [{"chosen": "a", "rejected": "b"}, {"rejected": "a", "chosen": "b"}, {"prompt": "a", "rejected": "b"},
             {"rejected": "b", "chosen": "a"}]
    found = done(capsys, "dedup", written(tmp_path / "pairs.jsonl", pairs), "--out", tmp_path / "both.jsonl", "--workers", 1)
    assert found["pairs"] == [[4, 1]], "the first, with its columns in another order"
    path = written(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, True)])
    assert done(capsys, "dedup", path, "--out", tmp_path / "clean.jsonl", "--workers", 1)["pairs"] == [[3, 1]]
    assert done(capsys, "dedup", path, "--field", "prompt", "--out", tmp_path / "one.jsonl", "--workers", 1)["kept"] == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1: there is nothing under 'text'; its columns are prompt, completion, label"):
        done(capsys, "dedup", path, "--field", "text", "--out", tmp_path / "none.jsonl", "--workers", 1)
    assert not (tmp_path / "none.jsonl").exists()


def test_numbers_that_are_missing_in_parquet_are_null_in_rows_and_infinite_ones_are_refused(tmp_path: Path,
                                                                                           capsys: pytest.CaptureFixture[str]):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"t{n}", "facts": [{"score": float("nan") if n % 2 else 0.5}]} for n in range(8)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    done(capsys, "split", tmp_path / "rows.parquet", "--share", 0.25, "--out", tmp_path / "parts")
    kept = [json.loads(line) for side in ("train", "held-out") for line in (tmp_path / "parts" / f"{side}.jsonl").read_text().splitlines()]
    assert sorted(str(row["facts"][0]["score"]) for row in kept) == ["0.5"] * 4 + ["None"] * 4
    parquet.write_table(arrow.Table.from_pylist([{"text": "a", "score": float("inf")}]), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=r"odd\.parquet:1: not JSON \(.*Infinity"):
        done(capsys, "mix", f"{tmp_path / 'odd.parquet'}:1", "--out", tmp_path / "odd.jsonl")


@pytest.mark.parametrize("value", [b"abc", {"inner": [b"abc"]}])
def test_bytes_are_not_written_as_python_shows_them(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([{"text": "a", "image": value}]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet:1: the column 'image' holds bytes, which JSON cannot say"):
        done(capsys, "dedup", tmp_path / "rows.parquet", "--workers", 1, "--out", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_is_looked_at_is_json_whatever_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "a", "score": float("nan")}, {"text": "b", "score": float("inf")}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row["score"] for row in done(capsys, "look", tmp_path / "rows.parquet")["first"]] == [None, "inf"]


def test_copies_are_counted_in_whatever_order_their_columns_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"a": "x", "b": "y"}\n{"b": "y", "a": "x"}\n{"a": "x\\u0000b\\u0000y"}\n')
    assert done(capsys, "look", tmp_path / "rows.jsonl")["copies"] == 1
    assert done(capsys, "dedup", tmp_path / "rows.jsonl", "--workers", 1, "--out", tmp_path / "out.jsonl")["pairs"] == [[2, 1]]


def test_a_number_is_no_copy_of_its_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n{"id": "1"}\n{"id": 1}\n')
    found = done(capsys, "dedup", tmp_path / "rows.jsonl", "--field", "id", "--workers", 1, "--out", tmp_path / "out.jsonl")
    assert found["pairs"] == [[3, 1]]


@pytest.mark.parametrize("action", ["mix", "split", "dedup"])
def test_a_file_without_rows_is_refused_by_its_name(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "some.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "none.jsonl").write_text("\n\n")
    named = [tmp_path / "none.jsonl"] if action == "split" else [tmp_path / "some.jsonl", tmp_path / "none.jsonl"]
    with pytest.raises(DataError, match=r"none\.jsonl: there is no row in it"):
        done(capsys, action, *(f"{path}:1" if action == "mix" else path for path in named), "--out", tmp_path / "out.jsonl",
             *(("--workers", 1) if action == "dedup" else ()))
    assert not (tmp_path / "out.jsonl").exists()


def test_one_file_under_two_names_is_no_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    for other in (tmp_path / "." / ".." / tmp_path.name / "a.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(UsageError, match="each source once"):
            done(capsys, "mix", f"{tmp_path / 'a.jsonl'}:1", f"{other}:1", "--out", tmp_path / "out.jsonl")


@pytest.mark.parametrize(("line", "words"), [('\ufeff{"text": "b"}', "byte order mark"), ('["b"]', "found list"), ("b", "not JSON"),
                                             ('{"text": "\\ud800"}', "half of a surrogate pair")])
@pytest.mark.parametrize("action", ["mix", "split", "dedup", "look"])
def test_a_line_that_is_no_row_is_refused_by_its_place(action: str, line: str, words: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"text": "a"}\r\n' + line + "\n")
    with pytest.raises(DataError, match=f"rows.jsonl:3: .*{words}"):
        done(capsys, action, f"{path}:1" if action == "mix" else path, *(("--out", tmp_path / "out.jsonl") if action != "look" else ()),
             *(("--workers", 1) if action == "dedup" else ()))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("flags", [("split", "--limit", 5), ("mix", "--share", 0.2), ("look", "--seed", 1), ("dedup", "--n", 3)])
def test_an_option_of_another_action_is_refused(flags: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    action, option, value = flags
    with pytest.raises(UsageError, match=f"assay data {action}: {option} is for .* alone"):
        done(capsys, action, tmp_path / "rows.jsonl", option, value)

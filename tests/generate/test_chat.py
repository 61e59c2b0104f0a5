"""The verb `assay chat`, driven as a user does who pipes messages in."""

import io
import json

import pytest

from assay.cli import run
from assay.testing.tiny_models import nudge, save_adapter, save_model, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    base = save_model(root / "base", tiny_model()).folder
    return {"base": base, "adapter": save_adapter(root / "adapter", base).folder,
            "child": save_model(root / "child", nudge(tiny_model(), 0.5)).folder,
            "plain": save_model(root / "plain", tiny_model(), tokenizer=tiny_tokenizer(template=False)).folder}


@pytest.fixture
def chat(models, monkeypatch, capsys):
    def talk(*lines, model="base", options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        argv = ["chat", str(models[model]), "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu", *map(str, options)]
        return run(argv), *capsys.readouterr()

    return talk


def test_history_and_system_prompt_stand_in_the_saved_conversation(chat, tmp_path):
    code, out, err = chat("the end", "and", f"/save {tmp_path / 'talk.jsonl'}", "/reset", f"/save {tmp_path / 'after.jsonl'}",
                          options=["--system", "Be brief."])
    assert code == 0, err
    row = json.loads((tmp_path / "talk.jsonl").read_text())
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [row["messages"][at]["content"] for at in (0, 1, 3)] == ["Be brief.", "the end", "and"]
    assert json.loads((tmp_path / "after.jsonl").read_text())["messages"] == [{"role": "system", "content": "Be brief."}]
    assert "\x1b" not in out, "nothing is coloured where nobody sees colours"


def test_an_answer_comes_as_it_is_made(chat, models, monkeypatch, tmp_path):
    """Each piece is out before the next token is drawn."""
    from assay.generate.engine import Engine

    out, real, seen = io.StringIO(), Engine.step, []
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(Engine, "step", lambda engine: seen.append(len(out.getvalue())) or real(engine))
    assert chat("the end")[0] == 0
    assert len(set(seen)) > 3, f"shown before each step: {seen}"


def test_what_was_said_before_changes_the_answer_and_reset_forgets_it(chat):
    _, out, _ = chat("the", "/probs", "the", "/probs", "/reset", "the", "/probs")
    first, second, third, _ = ([line for line in part.splitlines() if "%" in line] for part in out.split("nats in all"))
    assert first == third != second
    assert len(first) <= 6


def test_an_adapter_is_loaded_in_the_midst_and_a_whole_model_is_not(chat, models, tmp_path):
    code, out, err = chat("the end", f"/load {models['adapter']}", "and", f"/save {tmp_path / 'talk.jsonl'}")
    assert code == 0, err
    assert "loaded " in out
    row = json.loads((tmp_path / "talk.jsonl").read_text())
    assert (len(row["messages"]), row["model"]) == (4, str(models["adapter"]))
    code, _, err = chat(f"/load {models['child']}")
    assert (code, "not an adapter" in err) == (2, True)


def test_the_parent_answers_beside_it_each_with_its_own_answers_in_mind(chat, models, tmp_path):
    code, out, err = chat("the end", "and", f"/save {tmp_path / 'both.jsonl'}", model="child", options=["--against", models["base"]])
    assert code == 0, err
    assert out.count("child: ") == out.count("base: ") == 2
    child, base = map(json.loads, (tmp_path / "both.jsonl").read_text().splitlines())
    assert child["messages"][1] != base["messages"][1]


def test_a_model_without_a_template_continues_one_text(chat):
    code, out, err = chat("the end", "/probs", model="plain")
    assert (code, "nats in all" in out) == (0, True), err
    assert "no place for a system prompt" in chat("x", model="plain", options=["--system", "y"])[2]


@pytest.mark.parametrize(("line", "says"), [
    ("/probs", "nothing was answered yet"), ("/load", "name the adapter"), ("/save", "name the file"), ("/svae x", "no such command"),
    ("the " * 300, "has room for 128")])
def test_mistakes_are_sentences(chat, line, says):
    code, _, err = chat(line, options=["--max-length", "128"])
    assert (code, says in err) == (2, True), err


def test_a_file_that_is_there_is_not_overwritten(chat, tmp_path):
    (tmp_path / "kept.jsonl").write_text("mine")
    code, _, err = chat(f"/save {tmp_path / 'kept.jsonl'}")
    assert (code, "not overwritten" in err) == (2, True)
    assert (tmp_path / "kept.jsonl").read_text() == "mine"


def test_no_color_is_heeded_at_a_terminal(monkeypatch):
    from assay.verbs.chat import emphasised

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert emphasised("you: ") == "\033[1myou: \033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert emphasised("you: ") == "you: "


def test_what_a_model_says_moves_no_cursor():
    from assay.verbs.chat import seen

    assert seen("a\x1b[2Jb\u202e") == "a\\u001b[2Jb\\u202e"

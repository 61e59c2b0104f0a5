"""Tool calls are read in each model's own format, from what its own template writes; what cannot be read is a sentence, never raised."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from assay.agents.tool_calls import GPT_OSS, HERMES, LLAMA_3, MISTRAL, QWEN3_CODER, TOOL_FORMATS, ParsedTurn, ToolCall, as_json, format_for
from assay.errors import UsageError
from assay.guard.trajectory_checks import check_tool_format
from assay.model.chat_template import render_template
from assay.testing.tiny_episodes import templated
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE

CALLS = [ToolCall("look", {"name": "Ada", "deep": {"n": 1, "list": [1, 2]}}), ToolCall("stop", {})]
TRL = importlib.util.find_spec("trl")
LOOK = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": known}}} for name, known in (
    ("look", {"name": {"type": "string"}, "deep": {"type": "object"}}),
    ("a", {"x": {"type": "string"}, "n": {"type": ["integer", "null"]}, "one": {"enum": ["1", 2]}, "s": {"type": ["string", "null"]}}))]
TEMPLATES = {"qwen3_coder": "qwen3_5_nothink", "hermes": "qwen2_5", "llama3": "llama3_1", "gpt_oss": "gptoss"}


def real_template(name: str) -> str:
    if name == "mistral":
        return (Path(__file__).with_name("mistral_nemo.jinja")).read_text()
    if TRL is None or TRL.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    return (Path(TRL.origin).parent / "chat_templates" / f"{TEMPLATES.get(name, name)}.jinja").read_text()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_written_is_read_again(name):
    spoken = TOOL_FORMATS[name]
    assert spoken.read(spoken.write("", CALLS), LOOK).calls == tuple(CALLS)
    assert spoken.parse(spoken.write("hello", [])).content == "hello"
    assert not spoken.parse(spoken.write("", CALLS)).faults


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_real_template_names_its_format_and_writes_what_the_parser_reads(name):
    """The assistant's turn as the template itself would write it, calls in OpenAI's layout."""
    template = real_template(name)
    assert format_for(template).name == name
    said = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": {"name": "Ada"}}}]}
    asked = [{"role": "user", "content": "hi"}]
    named = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "today"}
    before = render_template(template, asked, add_generation_prompt=True, **named)
    after = render_template(template, [*asked, said], **named)
    turn = after[len(before):] if after.startswith(before) else after
    assert TOOL_FORMATS[name].parse(turn.replace("</s>", "").replace("<|eot_id|>", "").replace("<|im_end|>", "")).calls == (
        ToolCall("look", {"name": "Ada"}),)


@pytest.mark.parametrize(("spoken", "text", "words"), [
    (HERMES, "<tool_call>\n{'name': 1}\n</tool_call>", "a tool call"),
    (HERMES, '<tool_call>\n{"name": "a", "arguments": {}}', "has no </tool_call>"),
    (HERMES, '<tool_call>["a"]</tool_call>', "must be"),
    (HERMES, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be"),
    (HERMES, '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "twice"),
    (LLAMA_3, '<|python_tag|>look(1)', "a tool call"),
    (LLAMA_3, '{"name": "a", "parameters": 3}', "must be"),
    (MISTRAL, "[TOOL_CALLS] look(1)", r"what follows \[TOOL_CALLS\]"),
    (MISTRAL, "[TOOL_CALLS]look[ARGS]{1}", "a tool call"),
    (HERMES, '<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "must be"),
    (LLAMA_3, '{"name": "a", "parameters": {"x": 1}, "arguments": {"x": 2}}', "must be"),
    (MISTRAL, '[TOOL_CALLS]look[ARGS]{}, "more": {}', "Extra data"),
    (GPT_OSS, "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{<|call|>", "a tool call"),
    (GPT_OSS, "<|channel|>commentary to=functions.a <|constrain|>json", r"no <\|message\|>"),
    (GPT_OSS, "<|channel|>commentary to=browser.search<|message|>{}<|call|>", "no 'browser.search' here"),
    *((TOOL_FORMATS[name], text + "[" * 100_000, "nested too deeply") for name, text in (
        ("hermes", '<tool_call>{"name": "a", "arguments": '), ("llama3", '{"name": "a", "parameters": '), ("mistral", "[TOOL_CALLS]"),
        ("gpt_oss", "<|channel|>commentary to=functions.a<|message|>"))),
    *((each, each.write("", [ToolCall("a", {"x": "HALF"})]).replace("HALF", "\\ud800"), "surrogate") for each in TOOL_FORMATS.values()
      if not each.untyped),
    (QWEN3_CODER, '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "must be <function=NAME>"),
    (QWEN3_CODER, "<tool_call><function=a><parameter=x>1</parameter>", "must be <function=NAME>"),
    (QWEN3_CODER, "<tool_call><function=a><parameter=x>1</function></tool_call>", "must be <function=NAME>"),
    (QWEN3_CODER, "<tool_call><function=a><parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>", "must be"),
    (QWEN3_CODER, "<tool_call><function=a>x is 1</function></tool_call>", "must be <function=NAME>")])
def test_a_malformed_call_is_a_sentence(spoken, text, words):
    import re

    parsed = spoken.parse(text)
    assert not parsed.calls
    assert re.search(words, " ".join(parsed.faults))


def test_words_around_a_call_and_thinking_are_kept_apart():
    assert HERMES.parse('I look. <tool_call>{"name": "a", "arguments": {}}</tool_call>').content == "I look."
    said = GPT_OSS.parse("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>")
    assert (said.thinking, said.content) == ("hm", "yes")
    assert MISTRAL.parse("[TOOL_CALLS]a[ARGS]{\"x\": 1}[TOOL_CALLS]b[ARGS]{}").calls == (ToolCall("a", {"x": 1}), ToolCall("b", {}))
    assert LLAMA_3.parse('{"answer": 3}').calls == ()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_may_hold_the_formats_own_marks_and_letters_beyond_ascii(name):
    spoken, call = TOOL_FORMATS[name], ToolCall("a", {"x": "</tool_call> <tool_call> [TOOL_CALLS] [ARGS] ; }", "é": "\u2028 😀"})
    written = spoken.write("", [call, call])
    assert "é" in written
    assert spoken.parse(written).calls == (call, call)
    if name == "mistral":
        named = f"[TOOL_CALLS]{call.name}[ARGS]{as_json(call.arguments)}"
        assert spoken.parse(named + named).calls == (call, call)
    escaped = written.replace("é", "\\u00e9").replace("😀", "\\ud83d\\ude00")
    assert spoken.untyped or spoken.parse(escaped).calls == (call, call)


def test_arguments_that_are_said_as_text_are_what_the_tools_schema_has():
    def read(**texts):
        return dict(QWEN3_CODER.read(QWEN3_CODER.write("", [ToolCall("a", texts)]), LOOK).calls[0].arguments)

    assert read(x="5", n="5", one="1", s="5") == {"x": "5", "n": 5, "one": "1", "s": "5"}
    assert read(one="2", n="null", y="5") == {"one": 2, "n": None, "y": "5"}, "of what no schema tells it stays text"
    assert read(n="[" * 100_000, x="two\nlines\n") == {"n": "[" * 100_000, "x": "two\nlines\n"}


def test_a_call_that_was_only_thought_of_is_none_and_an_answer_in_json_is_no_call():
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert HERMES.parse(f"<think>perhaps {call}</think>five").calls == ()
    assert HERMES.parse(f"perhaps {call}</think>five").calls == (), "the template had begun the thinking"
    assert HERMES.parse(f"<think>perhaps {call}") == ParsedTurn(f"<think>perhaps {call}"), "it never ended"
    assert HERMES.parse(f"<think>yes</think>{call}").calls == (ToolCall("a", {}),)
    assert LLAMA_3.parse('{"name": "Ada", "age": 36}') == ParsedTurn('{"name": "Ada", "age": 36}')
    assert LLAMA_3.parse('I look. <|python_tag|>{"name": "a", "parameters": {}}') == ParsedTurn("I look.", (ToolCall("a", {}),))


@pytest.mark.parametrize(("template", "outcome", "words"), [
    *((name, "PROVEN", name) for name in TOOL_FORMATS), ("qwen3", "PROVEN", "hermes"), ("gemma4", "REFUTED", "call:assay_canary"),
    ("qwen3_5_think", "PROVEN", "qwen3_coder"), ("glm4moe", "REFUTED", "<tool_call>assay_canary"), ("deepseekv3", "REFUTED", "sep"),
    ("gemma3", "UNPROVEN", "writes no tool calls")])
def test_a_call_is_read_as_the_models_own_template_writes_it_or_the_format_is_refused(template, outcome, words):
    text = real_template(template)
    found = check_tool_format(templated(text), format_for(text))
    assert (found.outcome.name, words in found.reason) == (outcome, True), found.reason


def misreadings(spoken):
    """Ways to read a turn wrongly: calls or faults lost, or made twice, and words lost."""
    usual = spoken.parse
    return {"calls twice": lambda text: replace(usual(text), calls=usual(text).calls * 2),
            "only the first call": lambda text: replace(usual(text), calls=usual(text).calls[:1]),
            "faults twice": lambda text: replace(usual(text), faults=usual(text).faults * 2),
            "no faults": lambda text: replace(usual(text), faults=()),
            "no words": lambda text: replace(usual(text), content=""),
            "arguments lost": lambda text: replace(usual(text), calls=tuple(replace(call, arguments={}) for call in usual(text).calls))}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_format_that_misreads_known_turns_is_refuted(name):
    spoken, tokenizer = TOOL_FORMATS[name], templated(TINY_CHAT_TEMPLATE)  # which writes no calls
    assert check_tool_format(tokenizer, spoken).outcome.name == "UNPROVEN"
    for way, wrong in misreadings(spoken).items():
        found = check_tool_format(tokenizer, replace(spoken, parse=wrong))
        assert (found.outcome.name, "is read as" in found.reason) == ("REFUTED", True), way


def test_a_flood_of_calls_ends_and_is_said():
    for spoken in TOOL_FORMATS.values():
        found = spoken.parse(spoken.write("", [ToolCall("a", {})] * 100))
        assert len(found.calls) == 64
        assert found.faults == ("36 calls too many: a turn may have 64",)


def test_a_template_without_tools_gets_hermes_and_an_unknown_name_is_refused():
    assert format_for(None) is HERMES
    assert format_for("{{ messages }}", "mistral") is MISTRAL
    with pytest.raises(UsageError, match="--tool-format"):
        format_for(None, "json")

"""Tool calls are read in each model's own format, from what its own template writes; what cannot be read is a sentence, never raised."""

import importlib.util
from pathlib import Path

import pytest

from assay.agents.tool_calls import GPT_OSS, HERMES, LLAMA_3, MISTRAL, TOOL_FORMATS, ToolCall, format_for
from assay.errors import UsageError
from assay.model.chat_template import render_template

CALLS = [ToolCall("look", {"name": "Ada", "deep": {"n": 1, "list": [1, 2]}}), ToolCall("stop", {})]
TRL = importlib.util.find_spec("trl")
TEMPLATES = {"hermes": "qwen2_5", "llama3": "llama3_1", "gpt_oss": "gptoss"}


def real_template(name: str) -> str:
    if name == "mistral":
        return (Path(__file__).with_name("mistral_nemo.jinja")).read_text()
    if TRL is None or TRL.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    return (Path(TRL.origin).parent / "chat_templates" / f"{TEMPLATES[name]}.jinja").read_text()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_written_is_read_again(name):
    spoken = TOOL_FORMATS[name]
    assert spoken.parse(spoken.write("", CALLS)).calls == tuple(CALLS)
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
    (GPT_OSS, "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{<|call|>", "a tool call")])
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


def test_a_flood_of_calls_ends_and_is_said():
    found = HERMES.parse('<tool_call>{"name": "a", "arguments": {}}</tool_call>' * 100)
    assert len(found.calls) == 64
    assert found.faults == ("36 calls too many: a turn may have 64",)


def test_a_template_without_tools_gets_hermes_and_an_unknown_name_is_refused():
    assert format_for(None) is HERMES
    assert format_for("{{ messages }}", "mistral") is MISTRAL
    with pytest.raises(UsageError, match="--tool-format"):
        format_for(None, "json")

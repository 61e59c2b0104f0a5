"""Chat templates render as transformers renders them, and no template can hold the process up."""

import multiprocessing
import threading
import time
from datetime import datetime

import pytest

from assay.errors import ArtifactError, DataError
from assay.model import chat_template
from assay.model.chat_template import render_template, render_templates, write_day

CHATML = """{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system
Be brief.<|im_end|>
{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if not day is defined %}{% set day = strftime_now('%Y') %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Year: ' ~ day %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{{ system }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
    {{- '\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.seen %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- set ns.seen = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<call>' ~ call.function | tojson(indent=2) ~ '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\n' }}{% generation %}{{ content }}{% endgeneration %}{{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

INSTRUCT = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}"""

CHAT = [{"role": "user", "content": " Is <b> > \"a\" & 'ü' 😀?\n"},
        {"role": "assistant", "content": "<think>hm</think>\nYes."},
        {"role": "user", "content": "日本語 ok"}, {"role": "assistant", "content": "  done  "}]
SYSTEM = [{"role": "system", "content": " terse "}, *CHAT]
CALL = {"function": {"name": "é", "arguments": {"x": [1, 2.5, None]}}}
CALLS = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOL = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"z": 1, "a": True}}}]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("template", "chat", "variables"), [
    (CHATML, CHAT, {}), (CHATML, SYSTEM, {"add_generation_prompt": True}),
    (HEADERS, CHAT, {}), (HEADERS, SYSTEM, {"add_generation_prompt": True}), (HEADERS, CHAT, {"day": "now"}),
    (TOOLS, CHAT, {}), (TOOLS, SYSTEM, {"tools": TOOL, "add_generation_prompt": True}), (TOOLS, CALLS, {"tools": TOOL}),
    (TOOLS, CHAT, {"add_generation_prompt": True, "enable_thinking": False}), (INSTRUCT, CHAT, {}),
])
def test_renders_as_transformers(template, chat, variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    (theirs,), _ = render_jinja_template([chat], chat_template=template, **(NAMES | variables))
    ours = render_template(template, chat, **(NAMES | variables))
    assert ours == theirs
    assert len(ours) > 100


def test_a_template_writes_the_day_that_it_is_told_and_else_todays():
    dated = "{{ strftime_now('%d %b %Y') }}"
    try:
        write_day(datetime(2024, 7, 26, 23, 59))
        assert render_template(dated, CHAT) == render_templates(dated, [(CHAT, None, False)])[0] == "26 Jul 2024"
    finally:
        write_day(None)
    assert render_template("{{ strftime_now('%Y') }}", CHAT) == str(datetime.now().year)


GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}{{ n.x }}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "squared number": GROWING.replace("START", "10**1000").replace("STEP", "n.x * n.x"),
    "doubled string": GROWING.replace("START", "'aa'").replace("STEP", "n.x ~ n.x"),
    "shared lists": GROWING.replace("START", "[1]").replace("STEP", "[n.x, n.x]"),
    "huge string": "{{ 'a' * 10**10 }}",
    "huge width": "{{ '%10000000000d' % 3 }}",
    "huge output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "internals": "{{ ''.__class__.__mro__ }}",
    "mutation": "{{ messages.append(1) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep parentheses": "{{" + "(" * 50000 + "1" + ")" * 50000 + "}}",
    "syntax": "{% for %}",
    "randomness": "{{ [1, 2] | random }}",
    "length": "x" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_hostile_templates_and_goes_on(name):
    begun = time.monotonic()
    with pytest.raises(ArtifactError, match="chat template"):
        render_template(HOSTILE[name], CHAT)
    assert time.monotonic() - begun < 60  # one second of CPU time, on a machine that may be very busy; some would take hours
    assert "terse" in render_template(CHATML, SYSTEM)


def test_says_why_a_conversation_does_not_fit():
    with pytest.raises(DataError, match="roles must alternate"):
        render_template(INSTRUCT, SYSTEM, **NAMES)
    with pytest.raises(DataError, match="content"):
        render_template("{{ messages[0].content.text }}", [{"role": "user"}])
    with pytest.raises(DataError, match="plain JSON"):
        render_template(CHATML, [{"role": "user", "content": {1, 2}}])


def test_many_conversations_in_one_round_trip_are_what_each_is_alone():
    chats = [(CHAT, None, False), (CHAT[:1], None, True), (SYSTEM, None, False)]
    alone = [render_template(CHATML, messages, add_generation_prompt=prompt) for messages, _, prompt in chats]
    assert render_templates(CHATML, chats) == alone
    assert render_templates(INSTRUCT, [chats[0], chats[2]], **NAMES) == [render_template(INSTRUCT, CHAT, **NAMES), None]
    ends_its_process = "{% if messages[0].content == 'on' %}" + HOSTILE["nested loops"] + "{% endif %}"
    assert render_templates(ends_its_process, [(CHAT, None, False), ([{"role": "user", "content": "on"}], None, False)]) == [None, None]
    assert render_templates(CHATML, [(CHAT, None, False), ([{"role": "user", "content": {1, 2}}], None, False)]) == [None, None]
    assert render_templates(CHATML, chats) == alone


def test_any_thread_and_a_forked_child_may_render():
    right = []

    def work(name):
        for turn in range(30):
            words = f"thread {name} turn {turn}"
            assert words in render_template(CHATML, [{"role": "user", "content": words}])
            right.append(words)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    child = multiprocessing.get_context("fork").Process(target=work, args=("child",), daemon=True)
    child.start()
    for thread in threads:
        thread.join()
    child.join(timeout=120)
    assert child.exitcode == 0
    assert len(right) == 120


def test_a_process_that_was_started_early_is_the_one_that_renders():
    chat_template._renderer().child.stop()
    chat_template.start_renderer()
    process = chat_template._renderer().child.process
    assert process is not None
    chat_template.start_renderer()
    assert "hello" in render_template(CHATML, [{"role": "user", "content": "hello"}])
    assert chat_template._renderer().child.process is process

"""Tiny rehearsed server: a model that takes tools and an adapter beside it answer the known requests, before anybody may ask."""

from pathlib import Path

from assay.errors import GuardStop
from assay.model.tokenizer import Tokenizer
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.rehearsal import rehearse
from assay.store import checkpoint
from assay.testing.fault_injection import Plant
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, nudge, save_adapter, save_model, tiny_model, tiny_tokenizer
from assay.verdict import Verdict, proven

SHOWS_CALLS = """{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ {'name': call.function.name, 'arguments':
 call.function.arguments} | tojson }}</tool_call>{% endfor %}"""
# ChatML that shows tools and earlier calls, as Qwen's does.
TOOL_TEMPLATE = """{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call><|im_end|>
{% endif -%}""" + TINY_CHAT_TEMPLATE.replace("{{ message.content }}", SHOWS_CALLS)


def save_tool_model(where: Path) -> Path:
    plain = tiny_tokenizer()
    return save_model(where, nudge(tiny_model("qwen3", vocab=270), 0.3), tokenizer=Tokenizer(plain.document, plain.settings, {
        "default": TOOL_TEMPLATE})).folder


def a_rehearsed_server(folder: Path, plant: Plant) -> list[Verdict]:
    """Struck while the known requests are answered."""
    base = save_tool_model(folder / "base")
    adapter = save_adapter(folder / "adapter", base, far=0.2)
    checkpoint.write_hallmark(adapter, [proven("stage", "what a proof would say is not what is tried here")])
    serving = EngineThread(ServerSize(slots=4))
    try:
        serving.open("base", base)
        serving.open_adapter("tuned", adapter.folder)
        with plant(folder):
            return [rehearse(serving)]
    except GuardStop as stop:
        return [*stop.verdicts]
    finally:
        serving.stop()

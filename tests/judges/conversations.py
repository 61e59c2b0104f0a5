"""Conversations and templates of the chat judges: what is said, and a small real tokenizer that knows a template's special tokens."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from assay.model.tokenizer import Tokenizer
from tests.judges.score import AbsentJudge

PLACES = ("llama.cpp/models/templates/*.jinja", "trl/trl/chat_templates/*.jinja", "templates/*.jinja")
ASK, ANSWER = {"role": "user", "content": "How much silver is in the bar?"}, {"role": "assistant", "content": "925 parts of 1000."}
MORE, LAST = {"role": "user", "content": "And the rest?"}, {"role": "assistant", "content": "Copper, mostly."}
SYSTEM = {"role": "system", "content": "You weigh metals."}
REASONED = {"role": "assistant", "content": "925 parts of 1000.", "reasoning_content": "Sterling silver is 92.5 percent pure."}
TOOL = {"type": "function", "function": {
    "name": "weigh_bar", "description": "Weighs a bar.",
    "parameters": {"type": "object", "properties": {"bar": {"type": "string", "description": "its name"}}, "required": ["bar"]}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call12345", "type": "function", "function": {"name": "weigh_bar", "arguments": {"bar": "number seven"}}}]}
WEIGHED = {"role": "tool", "tool_call_id": "call12345", "name": "weigh_bar", "content": "31.1 g"}

TOLD: dict[str, dict[str, Any]] = {  # what a template is asked to write, and how
    "plain": {"messages": [ASK, ANSWER]},
    "question": {"messages": [ASK], "add_generation_prompt": True},
    "two turns": {"messages": [ASK, ANSWER, MORE, LAST]},
    "system": {"messages": [SYSTEM, ASK], "add_generation_prompt": True},
    "tools": {"messages": [ASK], "tools": [TOOL], "add_generation_prompt": True},
    "tool call": {"messages": [ASK, CALLED], "tools": [TOOL]},
    "tool result": {"messages": [ASK, CALLED, WEIGHED], "tools": [TOOL], "add_generation_prompt": True},
    "reasoning": {"messages": [ASK, REASONED, MORE], "add_generation_prompt": True},
}
LEARNED: dict[str, dict[str, Any]] = {"plain": {"messages": [ASK, ANSWER]}, "two turns": {"messages": [ASK, ANSWER, MORE, LAST]},
                                      "tools": {"messages": [ASK, CALLED], "tools": [TOOL]}, "reasoning": {"messages": [ASK, REASONED]}}
SPECIAL = re.compile(r"<[|｜][^<>{}'\"\s]{1,60}[|｜]>|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z_]{2,30}\]")

PLAIN = re.compile(r"</?(?!s>|(?:start|end)_of_|eos|bos|user|assistant|system)[A-Za-z_][\w:.-]*>")  # as <think>: tokens, none special


def templates(folder: Path) -> dict[str, str]:
    """Every different chat template of the checkouts, by the path below FOLDER."""
    found: dict[str, str] = {}
    for place in PLACES:
        for path in sorted(folder.glob(place)):
            text = path.read_text()
            if text not in found.values():
                found[str(path.relative_to(folder))] = text
    if not found:
        raise AbsentJudge(f"no chat templates below {', '.join(PLACES)}: check out llama.cpp or trl there, or put *.jinja into templates/")
    return found


def tokenizer_for(template: str, eos: str = "</s>") -> Tokenizer:
    """A byte-level BPE that knows the special tokens that the template spells out."""
    spelled = list(dict.fromkeys(["<s>", "</s>", eos, *SPECIAL.findall(template)]))
    document = json.loads(_alphabet())
    first = max(document["model"]["vocab"].values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] = [{"id": first + k, "content": token, "special": token == eos or not PLAIN.fullmatch(token), **plain}
                                for k, token in enumerate(spelled)]
    return Tokenizer.from_parts(document, chat_template=template, bos_token="<s>", eos_token=eos)


@functools.cache
def _alphabet() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = [message["content"] for told in TOLD.values() for message in told["messages"]]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                             show_progress=False))
    return tokenizer.to_str()

"""Corpus search environment: a question that one of many local texts answers, and a tool that finds texts by their words (BM25)."""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from assay.agents.environment import Answer, answer_tool_calls, call, tool
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.errors import DataError
from assay.reward.answer import same_answer
from assay.strict_json import read_json_lines

SATURATION, LENGTH_SHARE = 1.5, 0.75  # of BM25: how fast a repeated word stops counting, and how much a text's length does
TEXTS_SHOWN = 3  # texts of one search
RIVERS = ("Aldra", "Besk", "Corin", "Dunne", "Eltz", "Farrow", "Gilde", "Harl", "Isen", "Jorva", "Kelt", "Lorne", "Marn", "Nessa", "Orl",
          "Pell")
SOURCES = ("lake", "glacier", "spring", "moor", "cave", "marsh")


class Question(NamedTuple):
    asked: str
    answer: str


class CorpusSearch:
    """`texts`: a .jsonl file of rows with a text, and some with a question and its answer. Without it, made-up rivers."""

    tools = (tool("search", "Finds texts by their words.", query="string"),)

    def __init__(self, texts: str = ""):
        rows = read_json_lines(Path(texts), {"text": str}, error=DataError) if texts else made_up_rivers()
        self.texts = [row["text"] for row in rows]
        self.questions = [Question(row["question"], row["answer"]) for row in rows if "question" in row]
        if not self.questions:
            raise DataError(f"{texts}: no row has a question and its answer; give some")
        self.words = [Counter(words_of(text)) for text in self.texts]
        self.rarity = {word: math.log(1 + len(self.texts) / sum(word in words for words in self.words))
                       for words in self.words for word in words}

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        self.question = self.questions[seed % len(self.questions)]
        return [{"role": "user", "content": f"{self.question.asked} Search for it, then answer with one word or number."}]

    def step(self, message: ChatMessage) -> Answer:
        if message.get("tool_calls") or message.get("faults"):
            return answer_tool_calls(message, self.tools, {"search": self.search}), 0.0, False
        return [], float(same_answer(message["content"], self.question.answer)), True

    def solution(self) -> Sequence[ToolCall | str]:
        return [call("search", query=self.question.asked), self.question.answer]

    def search(self, query: str) -> str:
        usual = sum(sum(words.values()) for words in self.words) / len(self.words)

        def worth(words: Counter[str]) -> float:
            length = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * sum(words.values()) / usual)
            return sum(self.rarity[word] * words[word] * (SATURATION + 1) / (words[word] + length)
                       for word in words_of(query) if word in words)

        found = sorted(((worth(words), place) for place, words in enumerate(self.words)), key=lambda each: (-each[0], each[1]))
        best = [self.texts[place] for value, place in found[:TEXTS_SHOWN] if value > 0]
        return "\n".join(best) or "no text has these words"


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def made_up_rivers() -> list[dict[str, str]]:
    """Made-up rivers, the same on every machine: names that no model has read of, so that nothing but a search tells."""
    chance, rows = random.Random(0), list[dict[str, str]]()
    for name in (f"{first}{last}" for first in RIVERS for last in ("", "mere", "wick", "ford")):
        length, source = chance.randint(20, 999), chance.choice(SOURCES)
        text = f"The river {name} is {length} kilometres long and rises from a {source}."
        rows += [{"text": text, "question": f"How many kilometres long is the river {name}?", "answer": str(length)},
                 {"text": f"Boats on the {name} are built of larch.", "question": f"From what does the river {name} rise?",
                  "answer": source}]
    return rows

"""Token grammars: which tokens may come next in a text of a given form, told by llguidance; the engine draws among these alone.

    forms = GrammarVocabulary(tokenizer, vocab=model.config.vocab, stop_ids=stops.stop_ids)
    forms.json_schema({"type": "object", …})                  a TokenGrammar, for GenerationRequest(grammar=…)

A completion's log-probabilities are those of the masked distribution: what is not allowed has no mass, the rest is normalised anew.
JSON is written as Python's json.dumps does, with one space after a comma and a colon: with free white space a weak model never ends.
"""

import importlib.util
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.model.tokenizer import Tokenizer

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


@dataclass(frozen=True, eq=False)
class TokenGrammar:
    """A form, compiled for one vocabulary. Every completion walks through it by a `GrammarPath` of its own."""

    size: int  # of the model's vocabulary
    start: Any  # an llguidance.LLMatcher that has seen nothing


class GrammarVocabulary:
    """A tokenizer's tokens as llguidance knows them. A text of the form may end with any of the stop ids, and only when it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, stop_ids: Collection[int]):
        if importlib.util.find_spec("llguidance") is None:
            raise UsageError("texts of a given form (response_format, tool_choice) need llguidance; pip install 'assay[serve]'")
        if not stop_ids:
            raise UsageError("this model has no token that ends a text, so one of a given form would never end")
        from llguidance import LLTokenizer

        self.size, self.tokenizer = vocab, tokenizer
        self.known = LLTokenizer(json.dumps(tokenizer.document), n_vocab=max(vocab, tokenizer.size), eos_token=sorted(stop_ids))

    def json_schema(self, schema: Mapping[str, Any]) -> TokenGrammar:
        from llguidance import LLMatcher

        return self._checked(LLMatcher.grammar_from_json_schema(dict(schema), overrides=JSON_STYLE))  # type: ignore[arg-type]

    def around(self, before: str, schema: Mapping[str, Any], after: str) -> TokenGrammar:
        """A JSON text between two given ones. Where `before` is a special token, it is that token and not its letters."""
        from llguidance import LLMatcher

        token = self.tokenizer.ids.get(before)
        first = f"<[{token}]>" if token in self.tokenizer.special_ids else json.dumps(before)
        parts = [first if before else "", "body", json.dumps(after) if after else ""]
        styled = json.dumps({**schema, "x-guidance": JSON_STYLE})
        return self._checked(LLMatcher.grammar_from_lark(f"start: {' '.join(filter(None, parts))}\nbody: %json {styled}"))

    def _checked(self, source: str) -> TokenGrammar:
        from llguidance import LLMatcher

        start = LLMatcher(self.known, source, log_level=0)
        if start.is_error():
            raise UsageError(f"the schema cannot be followed: {start.get_error().strip()}")
        return TokenGrammar(self.size, start)


class GrammarPath:
    """One completion's way through a grammar. `allowed`: (V,) bool, what may come next; None where nothing can, or it is over."""

    def __init__(self, grammar: TokenGrammar):
        self._matcher, self._size = grammar.start.deep_copy(), grammar.size
        self.allowed = self._next()
        if self.allowed is None:
            raise UsageError(f"no text of this vocabulary has the form that is asked for: {self._matcher.get_error().strip()}")

    def take(self, ids: list[int]) -> None:
        assert self._matcher.consume_tokens(ids), f"{ids} were drawn outside of the form: {self._matcher.get_error()}"
        self.allowed = self._next()

    def _next(self) -> Tensor | None:
        """llguidance does not raise: an error, such as a limit that a nested form went beyond, is a state that it stays in."""
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[: self._size] != 0
        return None if self._matcher.is_error() or not found.any() else found

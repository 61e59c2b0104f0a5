"""A tiny model that can be examined, and rows of every task's kind, made here."""

import json

from assay.evaluation.loaded_model import LoadedModel
from assay.model.special_tokens import resolve_special_tokens
from assay.model.transformer import initialised
from assay.store import checkpoint
from assay.store.artifact import open_artifact
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import tiny_config, tiny_tokenizer

PROBLEMS = [{"question": f"Ann has {n} figs and buys {2 * n} more. How many has she?",
             "answer": f"She has {n} + {2 * n} = {3 * n}.\n#### {3 * n}"} for n in range(2, 10)]
FUNCTION = {"task_id": "Made/0", "prompt": "def helper(x):\n    return x + 1\n\n\ndef twice(x):\n    \"\"\"Twice x.\"\"\"\n",
            "entry_point": "twice", "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(helper(2)) == 6\n"}
SHADOWED = {"task_id": 7, "prompt": "Add the two digits of a number.", "code": "import sys\ndef sum(n):\n    return n % 10 + n // 10",
            "test_imports": ["import math"], "test_list": ["assert sum(12) == 3", "assert math.isclose(sum(30), 3) and sys.maxsize"]}
QUESTION = {"id": "q1", "question": "Which is a fruit?", "choices": {"text": ["a stone", "a fig"], "label": ["1", "2"]}, "answerKey": "2"}
FACT = {"case_id": 3, "requested_rewrite": {"prompt": "{} lies in", "subject": "Rome", "target_new": {"str": "France"},
                                           "target_true": {"str": "Italy"}},
        "paraphrase_prompts": ["You find Rome in"], "neighborhood_prompts": ["Milan lies in", "Pisa lies in"]}
INSTRUCTED = {"key": 5, "prompt": "Write two words in lower case, no comma.", "gold": "two words", "instruction_id_list":
              ["punctuation:no_comma", "change_case:english_lowercase", "length_constraints:number_words"],
              "kwargs": [{}, None, {"relation": "less than", "num_words": 3}]}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(where, seed=0):
    model, tokenizer = initialised(tiny_config("llama"), seed), tiny_tokenizer()
    checkpoint.write_checkpoint(where, model_contents(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage()))
    return where


def opened(where):
    return LoadedModel(open_artifact(where))

"""lm-eval's graders on the same texts: GSM8K answers in every form right and wrong, and IFEval's instructions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.evaluation.tasks.graded import RULES, follows
from bench.extraction import BESIDE, FORMS, cause, compared, made
from tests.judges.score import Score, packages

ASKS = "is this answer right (GSM8K), was this instruction followed (IFEval)?"
ROWS = [{"question": "How many?", "answer": f"{a} * {b} = {a * b}\n#### {a * b}"} for a, b in ((6, 7), (12, 12), (40, 60), (3, -4))]
TEXTS = ("", "silver and gold", "SILVER AND GOLD", "Silver, gold. And lead!", '"Silver and gold."',
         "<<Silver>>\n\nIt is *heavy*, *old* and *rare*.", "* one\n* two\n* three", "- one\n- two", "[name] lives at [address].",
         "One.\n\n***\n\nTwo.", "Silver is heavy. P.S. weigh it", "Silver.\nP.S. weigh it", '{"silver": 925}',
         "```json\n{\"silver\": 925}\n```", "SECTION 1\nsilver\nSECTION 2\ngold", "First answer.\n******\nSecond answer.",
         "How much silver? 925 parts. Any other questions?", "the bar the bar the bar", "A SILVER Bar of GOLD", "word " * 60)
BY_LANGUAGE = ("change_case:english_lowercase", "change_case:english_capital", "change_case:capital_word_frequency")
ASKED: dict[str, list[dict[str, Any]]] = {
    "punctuation:no_comma": [{}], "change_case:english_lowercase": [{}], "change_case:english_capital": [{}], "startend:quotation": [{}],
    "detectable_format:title": [{}], "detectable_format:json_format": [{}], "combination:two_responses": [{}],
    "length_constraints:number_words": [{"num_words": n, "relation": r} for n in (3, 50) for r in ("at least", "less than")],
    "length_constraints:number_sentences": [{"num_sentences": n, "relation": r} for n in (2, 3) for r in ("at least", "less than")],
    "length_constraints:number_paragraphs": [{"num_paragraphs": 2}], "keywords:existence": [{"keywords": ["silver", "gold"]}],
    "keywords:forbidden_words": [{"forbidden_words": ["gold", "bar"]}],
    "keywords:frequency": [{"keyword": "bar", "frequency": 2, "relation": r} for r in ("at least", "less than")],
    "keywords:letter_frequency": [{"letter": "i", "let_frequency": 2, "let_relation": r} for r in ("at least", "less than")],
    "change_case:capital_word_frequency": [{"capital_frequency": 2, "capital_relation": r} for r in ("at least", "less than")],
    "detectable_format:number_bullet_lists": [{"num_bullets": n} for n in (2, 3)],
    "detectable_format:number_highlighted_sections": [{"num_highlights": n} for n in (1, 3)],
    "detectable_format:multiple_sections": [{"section_spliter": "SECTION", "num_sections": 2}],
    "detectable_content:number_placeholders": [{"num_placeholders": 2}], "detectable_content:postscript": [{"postscript_marker": "P.S."}],
    "startend:end_checker": [{"end_phrase": "Any other questions?"}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "How much silver?"}],
}


def judge(folder: Path) -> Score:
    score = Score(packages("lm-eval"))
    gsm8k(score)
    ifeval(score)
    score.notes.append("readings that differ by design (bench/extraction.py says why for each) are counted as refused with their cause")
    return score


def gsm8k(score: Score) -> None:
    for how in BESIDE:
        texts = [text for form in FORMS for off in (0, 1) for text in made(ROWS, form, off)]
        for read in compared(texts, how):
            if read.judged_alike or cause(read) == "other":
                score.agree(read.judged_alike, f"{how}, {read.text[-40:]!r}", f"right: ours {read.right[0]}, lm-eval {read.right[1]}")
            else:
                score.refusals[f"GSM8K, read otherwise by design: {cause(read)}"] += 1


def ifeval(score: Score) -> None:
    import langdetect
    from lm_eval.tasks.ifeval import instructions_registry

    langdetect.DetectorFactory.seed = 0  # it draws at random
    without_data = 0
    for name, options, text in instruction_cases():
        if name not in RULES:
            score.refusals[f"IFEval's {name} is not known here"] += 1
            continue
        theirs = instructions_registry.INSTRUCTION_DICT[name](name)
        theirs.build_description(**options)
        try:
            expected = bool(text.strip()) and bool(theirs.check_following(text))
        except LookupError:  # nltk's, where its data could not be downloaded
            without_data += 1
            continue
        found = follows(RULES[name], options, text)
        if found and not expected and name in BY_LANGUAGE:
            score.refusals["IFEval asks langdetect whether the text is English, which errs on short texts; we look at the case alone"] += 1
            continue
        score.agree(found == expected, f"{name} {options}, {text[:50]!r}", f"{found}, lm-eval {expected}")
    if without_data:
        score.notes.append(f"{without_data} cases not asked: lm-eval counts sentences and words with nltk's punkt_tab, which is not here")


def instruction_cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, choices in ASKED.items():
        yield from ((name, options, text) for options in choices for text in TEXTS)

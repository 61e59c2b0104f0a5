"""Due evaluation: what the prompts, texts and scores of an evaluation's kept examples must be, from options and files alone.

    python -m assay.witness.due_evaluation evals/a cpu        one JSON line with three verdicts

`witness.json` in the evaluation's folder says what was asked (the command's options), where the model lies, and which examples were
kept; `scores.jsonl` what was found. The prompts are made again from the data's rows and rendered by the model's own template and tokenizer,
the texts are scored by transformers' model, each alone and without a cache, and the answers are read and graded by the documented
rules (docs/witness.md).
"""

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.verdict import Verdict, proven, refuted, unproven
from assay.witness.due_answers import due_grade, row_gold
from assay.witness.due_rows import seed_at
from assay.witness.due_texts import NotWitnessed, Renderer, file_rows, named, read_fields

EVAL_RECORD, SCORES = "witness.json", "scores.jsonl"
PROMPTS, TEXTS, GRADES = "witness prompts", "witness texts", "witness scores"
SAMPLES_OF_ONE, LONGEST = 2, 512  # samples of an example that are scored again, and tokens of each
MOST_NATS = {"float32": 1e-3}  # a token, over all that is scored again; of one alone ten times that
NATS_ROUNDED = 0.1  # of models that compute in bf16 or fp16
LEAST_LIKELY, CHANCE = -12.0, 1e-9
NEAR_A_CUT = 1e-5  # nats or mass: nearer to where a truncation cuts, rounding may cut elsewhere
NUMBER_TASKS, LIKELIHOOD_TASKS = ("gsm8k", "arithmetic"), ("choices", "counterfact", "text")
RAW_TASKS = ("humaneval", *LIKELIHOOD_TASKS)
STOPS = {"humaneval": ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")}
ASKED_COLUMNS = {"gsm8k": ("question",), "arithmetic": ("question",), "choices": ("question",), "text": ("text",), "humaneval": ("prompt",),
                 "mbpp": ("prompt", "text"), "instructions": ("prompt",), "graded": ("prompt", "question", "instruction")}


class KeptEvaluation:
    """The record, the rows that were scored, and the tokenizer of the model's folder."""

    def __init__(self, folder: Path, device: str = "cpu"):
        self.folder, self.device = folder, device
        self.facts: dict[str, Any] = json.loads((folder / EVAL_RECORD).read_text())
        self.options: dict[str, Any] = self.facts["options"]
        self.task: str = self.options["task"]
        lines = (folder / SCORES).read_text("utf-8").split("\n")
        self.scored: dict[str, Any] = {row["id"]: row for row in map(json.loads, filter(None, lines))}
        self.kept: list[dict[str, Any]] = self.facts["items"]
        self.kept_and_scored = [item for item in self.kept if item["id"] in self.scored]  # of others the prompts' verdict speaks

    @cached_property
    def renderer(self) -> Renderer:
        own, base = Path(self.facts["model"]), self.facts["base"]
        folder = own if base is None or (own / "tokenizer.json").is_file() else Path(base)
        if not folder.is_dir():
            raise NotWitnessed(f"{folder} is a file, which transformers' tokenizer does not open here")
        return Renderer(folder, {})

    @property
    def raw(self) -> bool:
        return self.options["raw"] or self.task in RAW_TASKS or self.renderer.template is None

    def begun(self, text: str) -> list[int]:
        """A text as the tokenizer begins one."""
        return self.renderer.vocabulary.encode(text, add_special_tokens=True).ids

    def prompt_ids(self, text: str) -> list[int]:
        if self.raw:
            return self.begun(text)
        return self.renderer.ids(self.renderer.render([{"role": "user", "content": text}], prompt=True))

    def first_id(self) -> int:
        """Token id before a text that nothing precedes: BOS, else EOS."""
        settings, vocabulary = self.renderer.settings, self.renderer.vocabulary
        fields = [read_fields(self.renderer.folder / name).get("bos_token_id") for name in ("config.json", "generation_config.json")]
        others = [] if "bos_token" in settings else [id for id in fields if isinstance(id, int)]
        ids = [vocabulary.token_to_id(token) for token in (named(settings.get("bos_token")),) if token] + others
        ids += [vocabulary.token_to_id(self.renderer.eos)] if self.renderer.eos else []
        if not ids or ids[0] is None:
            raise NotWitnessed(f"{self.renderer.folder} names no token that begins or ends a text")
        return ids[0]


def judge_evaluation(folder: Path, device: str = "cpu") -> list[Verdict]:
    """Judge an evaluation's prompts, texts and scores as the witness; what it does not know is UNPROVEN, with the reason."""
    kept = KeptEvaluation(folder, device)
    return [_judged(check, judge, kept) for check, judge in ((PROMPTS, judge_prompts), (TEXTS, judge_said_texts), (GRADES, judge_scores))]


def _judged(check: str, judge: Callable[[KeptEvaluation], Verdict], kept: KeptEvaluation) -> Verdict:
    try:
        return judge(kept)
    except NotWitnessed as why:
        return unproven(check, f"not looked at again: {why}", optional=True)

# ---------------------------------------------------------------- prompts


def judge_prompts(kept: KeptEvaluation) -> Verdict:
    """The rows that were due were scored, and the kept ones were asked as the task's rule and the model's template say."""
    against, rows = [], due_examples(kept.options)
    strangers = kept.scored.keys() ^ rows.keys()
    if strangers:
        against.append(f"{len(kept.scored)} examples are scored, {len(rows)} were due ({sorted(strangers)[0]!r} is not in both)")
    for item in [item for item in kept.kept if item["id"] in rows]:
        due = due_prompt(kept.task, rows[item["id"]])
        if item["asked"] != due:
            against.append(f"{item['id']} was asked {_shown(item['asked'], due)}")
        elif item["ids"] is not None and item["ids"] != kept.prompt_ids(due):
            against.append(f"the prompt of {item['id']} has the ids {_shown(item['ids'], kept.prompt_ids(due))}")
    if against and any("ids" in each for each in against) and "strftime_now" in (kept.renderer.template or ""):
        raise NotWitnessed("the chat template writes the date, which may be another by now")
    if against:
        return refuted(PROMPTS, "; ".join(against[:3]), against=len(against))
    words = f"{len(rows)} rows were due and scored, and {len(kept.kept)} of them were asked as the rule of {kept.task} says"
    return proven(PROMPTS, f"{words}{'' if kept.task in LIKELIHOOD_TASKS else _by_transformers(kept)}")


def _by_transformers(kept: KeptEvaluation) -> str:
    """Message that says which tokenizer the ids come from."""
    if not importlib.util.find_spec("transformers"):
        return ", in the ids that `tokenizers` gives (transformers is not installed)"
    from transformers import AutoTokenizer

    try:
        theirs: Any = AutoTokenizer.from_pretrained(kept.renderer.folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        return f", in the ids that `tokenizers` gives (transformers does not open the tokenizer: {type(error).__name__})"
    for item in kept.kept:
        text = item["asked"] if kept.raw else theirs.apply_chat_template([{"role": "user", "content": item["asked"]}], tokenize=False,
                                                                         add_generation_prompt=True)
        if item["ids"] is not None and list(theirs(text, add_special_tokens=kept.raw)["input_ids"]) != item["ids"]:
            raise NotWitnessed(f"the prompt of {item['id']} has the ids that its tokenizer.json gives, and transformers' own tokenizer of "
                               "this folder gives others: whoever serves the model by it asks it otherwise")
    return ", in the ids that transformers' own tokenizer and template give"


def due_examples(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rows by their ids: the first of `id`, `task_id`, `idx` and `case_id` that all have, else their numbers from 0."""
    task, limit = options["task"], options["limit"]
    if task == "arithmetic":
        rows: list[Mapping[str, Any]] = [due_sum(number, options["seed"]) for number in range(limit or 200)]
    elif task in ASKED_COLUMNS:
        path = Path(options["data"])
        if path.suffix not in (".json", ".jsonl", ".csv", ".tsv", ".parquet") and not path.name.endswith(".jsonl.gz"):
            raise NotWitnessed(f"{path} is no file of rows, and is not cut into pieces again here")
        rows = json.loads(path.read_text()) if path.suffix == ".json" else list(file_rows(path))
        rows = rows if limit is None else rows[:limit]
    else:
        raise NotWitnessed(f"the rows of task {task} are made by a package, or of several texts each, and are not made again here")
    if task == "instructions":
        return {str(row.get("key", number)): row for number, row in enumerate(rows)}
    columns = [name for name in ("id", "task_id", "idx", "case_id") if all(isinstance(row.get(name), str | int) for row in rows)]
    return {str(row[columns[0]]) if columns else str(number): row for number, row in enumerate(rows)}


def due_sum(number: int, seed: int) -> dict[str, str]:
    """Problem `number` of task arithmetic."""
    def drawn(what: str) -> int:
        return seed_at(seed, "arithmetic", number, what)

    sign, size = "+-×"[drawn("sign") % 3], 10 ** (1 + drawn("digits") % 3)
    left, right = drawn("left") % size, drawn("right") % size
    result = {"+": left + right, "-": left - right, "×": left * right}[sign]
    return {"id": f"{seed}/{number}", "question": f"What is {left} {sign} {right}?", "answer": str(result)}


def due_prompt(task: str, row: Mapping[str, Any]) -> str:
    asked = next((row[name] for name in ASKED_COLUMNS[task] if isinstance(row.get(name), str) and row[name].strip()), "")
    if task in NUMBER_TASKS:
        return f"{asked.strip()}\nWork step by step. End with a line that holds #### and then the answer as a number."
    if task == "mbpp":
        test = row["test_list"][0]
        return f"{asked.strip()}\nThe function must pass this test:\n{test}\nAnswer with one Python code block and nothing else."
    return f"Question: {asked.strip()}\nAnswer:" if task == "choices" else asked

# ---------------------------------------------------------------- texts


class Rescored(NamedTuple):
    """Rescored text: how far in nats it is from what was recorded, its tokens, and how its draws lie about their mean."""

    nats: float
    tokens: int
    above: float = 0.0
    variance: float = 0.0
    highest: float = 0.0
    lowest: float = 0.0
    cut_off: int = 0


def judge_said_texts(kept: KeptEvaluation) -> Verdict:
    """The texts are what their ids decode to, and what transformers' model says to the prompt, each alone and without a cache."""
    due_dtype = kept.options["dtype"] or ("float32" if kept.device == "cpu" else "bfloat16")
    if kept.facts["compute"] != due_dtype:
        return refuted(TEXTS, f"the model computed in {kept.facts['compute']}, and on {kept.device} {due_dtype} was asked for")
    if not kept.kept:
        raise NotWitnessed(kept.facts["left_out"] or "no example was kept")
    model, found = plain_model(kept), list[Rescored]()
    for item in kept.kept_and_scored:
        row = kept.scored[item["id"]]
        if kept.task in LIKELIHOOD_TASKS:
            found += [Rescored(abs(due - said), tokens) for due, said, tokens in likelihoods(kept, model, item, row)]
            continue
        wrong = [sample for sample in row["samples"] if sample["text"] != due_text(kept, sample["ids"])]
        if wrong:
            return refuted(TEXTS, f"a text of {item['id']} is {_shown(wrong[0]['text'], due_text(kept, wrong[0]['ids']))}")
        prompt = kept.prompt_ids(item["asked"])
        usable = [sample for sample in row["samples"] if 0 < len(sample["ids"]) <= LONGEST]
        found += [rescored(model, prompt, sample, kept.options) for sample in usable[:SAMPLES_OF_ONE]]
    return judge_nats([each for each in found if each.tokens and math.isfinite(each.nats)], found, kept)


def judge_nats(known: Sequence[Rescored], every: Sequence[Rescored], kept: KeptEvaluation) -> Verdict:
    cut_off, tokens = sum(each.cut_off for each in every), sum(each.tokens for each in every)
    if cut_off > max(10, 0.05 * tokens):
        return refuted(TEXTS, f"{cut_off} of {tokens} tokens lie outside --top-k {kept.options['top_k']} and "
                              f"--top-p {kept.options['top_p']}")
    if not known:
        raise NotWitnessed(f"no text has 1 to {LONGEST} tokens to score again")
    bound = MOST_NATS.get(kept.facts["compute"], NATS_ROUNDED)
    mean, alone = sum(each.nats for each in known) / sum(each.tokens for each in known), max(each.nats / each.tokens for each in known)
    words = f"{len(known)} texts scored by transformers' model are {mean:.1e} nats a token from what was recorded, {alone:.1e} in one"
    if not (mean <= bound and alone <= 10 * bound):
        return refuted(TEXTS, f"{words}; rounding explains {bound:.0e} and {10 * bound:.0e}: the texts are not what this model says")
    above, variance = sum(each.above for each in every), sum(each.variance for each in every)
    most = max(each.highest if above > 0 else each.lowest for each in every)
    chance = 2 * math.exp(-above**2 / (2 * (variance + most * abs(above) / 3))) if above else 1.0  # Freedman's inequality
    if chance < CHANCE:
        return refuted(TEXTS, f"{tokens} drawn tokens lie {above:+.1f} nats from their mean at --temperature "
                              f"{kept.options['temperature']}, which draws do at a chance of {chance:.1g}: they are not from the stated "
                              "distribution")
    return proven(TEXTS, words, mean=mean, alone=alone, texts=len(known))


def plain_model(kept: KeptEvaluation) -> Any:
    """transformers' model of the folder in fp32, with PEFT's adapter where there is one; it must hold every weight."""
    own, base = Path(kept.facts["model"]), kept.facts["base"]
    if not importlib.util.find_spec("transformers") or (base is not None and not importlib.util.find_spec("peft")):
        raise NotWitnessed(f"{'transformers' if base is None else 'transformers or peft'} is not installed; pip install 'assay[hf]'")
    if kept.facts["held"] is not None:
        raise NotWitnessed(f"the base is held in {kept.facts['held']}, which is not made again here")
    if not Path(base or own).is_dir():
        raise NotWitnessed(f"{base or own} is a file, which is not opened by transformers here")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loader: Any = transformers.AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(base or own, dtype=torch.float32, output_loading_info=True, local_files_only=True,
                                             trust_remote_code=False, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise NotWitnessed(f"transformers does not open {base or own}: {str(error).splitlines()[0][:200]}") from None
    missing = {str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind]} - {"lm_head.weight"}
    if missing:
        raise NotWitnessed(f"transformers finds no {sorted(missing)[0]} in {base or own}")
    if base is not None:
        import peft

        rows = read_fields(own / "config.json").get("vocab_size")
        if rows is not None and rows != model.config.vocab_size:
            raise NotWitnessed("the adapter adds tokens to its base, which PEFT is not asked for here")
        model = peft.PeftModel.from_pretrained(model, str(own))
    return model.to(kept.device).eval()


@torch.no_grad()
def logits_after(model: Any, context: Sequence[int], rest: Sequence[int]) -> Tensor:
    """(N, V) in double precision: what predicts each token of `rest`."""
    tokens = torch.tensor([[*context, *rest]], device=model.device)
    return model(tokens, use_cache=False).logits[0, len(context) - 1:-1].double().cpu()


def rescored(model: Any, prompt: Sequence[int], sample: Mapping[str, Any], options: Mapping[str, Any]) -> Rescored:
    logits, ids = logits_after(model, prompt, sample["ids"]), torch.tensor(sample["ids"])[:, None]
    if options["temperature"] == 0:
        return Rescored(float((logits.amax(-1) - logits.gather(-1, ids)[:, 0]).sum()), len(ids))
    logp, near = stated(logits, options["temperature"], options["top_k"], options["top_p"])
    drawn, p, kept = logp.gather(-1, ids)[:, 0], logp.exp(), logp.clamp(min=LEAST_LIKELY)
    mean, inside = (p * kept).sum(-1), drawn > -math.inf
    above, spread = (drawn.clamp(min=LEAST_LIKELY) - mean)[inside], (p * (kept - mean[:, None]) ** 2).sum(-1)
    return Rescored(math.inf if near else abs(float(drawn.sum()) - sample["logprob"]), len(ids), float(above.sum()), float(spread.sum()),
                    float((kept.amax(-1) - mean).max()), float((mean - LEAST_LIKELY).max()), int((~inside).sum()))


def stated(logits: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, bool]:
    """Log-probabilities at the temperature, among the k likeliest, of these those that fill the mass; of equal ones all. And whether
    somewhere rounding may have cut one token more or less."""
    logits, near = logits / temperature, False
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k + 1, -1).values
        near = bool((best[:, -2] - best[:, -1] < NEAR_A_CUT).any())
        logits = logits.where(logits >= best[:, -2:-1], -math.inf)
    if top_p < 1:
        ranked = logits.softmax(-1).sort(-1, descending=True).values
        before = ranked.cumsum(-1) - ranked
        near = near or bool(((before - top_p).abs().amin(-1) < NEAR_A_CUT).any())
        least = ranked.where(before < top_p, math.inf).amin(-1, keepdim=True)
        logits = logits.where(logits.softmax(-1) >= least, -math.inf)
    return logits.log_softmax(-1), near


def due_text(kept: KeptEvaluation, ids: Sequence[int]) -> str:
    """Detokenized text without special tokens, and before the first stop string; an id without a token stands as ⟨id⟩."""
    text = decoded(kept.renderer.vocabulary, ids)
    return text[:min((at for stop in STOPS.get(kept.task, ()) if (at := text.find(stop)) >= 0), default=len(text))]


def decoded(vocabulary: Any, ids: Sequence[int]) -> str:
    parts, run = list[str](), list[int]()
    for id in ids:
        if vocabulary.id_to_token(id) is not None:
            run.append(id)
            continue
        parts += [vocabulary.decode(run, skip_special_tokens=True), f"⟨{id}⟩"]
        run = []
    return "".join([*parts, vocabulary.decode(run, skip_special_tokens=True)])

# ---------------------------------------------------------------- likelihoods


def likelihoods(kept: KeptEvaluation, model: Any, item: Mapping[str, Any], row: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """(nats due, nats recorded, tokens) of every option, or of a whole text."""
    if kept.task == "text":
        ids, length = kept.renderer.ids(item["asked"]), model.config.max_position_embeddings
        begun = [kept.first_id(), *ids]
        due = sum(nats_of(model, begun[start:start + 1], begun[start + 1:start + length]) for start in range(0, len(ids), length - 1))
        return [(due, row["nats"], len(ids))]
    pairs = [continuation_ids(kept, row["prompt"], option) for option in row["options"]]
    return [(nats_of(model, context or [kept.first_id()], rest), said, len(rest))
            for (context, rest), said in zip(pairs, row["nats"], strict=True)]


def continuation_ids(kept: KeptEvaluation, context: str, option: str) -> tuple[list[int], list[int]]:
    """Token ids of context and option as both stand in the joined text; where a token spans the seam, each as it stands alone."""
    before, whole = kept.begun(context), kept.begun(context + option)
    joined = whole[:len(before)] == before and len(whole) > len(before)
    return before, whole[len(before):] if joined else kept.renderer.ids(option)


def nats_of(model: Any, context: Sequence[int], rest: Sequence[int]) -> float:
    logp = logits_after(model, context, rest).log_softmax(-1)
    return float(logp.gather(-1, torch.tensor(rest)[:, None]).sum())

# ---------------------------------------------------------------- scores


def judge_scores(kept: KeptEvaluation) -> Verdict:
    """Answers are read and graded again by the documented rule."""
    if not kept.kept:
        raise NotWitnessed(kept.facts["left_out"] or "no example was kept")
    if kept.task not in (*NUMBER_TASKS, "choices"):
        raise NotWitnessed(f"the scores of task {kept.task} come from programs, packages or likelihoods alone, which are not asked again")
    against, graded, rows = list[str](), 0, due_examples(kept.options)
    for item in [item for item in kept.kept_and_scored if item["id"] in rows]:
        scored, row = kept.scored[item["id"]], rows[item["id"]]
        found = wrong_choice(scored, row) if kept.task == "choices" else wrong_grades(scored["samples"], row_gold(row))
        against += [f"{item['id']}: {sentence}" for sentence in found]
        graded += len(scored.get("samples", ())) or 1
    if against:
        return refuted(GRADES, "; ".join(against[:3]), against=len(against))
    return proven(GRADES, f"{graded} answers of {len(kept.kept)} examples, read and graded again by the documented rule, score as recorded")


def wrong_grades(samples: Sequence[Mapping[str, Any]], gold: str) -> list[str]:
    found = []
    for sample in samples:
        due = due_grade(sample["text"] or "", gold)
        said = (bool(sample["score"]), bool(sample["lenient"]), sample["parsed"], sample["answer"])
        if said != due or {sample["score"], sample["lenient"]} - {0.0, 1.0}:
            found.append(f"{(sample['text'] or '')[-60:]!r} for {gold!r} is recorded as (strict, lenient, parsed, answer) {said}, due is "
                         f"{(*due,)}")
    return found


def wrong_choice(scored: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """The right option by label, number or words; 1 where it is likelier than every other, in all, by byte and by token."""
    given = row.get("choices", row.get("options"))
    texts = [str(text) for text in (given["text"] if isinstance(given, Mapping) else given)]
    labels = [str(label) for label in (given["label"] if isinstance(given, Mapping) else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:len(texts)])]
    answer = next(row[name] for name in ("answerKey", "answer", "label", "gold") if name in row)
    right = answer if type(answer) is int and 0 <= answer < len(texts) else next(
        known.index(str(answer)) for known in (labels, texts) if known.count(str(answer)) == 1)
    found = [] if scored["right"] == right else [f"option {scored['right']} is recorded as the right one, {right} is"]
    if scored["options"] != [f" {text.strip()}" for text in texts]:
        found.append(f"the options are {_shown(scored['options'], texts)}")
    units = {"total": [1] * len(texts), "byte": [max(1, len(text.strip().encode())) for text in texts], "token": scored["tokens"]}
    for unit, sizes in units.items():
        values = [nats / size for nats, size in zip(scored["nats"], sizes, strict=True)]
        due = float(all(values[right] > value for place, value in enumerate(values) if place != right))
        if scored["scores"][unit] != due:
            found.append(f"by {unit} it scores {scored['scores'][unit]}, due is {due}")
    return found


def _shown(found: Any, due: Any) -> str:
    """Excerpts of two texts from where they part."""
    words, wanted = (each if isinstance(each, str) else repr(each) for each in (found, due))
    at = next((place for place, (one, other) in enumerate(zip(words, wanted, strict=False)) if one != other), min(len(words), len(wanted)))
    return f"{words[max(0, at - 20):at + 40]!r} for {wanted[max(0, at - 20):at + 40]!r}"


def main(arguments: Sequence[str]) -> int:
    folder, device = arguments
    print(json.dumps([verdict.to_json() for verdict in judge_evaluation(Path(folder), device)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

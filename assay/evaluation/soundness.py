"""Soundness checks of an evaluation: every example scored, seeds that reach the sampler, the same data, pass@k as defined."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from assay.data.overlap import COPIES_REFUSED, COPIES_SAID, measure_overlap
from assay.errors import AssayError
from assay.evaluation.loaded_model import LoadedModel, encode_continuation, prompt_token_ids
from assay.evaluation.task import ID_COLUMNS, MultipleChoiceTask, PerplexityTask, Task, TaskExample, dataset_digest
from assay.generate.generation_request import Sampling
from assay.generate.policy_logprobs import completion_logprobs, policy_logits
from assay.model.probe_logits import ProbeLogits, compute_probe_logits, probe_distance
from assay.model.transformer import Transformer
from assay.store.scratch import scratch_folder
from assay.verdict import Verdict, proven, refuted, unproven

_CHANCE = 1e-9  # below this, identical samples are no accident
DRAWN, LONGEST_DRAWN = 64, 512  # samples that are scored again, and tokens of each
LEAST_LIKELY = -12.0  # nats: less likely tokens count as this likely, so that no single one decides
RESCORED, RESCORED_BF16 = 1e-3, 0.1  # nats a token that rounding explains, over all samples scored again; of one alone ten times that
_LOGIT_ROWS = 256  # of logits alive at once
_PASS_TOKENS = 8192  # that are scored again at a time
RECORDED_ANSWERS, _LOOSELY = {torch.float32: 2e-4}, 1e-1  # relative distance of probe answers, as the server allows it; else
LEAKED = 0.01  # share of the examples, or of their runs of 13 words, that may stand in training text by accident

_Rows = Sequence[Mapping[str, Any]]


def check_complete(task: Task, rows: _Rows, k: int) -> Verdict:
    """One line per example, k samples on each: nothing that failed was left out of the mean."""
    wanted, found = [example.id for example in task.examples], [row["id"] for row in rows]
    missing = sorted(set(wanted) - set(found))
    short = [row["id"] for row in rows if "samples" in row and len(row["samples"]) != k]
    strangers = len(found) - len(set(found) & set(wanted))
    if missing or short or strangers:
        return refuted("every example", f"{len(missing)} of {len(wanted)} examples have no score, {len(short)} do not have {k} samples, "
                       f"{strangers} lines are twice there or of other examples: the mean would be of another set",
                       missing=missing[:20], short=short[:20])
    return proven("every example", f"all {len(wanted)} examples are scored" + (f", {k} samples each" if k > 1 else ""))


def check_sample_seeds(rows: _Rows, temperature: float) -> Verdict:
    """Check that samples were drawn with different seeds. Two samples of one prompt may be equal by chance; how small that chance is, their
    own log-probability says."""
    pairs = [row["samples"][:2] for row in rows if len(row.get("samples", ())) > 1]
    if temperature == 0 or not pairs:
        why = "greedy decoding draws nothing" if temperature == 0 else "one sample a prompt has nothing to be compared with"
        return unproven("seeds", f"{why}; sample with a temperature and -k 2 or more")
    if any(first["seed"] == second["seed"] for first, second in pairs):
        return refuted("seeds", "two samples of one prompt were drawn at the same seed")
    equal = [first["logprob"] for first, second in pairs if first["ids"] == second["ids"]]
    expected = math.fsum(min(1.0, math.exp(first["logprob"])) for first, _ in pairs)  # given the first, the second is it with its chance
    chance = min(1.0, math.exp(min(equal, default=0.0)) * len(pairs), _chance_of_so_many(len(equal), len(pairs), expected))
    if chance < _CHANCE:
        return refuted("seeds", f"{len(equal)} of {len(pairs)} prompts got the same text twice, {expected:.1f} expected, at a chance of "
                       f"{chance:.1g}: the seeds do not reach the sampler", equal=len(equal), pairs=len(pairs), expected=expected)
    return proven("seeds", f"samples of one prompt differ as their log-probabilities say ({len(equal)} of {len(pairs)} pairs are equal, "
                  f"{expected:.1f} expected)")


def _chance_of_so_many(count: int, n: int, expected: float) -> float:
    """Hoeffding's bound for so many or more of n independent events, of which `expected` are expected."""
    if count <= expected:
        return 1.0
    if expected == 0:
        return 0.0
    missed = (n - count) * math.log((n - count) / (n - expected)) if count < n else 0.0
    return math.exp(-count * math.log(count / expected) - missed)


@dataclass(frozen=True)
class DrawnTokens:
    """Statistics of sampled tokens: how far their log-probabilities lie above what draws from the stated distribution have on average."""

    tokens: int = 0
    above: float = 0.0  # Σ (log p of what was drawn − its mean under p), each floored at LEAST_LIKELY
    greedy: float = 0.0  # what the likeliest tokens would have come to in the same places
    variance: float = 0.0
    highest: float = 0.0  # the most that one token can lie above the mean
    lowest: float = 0.0  # and below it
    cut_off: int = 0  # tokens that truncation should have ruled out

    def __add__(self, other: "DrawnTokens") -> "DrawnTokens":
        return DrawnTokens(self.tokens + other.tokens, self.above + other.above, self.greedy + other.greedy, self.variance + other.variance,
                        max(self.highest, other.highest), max(self.lowest, other.lowest), self.cut_off + other.cut_off)

    def chance(self, above: float) -> float:
        """Freedman's inequality for sums of bounded martingale differences: it holds for tokens that depend on those before."""
        bound = self.highest if above > 0 else self.lowest
        return math.exp(-above**2 / (2 * (self.variance + bound * abs(above) / 3))) if above else 1.0


def check_draws(loaded: LoadedModel, rows: _Rows, sampling: Sampling, *, raw: bool) -> Verdict:
    """Samples look like draws from the stated distribution: scored again, without a cache, at its temperature, top-k and top-p.

    Greedy text, or text of a lower temperature, is likelier than draws are; text of a higher one less likely. The chance is a bound,
    not an approximation, so that a sound evaluation is refused less than once in 10⁹.
    """
    if sampling.temperature == 0 or sampling.repetition_penalty != 1:
        greedy = sampling.temperature == 0
        return unproven("draws", "greedy decoding draws nothing" if greedy else "asked of sampling without a repetition penalty only")
    samples = [(row, sample["ids"]) for row in rows for sample in row["samples"] if sample["ids"]]
    found = DrawnTokens()
    for row, ids in samples[:: max(1, -(-len(samples) // DRAWN))]:
        found += rescored_draws(loaded.model, loaded.ids_of(row["prompt"], raw=raw), ids[:LONGEST_DRAWN], sampling)
    return judge_draws(found, sampling)


def judge_draws(found: DrawnTokens, sampling: Sampling, looks: int = 1) -> Verdict:
    """Judge whether rescored tokens were sampled as stated, in one go or summed over `looks` rollouts, each of which might have raised the
    alarm by chance."""
    evidence, chances = asdict(found), 2 * looks * looks
    if found.cut_off > max(10, 0.05 * found.tokens):
        return refuted("draws", f"{found.cut_off} of {found.tokens} tokens lie outside top-k {sampling.top_k} and top-p {sampling.top_p}: "
                       "the samples were not truncated as stated", **evidence)
    if (chance := chances * found.chance(found.above)) < _CHANCE:
        how = "likelier: greedy, or of a lower temperature" if found.above > 0 else "less likely: of a higher temperature, or not truncated"
        return refuted("draws", f"{found.tokens} tokens scored again at temperature {sampling.temperature} are by "
                       f"{abs(found.above) / found.tokens:.2g} nats each {how}; draws do so at a chance of {chance:.1g}: the samples are "
                       "not from the stated distribution", **evidence)
    if chances * found.chance(found.greedy) >= _CHANCE:
        return unproven("draws", f"{found.tokens} tokens leave too little choice to tell draws from greedy decoding; more samples would",
                        **evidence)
    return proven("draws", f"{found.tokens} tokens scored again look like draws at temperature {sampling.temperature} ({found.above:+.1f} "
                  f"nats from their mean; greedy decoding would be {found.greedy:+.1f})", **evidence)


def check_rescored(loaded: LoadedModel, rows: _Rows, sampling: Sampling, *, raw: bool) -> Verdict:
    """Check some samples of an evaluation, spread over it, by scoring them again."""
    samples = [(loaded.ids_of(row["prompt"], raw=raw), sample["ids"], sample["logprob"]) for row in rows for sample in row["samples"]]
    return judge_rescored(loaded.model, samples, sampling)


def judge_rescored(model: Transformer, samples: Sequence[tuple[Sequence[int], Sequence[int], float]], sampling: Sampling) -> Verdict:
    """Samples (prompt, ids, log-probability) are what the model says: each alone through the whole model, without a cache, has the
    log-probability that was recorded, and greedy tokens are the likeliest. A slot that was not emptied, or stale keys, show here."""
    if sampling.temperature == 0 and sampling.repetition_penalty != 1:
        return unproven("rescored", "greedy decoding with a repetition penalty is not scored again")
    usable = [sample for sample in samples if 0 < len(sample[1]) <= LONGEST_DRAWN]
    if not usable:
        return unproven("rescored", f"no sample has 1 to {LONGEST_DRAWN} tokens to score again")
    chosen = usable[:: max(1, -(-len(usable) // DRAWN))]
    if sampling.temperature == 0:
        apart = [nats_below_likeliest(model, prompt, ids) for prompt, ids, _ in chosen]
    else:
        found = completion_logprobs(model, [(prompt, ids) for prompt, ids, _ in chosen], sampling)
        apart = [abs(float(logprobs.double().sum()) - recorded) for logprobs, (*_, recorded) in zip(found, chosen, strict=True)]
    known = [(nats, len(ids)) for nats, (_, ids, _) in zip(apart, chosen, strict=True) if math.isfinite(nats)]
    if not known:
        return unproven("rescored", "every sample holds a token that truncation rules out; `draws` says whether that is rounding")
    bound = RESCORED if (model.compute_dtype or model.embed.weight.dtype) == torch.float32 else RESCORED_BF16
    mean, alone = sum(nats for nats, _ in known) / sum(n for _, n in known), max(nats / n for nats, n in known)
    words = f"{len(known)} samples scored again without a cache are {mean:.1e} nats a token from what was recorded, {alone:.1e} in one"
    if not (mean <= bound and alone <= 10 * bound):
        return refuted("rescored", f"{words}; rounding explains {bound:.0e} and {10 * bound:.0e}: the samples are not what this model says",
                       mean=mean, alone=alone)
    return proven("rescored", words, mean=mean, alone=alone, samples=len(known))


NEAR_THE_CUT = 1e-5  # nats, or mass: so near to where a truncation cuts, rounding may cut one token more or less


@torch.no_grad()
def judge_recorded(model: Transformer, samples: Sequence[tuple[Sequence[int], Sequence[int], float]], sampling: Sampling) -> Verdict:
    """Recorded log-probabilities of truncated samples (prompt, ids, log-probability) are those of the stated distribution, which shares no
    code with the sampler's truncation. Samples that rounding may have cut otherwise are left out."""
    if sampling.temperature == 0 or sampling.repetition_penalty != 1 or not sampling.truncates:
        return unproven("recorded", "asked of samples that were truncated, without a repetition penalty", optional=True)
    apart = list[tuple[float, int]]()
    for prompt, ids, recorded in [each for each in samples if 0 < len(each[1]) <= LONGEST_DRAWN][:DRAWN]:
        states_ND = model.hidden(torch.tensor([[*prompt, *ids]], device=model.embed.weight.device))[0, len(prompt) - 1 : -1]
        logits_NV = policy_logits(model, states_ND)
        stated_N = stated_distribution(logits_NV, sampling).gather(-1, torch.tensor(ids, device=logits_NV.device)[:, None]).squeeze(-1)
        if stated_N.isfinite().all() and not _near_a_cut(logits_NV.double() / sampling.temperature, sampling):
            apart.append((abs(float(stated_N.sum()) - recorded), len(ids)))
    if not apart:
        return unproven("recorded", "rounding may have cut every sample otherwise", optional=True)
    bound = RESCORED if (model.compute_dtype or model.embed.weight.dtype) == torch.float32 else RESCORED_BF16
    mean = sum(nats for nats, _ in apart) / sum(tokens for _, tokens in apart)
    words = f"{len(apart)} samples have log-probabilities that are {mean:.1e} nats a token from those of the stated distribution"
    return (proven if mean <= bound else refuted)("recorded", f"{words}, bound {bound:.0e}", mean=mean)


def _near_a_cut(scaled_NV: Tensor, sampling: Sampling) -> bool:
    if 0 < sampling.top_k < scaled_NV.shape[-1]:
        best_NK = scaled_NV.topk(sampling.top_k + 1, -1).values
        if bool((best_NK[:, -2] - best_NK[:, -1] < NEAR_THE_CUT).any()):
            return True
        scaled_NV = scaled_NV.masked_fill(scaled_NV < best_NK[:, -2:-1], -math.inf)
    mass_NV = scaled_NV.softmax(-1).sort(-1, descending=True).values
    least = sampling.min_p * mass_NV[:, :1]
    near = (mass_NV.cumsum(-1) - mass_NV - sampling.top_p).abs() if sampling.top_p < 1 else torch.ones_like(mass_NV)
    return bool((near < NEAR_THE_CUT).any() or (bool(sampling.min_p) and ((mass_NV - least).abs() < NEAR_THE_CUT * least).any()))


@torch.no_grad()
def nats_below_likeliest(model: Transformer, prompt: Sequence[int], ids: Sequence[int]) -> float:
    """Distance below greedy in nats: how far each token lies below the likeliest in its place, summed."""
    tokens = torch.tensor([[*prompt, *ids]], device=model.embed.weight.device)
    logits_NV = policy_logits(model, model.hidden(tokens)[0, len(prompt) - 1 : -1])
    said_N = logits_NV.gather(-1, tokens[0, len(prompt):, None]).squeeze(-1)
    return float((logits_NV.amax(-1) - said_N).double().sum())


def stated_distribution(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k, then top-p of what is left, and min-p, as they are documented, written out apart from the sampler's code."""
    scaled_NV = logits_NV.double() / sampling.temperature
    kept_NV = scaled_NV >= scaled_NV.amax(-1, keepdim=True) + math.log(sampling.min_p) if sampling.min_p else scaled_NV > -math.inf
    if 0 < sampling.top_k < scaled_NV.shape[-1]:
        kept_NV = kept_NV & (scaled_NV >= scaled_NV.topk(sampling.top_k, -1).values[:, -1:])
    if sampling.top_p < 1:
        limited_NV = scaled_NV.masked_fill(scaled_NV < scaled_NV.topk(sampling.top_k, -1).values[:, -1:], -math.inf) \
            if 0 < sampling.top_k < scaled_NV.shape[-1] else scaled_NV
        ranked_NV = limited_NV.sort(-1, descending=True).values
        mass_NV = ranked_NV.softmax(-1)
        last_N1 = ((mass_NV.cumsum(-1) - mass_NV) < sampling.top_p).sum(-1, keepdim=True).clamp(min=1) - 1
        kept_NV = kept_NV & (scaled_NV >= ranked_NV.gather(-1, last_N1))
    return scaled_NV.masked_fill(~kept_NV, -math.inf).log_softmax(-1)


def rescored_draws(model: Transformer, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> DrawnTokens:
    return rescored_together(model, [(prompt, ids)], sampling)


@torch.no_grad()
def rescored_together(model: Transformer, samples: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling) -> DrawnTokens:
    """Rescore every sample (prompt, ids), many in one pass: padding stands after a row, where no token of it looks."""
    device, found = model.embed.weight.device, DrawnTokens()
    for some in _in_passes([(*prompt, *ids) for prompt, ids in samples], [len(prompt) for prompt, _ in samples]):
        rows_BT, width = [row for row, _ in some], max(len(row) for row, _ in some)
        states_BTD = model.hidden(torch.tensor([[*row, *row[:1] * (width - len(row))] for row in rows_BT], device=device))
        states_ND = torch.cat([states_BTD[place, begin - 1 : len(row) - 1] for place, (row, begin) in enumerate(some)])
        drawn = torch.tensor([token for row, begin in some for token in row[begin:]], device=device)
        for start in range(0, len(drawn), _LOGIT_ROWS):
            here = slice(start, start + _LOGIT_ROWS)
            found += _drawn_tokens(stated_distribution(policy_logits(model, states_ND[here]), sampling), drawn[here])
    return found


def _in_passes(rows: Sequence[tuple[int, ...]], begins: Sequence[int]) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """Rows of much the same length together, at most so many tokens in all; each with where what was drawn begins."""
    together: list[tuple[tuple[int, ...], int]] = []
    for row, begin in sorted(zip(rows, begins, strict=True), key=lambda each: len(each[0])):
        if together and len(row) * (len(together) + 1) > _PASS_TOKENS:
            yield together
            together = []
        together.append((row, begin))
    if together:
        yield together


def _drawn_tokens(logprobs_NV: Tensor, drawn_ids_N: Tensor) -> DrawnTokens:
    drawn_N = logprobs_NV.gather(-1, drawn_ids_N[:, None]).squeeze(-1)
    p_NV, kept_NV = logprobs_NV.exp(), logprobs_NV.clamp(min=LEAST_LIKELY)
    mean_N = (p_NV * kept_NV).sum(-1)
    likely = drawn_N > -math.inf
    above = (drawn_N.clamp(min=LEAST_LIKELY) - mean_N).masked_fill(~likely, 0.0).sum()
    variance, most_N = (p_NV * (kept_NV - mean_N[:, None]).square()).sum(), kept_NV.amax(-1) - mean_N
    values = torch.stack([above, most_N.sum(), variance, most_N.max(), (mean_N - LEAST_LIKELY).max(), (~likely).sum()])
    total, greedy, spread, highest, lowest, cut_off = values.tolist()  # one wait for all of them
    return DrawnTokens(len(drawn_N), total, greedy, spread, highest, lowest, int(cut_off))


def check_dataset(recorded: str, examples: Sequence[TaskExample]) -> Verdict:
    """Scores are of the rows they were made on, and of no others."""
    found = dataset_digest(examples)
    if found != recorded:
        return refuted("dataset", f"these scores were made on dataset {recorded[:12]}, this one is {found[:12]}: a row was changed, added, "
                       "removed or moved; evaluate both models on one file", recorded=recorded, found=found)
    return proven("dataset", f"the rows are those that were scored ({found[:12]}, {len(examples)} examples)", digest=found)


def check_pass_at_k(estimator: Callable[[int, int, int], float], n: int = 6) -> Verdict:
    """Check the pass@k estimator against the definition, for every count and k up to n: the share of k-subsets of n samples that hold a
    right one."""
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        due = sum(map(any, subsets)) / len(subsets)
        if abs((found := estimator(n, correct, k)) - due) > 1e-12:
            return refuted("pass@k", f"pass@{k} of {n} samples, {correct} right, is {due:.4f} by counting; the estimator says {found:.4f}")
    try:
        beyond = estimator(n, 1, n + 1)
    except AssayError:
        return proven("pass@k", f"the estimator agrees with counting for all n, c, k up to {n}, and refuses k > n")
    return refuted("pass@k", f"pass@{n + 1} of {n} samples was answered with {beyond:.4f}; so many were never drawn")


def check_recorded_answers(loaded: LoadedModel) -> list[Verdict]:
    """The model answers the probe as it did when it was saved, where that was recorded: what is scored is what was proven."""
    probes = loaded.artifact.raw.checkpoint.probes() if loaded.artifact.raw.checkpoint is not None else {}
    if not probes:
        return []
    bound = RECORDED_ANSWERS.get(loaded.model.embed.weight.dtype, _LOOSELY)
    error = probe_distance(compute_probe_logits(loaded.model), ProbeLogits(**probes))
    words = f"probe logits differ from those that were recorded when the model was saved by {error:.1e} (relative), bound {bound:.0e}"
    return [(proven if error <= bound else refuted)("answers", words, error=str(error))]


@torch.no_grad()
def check_repeatable(model: Transformer, ids: Sequence[int]) -> Verdict:
    """Check that two passes over the same tokens give the same bits: nothing random, such as dropout, is left on."""
    tokens = torch.tensor([list(ids)], device=model.embed.weight.device)
    first, second = model.logits(model.hidden(tokens)), model.logits(model.hidden(tokens))
    if model.training or not torch.equal(first, second):
        apart = float((first - second).abs().max())
        return refuted("repeatable", f"the same {len(ids)} tokens gave other logits the second time (up to {apart:.3g} apart"
                       f"{', and the model is in training mode' if model.training else ''}): dropout is on", apart=apart)
    return proven("repeatable", f"two passes over the same {len(ids)} tokens give the same bits")


def check_text_start(loaded: LoadedModel, texts: Sequence[str]) -> Verdict:
    """Prompts and contexts begin as this tokenizer begins every text, once: a missing or doubled BOS halves scores in silence."""
    tokenizer = loaded.tokenizer
    for text in texts:
        due, context = tuple(tokenizer.encode(text, special=True)), encode_continuation(tokenizer, text, " and so on")[0]
        for where, found in (("a prompt", prompt_token_ids(tokenizer, text, raw=True)), ("a context", context)):
            if found != due:
                return refuted("beginning", f"{where} begins with ids {list(found[:3])}, the tokenizer begins it with {list(due[:3])}")
        bos, chat = loaded.artifact.stops.bos, prompt_token_ids(tokenizer, text, raw=False)
        if bos is not None and chat[:2] == (bos, bos):
            return refuted("beginning", f"a chat prompt begins with BOS {bos} twice: the template and the tokenizer each put one")
    return proven("beginning", f"{len(texts)} prompts begin as the tokenizer begins a text, and none begins twice")


def check_question_copies(task: Task) -> Verdict:
    """Examples that ask what others ask, and are answered as they are. Copies stand or fall together: an interval that counts each of
    them is narrower than the truth."""
    first, times = dict[str, str](), Counter[str]()
    for example in task.examples:
        question = _question(task, example)
        first.setdefault(question, example.id)
        times[question] += 1
    size, copies = len(task.examples), len(task.examples) - len(times)
    words, share = f"{copies:,} of {size:,} examples are exact copies of another", copies / max(1, size)
    if share < COPIES_SAID:
        return proven("copies", words, copies=copies)
    question, most = times.most_common(1)[0]
    shown = f"{words} ({share:.0%}), {first[question]} stands there {most:,} times"
    if share < COPIES_REFUSED:
        return unproven("copies", f"{shown}: the intervals count copies as if each were new; remove them", copies=copies, share=share)
    return refuted("copies", f"{shown}: the data repeats itself, and an interval over it is far too narrow; remove the copies",
                   copies=copies, share=share)


def _question(task: Task, example: TaskExample) -> str:
    """Question of an example: all by which it is asked and answered; what the task does not know of that may be in any column but the
    name."""
    if isinstance(task, PerplexityTask):
        return task.text(example)
    if isinstance(task, MultipleChoiceTask):
        return repr(task.choice(example))
    gold = task.gold(example)
    others = sorted((name, repr(value)) for name, value in example.row.items() if name not in ID_COLUMNS) if gold is None else gold
    return repr((task.prompt(example), others))


def check_leak(examples: Iterable[TaskExample], training: Iterable[str]) -> Verdict:
    """Whether the examples stand in the training text: whole, or in runs of 13 words."""
    with scratch_folder() as folder:
        held_out = ((example.id, row_text(example.row).encode()) for example in examples)
        found = measure_overlap((text.encode() for text in training), held_out, folder)
    if found.share > LEAKED:
        return refuted("leak", f"{found}: the model was trained on what it is tested on", **found.to_json())
    return proven("leak", str(found), **found.to_json())


def row_text(value: Any) -> str:
    """Every text in a row, in its order."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(row_text, parts)))

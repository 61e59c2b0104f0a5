"""Policy identity checks: the policies sampled from, trained and compared with are those that they are said to be.

Log-probabilities are given as one list a completion, of the sampled ids alone, at the temperature in use.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.errors import DataError
from assay.generate.policy_logprobs import policy_logits
from assay.guard.loss_preflight import naive_logits
from assay.learn.policy import token_logprobs
from assay.model.attention import PADDING
from assay.model.kv_cache import DecodeView, PrefillView, SlotCache
from assay.model.placement import fp32_uncompiled, uncompiled
from assay.model.transformer import Transformer
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

Ids = Sequence[int]
Logprobs = Sequence[Sequence[float]]

_ROWS, _COLUMNS = 4, 64  # of real rollouts, to measure the floor on: enough tokens for a mean, few enough to decode one by one
# Beyond the floor: the mean is over many more tokens than the floor's was, of other texts; a single completion may be one token long.
SLACK, ALONE = 3.0, 10.0
_SURE = 3.0  # standard errors of its mean that a floor is given: it may come from a handful of tokens
RARER = 2.0  # a reference finds what the policy says rarer than the policy does, and the floor grows with that
TINY = 2e-6  # nats: the last bits of an fp32 log-probability of a rare token
# What two honest paths may differ by where nothing is rounded but fp32's sums; in bf16 what bf16 itself does to them comes on top.
# Of SmolLM2 that is 0.02 nats a sampled token and 0.05 a token of a prompt, which is rarer; a rollout engine in bf16 that was right
# has been seen 0.015 from its trainer, one with lost weights 0.2 (trl PR 5313). More than COARSE is no rounding.
EXACT, COARSE = 1e-3, 0.1
MOST_LAST_BITS = 1e-4, EXACT  # of what fp32's sums alone explain, a token and of a single one: keys of old weights are off by 0.01


@dataclass(frozen=True)
class LogprobFloor:
    """How far apart, in nats a token, two honest computations of the same weights are on this machine."""

    mean: float
    most: float
    tokens: int
    rounding: float = 0.0  # of that, how far the compute dtype alone moves what training sees from what fp32 would
    spread: float = 0.0  # standard deviation of what single tokens are apart
    both: float = 0.0  # how far it moves what training sees and what sampling sees, added up: no honest two are farther apart by it

    @property
    def demanded(self) -> bool:
        """Whether exact agreement is demanded: the floor was measured on no token, since no two engines were compared; nothing but the last
        bits may differ, and no later measurement widens it."""
        return self.tokens == 0

    @property
    def likely_most(self) -> float:
        """The most that the mean may be, as far as so few tokens tell."""
        return self.mean + _SURE * self.spread / math.sqrt(max(1, self.tokens))

    @property
    def bound(self) -> float:
        """Bound on the mean difference. Two paths that each round to the compute dtype may be as far apart as rounding moves both of them,
        where it happened to round both alike on the few tokens that the floor was measured on."""
        return max(SLACK * self.likely_most, self.rounding, self.both) + TINY

    @property
    def bound_alone(self) -> float:
        """Bound for one completion."""
        return max(ALONE * self.likely_most, SLACK * max(self.most, self.rounding, self.both)) + TINY


def version_name(updates: int, fingerprint: str) -> str:
    """Name of a version of the sampler's weights: the number of updates and the fingerprint."""
    return f"{updates}@{fingerprint[:16]}"


@torch.no_grad()
def measure_logprob_floor(model: Transformer, sequences: Sequence[Ids], temperature: float, prompt: int = 1) -> LogprobFloor:
    """The same ids through the two paths that there are: all at once as in training, and as in sampling, the first `prompt` of them
    filled in and the others one by one over the cache. What is compared is what follows the prompt."""
    columns = min(prompt + _COLUMNS, *(len(ids) for ids in sequences))
    if columns <= prompt:
        raise DataError("the floor of policy identity is measured on sequences of at least 2 tokens; give whole prompts with completions")
    tokens = torch.tensor([list(ids[:columns]) for ids in sequences[:_ROWS]], device=model.embed.weight.device)
    batch = Batch(tokens, torch.zeros(tokens.shape, device=tokens.device))
    at_once = token_logprobs(model, batch, temperature)[0][:, prompt:]
    with fp32_uncompiled(model):
        exact = token_logprobs(model, batch, temperature)[0][:, prompt:]
    stepwise = _one_by_one(model, tokens, prompt, temperature)
    apart, rounding = (at_once - stepwise).abs(), float((at_once - exact).abs().mean())
    return LogprobFloor(float(apart.mean()), float(apart.max()), apart.numel(), rounding, float(apart.std(correction=0)),
                        rounding + float((stepwise - exact).abs().mean()))


@torch.no_grad()
def measure_last_bits(model: Transformer, sequences: Sequence[Ids], temperature: float, prompt: int) -> LogprobFloor:
    """Measure what the order of fp32's sums alone may do to the log-probability of any token, drawn or not, whatever the run computes in: a
    policy that has learned is sure of nearly all it draws, and the rare token that it draws next is farther off than those.

    Sequences of one length. What is demanded of an engine that shall be the trainer, so of no token.
    """
    tokens = torch.tensor([list(ids) for ids in sequences], device=model.embed.weight.device)
    with fp32_uncompiled(model):
        at_once_BTV = _logprobs(model, model.hidden(tokens)[:, prompt - 1:-1], temperature)
        apart_BT = (at_once_BTV - _decoded(model, tokens, prompt, temperature)).abs().amax(-1)
    return LogprobFloor(min(float(apart_BT.mean()), MOST_LAST_BITS[0]), min(float(apart_BT.max()), MOST_LAST_BITS[1]), 0)


def floor_anew(model: Transformer, prompts: Sequence[Ids], completions: Sequence[Ids], temperature: float, worst: int) -> LogprobFloor:
    """Measure the log-probability floor on the weights as they are now: as they grow, and what is said gets rarer, rounding grows. It is
    measured on the completion that is farthest off, the one numbered `worst`, and on the longest, as many as have tokens enough: a turn may
    be a few tokens long, and rounding affects the rare tokens most."""
    first = sorted(range(len(completions)), key=lambda place: (place == worst, len(completions[place])), reverse=True)
    longest = [(prompts[place], completions[place]) for place in first]
    tokens = np.cumsum([min(len(ids), _COLUMNS) for _, ids in longest])
    enough = max(_ROWS, int((tokens < _ROWS * _COLUMNS).sum()) + 1)
    with uncompiled():  # token by token, every length would be compiled anew
        found = [measure_logprob_floor(model, [(*prompt, *ids)], temperature, len(prompt)) for prompt, ids in longest[:enough]]
    share = np.array([floor.tokens for floor in found])
    mean, rounding, both = (float(np.average([getattr(floor, name) for floor in found], weights=share)) for name in
                            ("mean", "rounding", "both"))
    return LogprobFloor(mean, max(floor.most for floor in found), int(share.sum()), rounding, max(floor.spread for floor in found), both)


@dataclass
class OutgrownFloor:
    """The floor in force: the one that was measured last, or a wider one that was measured since, where the weights had outgrown it."""

    grown: LogprobFloor | None = None

    def over(self, measured: LogprobFloor) -> LogprobFloor:
        return measured if self.grown is None or measured.demanded else max(measured, self.grown, key=lambda floor: floor.bound)

    def measure(self, model: Transformer, prompts: Sequence[Ids], completions: Sequence[Ids], temperature: float,
                worst: int) -> LogprobFloor:
        found = floor_anew(model, prompts, completions, temperature, worst)
        if check_floor(found).outcome is Outcome.PROVEN:
            self.grown = found
        return found


def check_floor(floor: LogprobFloor) -> Verdict:
    """The floor is rounding, not a fault that every later comparison would forgive."""
    words = f"training and sampling differ by {floor.mean:.1e} nats a token (at most {floor.most:.1e}, {floor.tokens} tokens)"
    explained = EXACT + SLACK * floor.rounding
    if not floor.mean <= explained:
        return refuted("floor", f"{words}, rounding explains {explained:.0e}: decoding over the cache is another model",
                       mean=str(floor.mean), rounding=str(floor.rounding))
    if not floor.rounding <= COARSE:
        return refuted("floor", f"what training computes is {floor.rounding:.1e} nats a token from the same in fp32, rounding explains "
                       f"{COARSE:.0e}: it is another model, or its logits are too large for bf16", rounding=str(floor.rounding))
    return proven("floor", words, mean=floor.mean, most=floor.most, tokens=floor.tokens, rounding=floor.rounding)


def check_identity(sampler: Logprobs, trainer: Logprobs, floor: LogprobFloor, naive: Callable[[], Logprobs] | None = None,
                   suspects: Mapping[str, Callable[[], Logprobs]] | None = None,
                   anew: Callable[[int], LogprobFloor] | None = None) -> Verdict:
    """The sampler's log-probabilities are the trainer's, to the floor: on average, and in every single completion.

    Where they are not, the floor is measured `anew` on the weights as they are by now, given the number of the completion that is farthest
    off, if it is rounding still; then `naive` says which side is off, and each of `suspects` is tried as an explanation of the sampler's.
    """
    one, two = _arrays(sampler), _arrays(trainer)
    if [len(x) for x in one] != [len(x) for x in two] or not one:
        return refuted("identity", "sampler and trainer give log-probabilities of different numbers of tokens: other ids were trained on")
    apart = [np.abs(x - y) for x, y in zip(one, two, strict=True)]
    mean, alone = float(np.concatenate(apart).mean()), [float(x.mean()) for x in apart]
    worst = int(np.argmax([np.inf if np.isnan(x) else x for x in alone]))
    words = (f"sampler and trainer differ by {mean:.1e} nats a token, {alone[worst]:.1e} in completion {worst}; "
             f"the floor allows {floor.bound:.1e} and {floor.bound_alone:.1e}")
    if mean <= floor.bound and alone[worst] <= floor.bound_alone:
        return proven("identity", words, mean=mean, worst=alone[worst], floor=floor.mean, tokens=sum(map(len, one)))
    if anew is not None and not floor.demanded and (now := anew(worst)).bound > floor.bound and check_floor(now).outcome is Outcome.PROVEN:
        return check_identity(sampler, trainer, now, naive, suspects)
    blame = "" if naive is None else _blame(one, two, _arrays(naive()), floor)
    also = [name for name, logprobs in (suspects or {}).items() if _agree(one, _arrays(logprobs()), floor)]
    return refuted("identity", "; ".join([words, *([blame] if blame else []), *(f"the sampler's are those of {name}" for name in also)]),
                   mean=str(mean), worst=str(alone[worst]), floor=floor.mean)


@torch.no_grad()
def naive_logprobs(model: Transformer, prompts: Sequence[Ids], completions: Sequence[Ids], temperature: float) -> list[list[float]]:
    """The third opinion: one completion at a time, no padding, no cache, attention written out, whole logits in fp32."""
    found, device = [], model.embed.weight.device
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]], device=device)
        logits = naive_logits(model, Batch(ids, torch.zeros(ids.shape, device=device)))[0, len(prompt) - 1:-1]
        logprobs = (logits / temperature).log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, len(prompt):, None]).squeeze(-1).tolist())
    return found


def check_version(versions: Sequence[str], due: str) -> Verdict:
    """Every rollout was made by the trainer's own weights: the same count of updates, and the same fingerprint."""
    if not versions:
        return unproven("version", "no rollout was given")
    others = Counter(version for version in versions if version != due)
    if not others:
        return proven("version", f"{len(versions)} rollouts are of version {due}", version=due)
    found, count = others.most_common(1)[0]
    kind = "the same version by name, and other weights" if found.split("@")[0] == due.split("@")[0] else "stale, or another model"
    return refuted("version", f"{count} of {len(versions)} rollouts come from version {found!r}, the trainer is at {due!r}: {kind}",
                   found=found, due=due)


def check_on_policy(metrics: Mapping[str, float], floor: LogprobFloor, epsilon: float) -> Verdict:
    """Check that before the first inner update the ratio is 1 and nothing is clipped. `metrics` are the objective's at that step."""
    ratio, apart = metrics["sampling/importance_sampling_ratio/mean"], metrics["sampling/sampling_logp_difference/mean"]
    clipped = metrics["clip_ratio/region_mean"]
    words = f"on the first inner step the ratio is {ratio:.6f}, log-probabilities {apart:.1e} nats apart, {clipped:.2%} of tokens clipped"
    if not apart <= floor.bound or not abs(ratio - 1) <= 2 * floor.bound:
        return refuted("on_policy", f"{words}; the floor allows {floor.bound:.1e}: what is trained is not what was sampled",
                       ratio=str(ratio))
    if not clipped <= 0 and floor.bound_alone < epsilon:
        return refuted("on_policy", f"{words} where 0 is due: single tokens have another probability in training", clipped=clipped)
    return proven("on_policy", words, ratio=ratio, clipped=clipped)


def check_reference(kl: float, updates: int, floor: LogprobFloor, recorded: str, used: str) -> Verdict:
    """The reference is the one the run recorded; the policy starts on it, leaves it with its first update, and never takes it along."""
    words = f"KL to the reference is {kl:.2e} after {updates} updates since the fork"
    if used != recorded:
        return refuted("reference", f"the reference in memory is {used[:12]}, the run recorded {recorded[:12]}: it was replaced, "
                       "or it moves with the policy", used=used, recorded=recorded)
    if not np.isfinite(kl) or kl < 0:
        return refuted("reference", f"{words}; it must be a number and cannot be negative", kl=str(kl))
    if updates == 0 and kl > floor.bound_alone**2:  # k3 of a difference d is d² / 2
        return refuted("reference", f"{words}, rounding explains {floor.bound_alone**2:.1e}: the reference is not the fork", kl=kl)
    if updates > 0 and kl == 0:
        return refuted("reference", f"{words}, exactly: the reference is the policy itself", kl=kl)
    return proven("reference", words, kl=kl, digest=used)


def check_reference_again(first: Logprobs, again: Logprobs, floor: LogprobFloor) -> Verdict:
    """Check that the reference, asked twice about the same completions, answers the same, to the floor."""
    apart = [np.abs(one - two) for one, two in zip(_arrays(first), _arrays(again), strict=True)]
    mean, alone = float(np.concatenate(apart).mean()), max(float(each.mean()) for each in apart)
    bounds = RARER * floor.bound, RARER * floor.bound_alone
    words = (f"asked twice, the reference differs by {mean:.1e} nats a token, {alone:.1e} in one completion; the floor allows "
             f"{bounds[0]:.1e} and {bounds[1]:.1e}")
    if not (mean <= bounds[0] and alone <= bounds[1]):
        return refuted("reference_again", f"{words}: there is noise in what the policy is compared with", mean=str(mean))
    return proven("reference_again", words, mean=mean)


def check_sampled_ids(batch: Batch, prompts: Sequence[Ids], completions: Sequence[Ids], *, stop_ids: Collection[int], cap: int) -> Verdict:
    """The batch holds the sampled ids and nothing else, one document each; of a completion every token counts or none does.

    A completion shorter than the cap ends with a stop id, or it would never be learned how to end.
    """
    due = Counter((*prompt, *completion) for prompt, completion in zip(prompts, completions, strict=True))
    begins = {(*prompt, *completion): len(prompt) for prompt, completion in zip(prompts, completions, strict=True)}
    for number, completion in enumerate(completions):
        if len(completion) < cap and completion[-1] not in stop_ids:
            return refuted("ids", f"completion {number} has {len(completion)} of {cap} tokens and ends with id {completion[-1]}, "
                           "which stops nothing: its stop token was cut off", completion=number)
    for ids, weight in trained_documents(batch):
        if not due[ids]:
            return refuted("ids", f"a trained sequence of {len(ids)} ids was never sampled: texts were decoded and encoded again, or cut")
        due[ids] -= 1
        begin = begins[ids]
        if any(weight[:begin]) or len(set(weight[begin:])) != 1:
            counted = [sum(w != 0 for w in part) for part in (weight[:begin], weight[begin:])]
            return refuted("ids", f"in a sequence of {begin} prompt ids and {len(ids) - begin} sampled ones, {counted[0]} and {counted[1]} "
                           "count: expected none and all alike, the stop token too")
    if +due:
        return refuted("ids", f"{sum((+due).values())} of {len(prompts)} sampled sequences are not in the batch")
    return proven("ids", f"{len(prompts)} sequences are trained on as sampled, {sum(map(len, completions))} tokens", sequences=len(prompts))

# ----------------------------------------------------------------


def _one_by_one(model: Transformer, tokens_BT: torch.Tensor, prompt: int, temperature: float) -> torch.Tensor:
    return _decoded(model, tokens_BT, prompt, temperature).gather(-1, tokens_BT[:, prompt:, None]).squeeze(-1)


def _decoded(model: Transformer, tokens_BT: torch.Tensor, prompt: int, temperature: float) -> torch.Tensor:
    """(B, T - prompt, V): every token's log-probability at each place after the prompt, decoded over the cache."""
    (B, T), c, device = tokens_BT.shape, model.config, tokens_BT.device
    cache = SlotCache(c.depth, B, T, c.kv_heads, c.head_dim, dtype=model.compute_dtype or model.embed.weight.dtype, device=device)
    filling = PrefillView(cache, cache.places(torch.zeros_like(tokens_BT[:, :prompt]), torch.arange(B, device=device)))
    states = [model.hidden(tokens_BT[:, :prompt], cache=filling)[:, -1]]
    for column in range(prompt, T - 1):
        view = DecodeView(cache, torch.full((B,), column, device=device), column + 1)
        states.append(model.hidden(tokens_BT[:, column:column + 1], cache=view)[:, -1])
    return _logprobs(model, torch.stack(states, 1), temperature)


def _logprobs(model: Transformer, states_BTD: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_NV = policy_logits(model, states_BTD.flatten(0, 1))
    return (logits_NV / temperature).log_softmax(-1).view(*states_BTD.shape[:2], -1)


def _arrays(logprobs: Logprobs) -> list[NDArray[np.float64]]:
    return [np.asarray(row, dtype=np.float64) for row in logprobs]


def _distance(one: Sequence[NDArray[np.float64]], two: Sequence[NDArray[np.float64]]) -> float:
    return float(np.abs(np.concatenate(one) - np.concatenate(two)).mean())


def _agree(one: Sequence[NDArray[np.float64]], two: Sequence[NDArray[np.float64]], floor: LogprobFloor) -> bool:
    apart = [float(np.abs(x - y).mean()) for x, y in zip(one, two, strict=True)]
    return _distance(one, two) <= floor.bound and max(apart) <= floor.bound_alone


def _blame(sampler: Sequence[NDArray[np.float64]], trainer: Sequence[NDArray[np.float64]], naive: Sequence[NDArray[np.float64]],
           floor: LogprobFloor) -> str:
    off = [name for name, side in (("the sampler", sampler), ("the trainer", trainer)) if not _agree(side, naive, floor)]
    far = f"{_distance(sampler, naive):.1e} and {_distance(trainer, naive):.1e} from the same written out"
    return f"{' and '.join(off) or 'neither clearly'} {'are' if len(off) == 2 else 'is'} off ({far})"


def trained_documents(batch: Batch) -> list[tuple[tuple[int, ...], list[float]]]:
    """The ids and weights of each packed document."""
    return [(tuple(ids.tolist()), weight.tolist()) for ids, weight in document_arrays(batch)]


def document_arrays(batch: Batch) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Documents of a batch as `trained_documents` has them, as arrays in the order of the batch."""
    found = []
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    rows = (stream.cpu().numpy() for stream in (batch.tokens, batch.weight, documents))
    for ids, weight, document in zip(*rows, strict=True):
        cuts = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist(), len(ids)]
        found += [(ids[a:b], weight[a:b]) for a, b in pairwise(cuts) if document[a] != PADDING]
    return found

"""Training guards: update accounting of a model's tensors, and a watch that reads a loop's steps back and stops a bad run.

Nothing here waits for a GPU during a step: samples of each tensor are kept on its device and compared when a verdict is asked,
and what the steps say is read back in batches.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from assay.errors import GuardStop
from assay.generate.sampler_weights import tensor_checksums
from assay.guard import series_checks
from assay.learn import loop, low_bit_adamw
from assay.learn.loop import Step
from assay.learn.lr_schedule import Multiplier
from assay.learn.objectives import averages
from assay.model.lora import LoraSite
from assay.model.patch import Patch
from assay.model.transfers import read_numbers
from assay.store.safetensors_files import tensor_sha256
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

UNLIKELY_SPREAD, SAME_DRAWS = 7.0, 8  # standard errors of a standard deviation; values that no two draws share by chance
_SAMPLE = 2048  # elements of each tensor that are watched, spread evenly over it
LEARNING_SHARE = 0.1  # multiplier of the peak rate below which steps may be too small to be told from rounding
SURE_MOVES, LEAST_QUOTIENT = 30.0, 0.2  # moves that cannot all fail by chance; of an update to its rate, on average
STEP_ROOM = 8.0  # of a rate: what lies farther apart than that is never crossed by one update, nearest rounding loses all of them
KNOWN_STEPS, CODED_STEPS = 4, 0.02  # of a known matrix; how far its moments' levels may take it from AdamW's formula
CODED_BLOCKS, CODED_ERROR = 10, 0.01  # sizes of known moments, a decade apart; of the largest of a block, more than half a level
MOVED = 0.5  # share of a matrix's watched elements that an update must change: rounding may swallow a few, not most


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Collection[str]) -> Verdict:
    """The optimizer holds the model's own tensors that are to be trained, each once: not copies, not what they were before wrapping."""
    named = dict(model.named_parameters())
    if frozen := sorted(name for name in trained if name not in named or not named[name].requires_grad):
        return refuted("optimizer", f"{len(frozen)} tensor(s) that are to be trained are frozen or not in the model: {_some(frozen)}",
                       tensors=frozen)
    wanted = {id(named[name]): name for name in trained}
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    if lost := [name for key, name in wanted.items() if key not in held]:
        return refuted("optimizer", f"{len(lost)} trainable tensor(s) are not in the optimizer: {_some(lost)}; they will never move",
                       tensors=lost)
    if strange := len(held.keys() - wanted.keys()):
        return refuted("optimizer", f"the optimizer holds {strange} tensor(s) that are frozen or not the model's: it was built before "
                                    "the model was")
    if held.total() != len(held):
        return refuted("optimizer", "a tensor is in the optimizer twice and would be stepped twice")
    return proven("optimizer", f"all {len(wanted)} trainable tensors are in the optimizer, each once", tensors=len(wanted))


def check_gradients(gradients: Mapping[str, Tensor], trained: Collection[str]) -> Verdict:
    """Check after a backward pass that every tensor to be trained has a gradient that is finite and not all zero."""
    largest = read_numbers({name: torch.linalg.vector_norm(gradients[name], torch.inf) for name in trained if name in gradients})
    if without := [name for name in trained if not largest.get(name, 0.0)]:
        return refuted("gradients", f"{len(without)} of {len(trained)} trainable tensors got no gradient: {_some(without)}",
                       tensors=without)
    if bad := [name for name in trained if not math.isfinite(largest[name])]:
        return refuted("gradients", f"gradients that are not finite: {_some(bad)}", tensors=bad)
    return proven("gradients", f"all {len(trained)} trainable tensors have finite gradients", tensors=len(trained))


def check_adapted(planned: Sequence[LoraSite], patch: Patch) -> Verdict:
    """Every layer that was to be adapted carries an adapter, and no other does."""
    due = {(site.parameter, site.start, site.stop): site.foreign for site in planned}
    found = {(name, part.start, part.stop) for name, parts in patch.low_rank.items() for part in parts}
    if without := [name for rows, name in due.items() if rows not in found]:
        return refuted("adapted", f"{len(without)} of {len(due)} planned layers carry no adapter: {_some(without)}", layers=without)
    if more := len(found - due.keys()):
        return refuted("adapted", f"{more} layer(s) carry an adapter that was not planned")
    return proven("adapted", f"all {len(due)} planned layers carry an adapter, and no other does", layers=len(due))


class UpdateAccount:
    """Account of a model's updates from now on, or from the last `begin`. `check_moved` and `check_frozen` judge what happened since.

    `reachable` are the trainable tensors that the first step can move, where not all are: until the next `begin` only they are judged.
    `drawn`: what is in bf16 is rounded stochastically, so that a small step moves few weights, and some.
    """

    def __init__(self, model: nn.Module, reachable: Collection[str] | None = None, *, drawn: bool = False):
        self.model, self.drawn = model, drawn
        self.checksums = self._frozen_checksums()
        self.begin(reachable)

    def begin(self, reachable: Collection[str] | None = None) -> None:
        """Start a new account: earlier movement no longer counts, so that a tensor that stops moving is found next time."""
        self.before = {name: _watched(p).clone() for name, p in self.model.named_parameters()
                       if p.requires_grad and (reachable is None or name in reachable)}
        self._reach, self._fastest, self._learning = 0.0, 0.0, False

    def record_step(self, multiplier: float, rate: float) -> None:
        """A step was taken at this share of the peak rates, the lowest of which is now `rate`."""
        self._reach += rate
        self._fastest = max(self._fastest, rate)
        self._learning |= multiplier >= LEARNING_SHARE

    def check_moved(self) -> Verdict:
        """Embeddings move where their tokens occurred; every other matrix moves nearly everywhere, or rounding swallows updates."""
        share, matrices = self._moved_shares(), self._matrices()
        if self._learning is False and self._reach:
            share = {name: part for name, part in share.items() if self._reach > self._spacing(name)}
            if not share:
                return unproven("movement", "in warm-up: no step yet was large enough to be told from rounding", optional=True)
        if stuck := [name for name, part in share.items() if part == 0 and not self._by_chance(name)]:
            return refuted("movement", f"{len(stuck)} of {len(share)} trainable tensors did not move: {_some(stuck)}", tensors=stuck)
        if lost := [name for name in share if name in matrices and self._lost_in_rounding(name)]:
            return refuted("movement", f"in {len(lost)} tensors in bf16 no weight moved that only stochastic rounding can move: "
                                       f"{_some(lost)}; updates are lost in rounding: keep master weights in fp32", tensors=lost)
        if swallowed := [name for name, part in share.items()
                         if part < MOVED and name in matrices and not self._by_draws(name)]:
            worst = min(swallowed, key=lambda name: share[name])
            return refuted("movement", f"only {share[worst]:.1%} of {worst} moved ({len(swallowed)} tensors below {MOVED:.0%}): updates "
                                       "are smaller than the weights' rounding; keep master weights in fp32 or raise the learning rate",
                           share=share[worst])
        least = min(share.values())
        return proven("movement", f"all {len(share)} trainable tensors moved, the least in {least:.0%} of its elements", least=least)

    def _lost_in_rounding(self, name: str) -> bool:
        """Whether updates of a bf16 tensor were lost in rounding: of weights whose neighbours are farther away than any update, some must
        have moved by stochastic rounding."""
        before = self.before[name]
        if not self._by_draws(name):
            return False
        coarse = _apart(before) > STEP_ROOM * self._fastest
        now = _watched(dict(self.model.named_parameters())[name])
        return self._expected_moves(before[coarse]) >= SURE_MOVES and not bool((now != before)[coarse].any())

    def _by_chance(self, name: str) -> bool:
        """Whether a tensor in bf16 may have had too few and too small steps for one draw to move it; of an embedding nobody knows."""
        before = self.before[name]
        unseen = bool({"embed", "position"} & set(name.split(".")))
        return self._by_draws(name) and (unseen or self._expected_moves(before) < SURE_MOVES)

    def _by_draws(self, name: str) -> bool:
        return self.drawn and self.before[name].dtype == torch.bfloat16

    def _expected_moves(self, before: Tensor) -> float:
        return float((LEAST_QUOTIENT * self._reach / _apart(before).clamp(min=1e-30)).clamp(max=1).sum())

    def _spacing(self, name: str) -> float:
        """Spacing of the numbers around a tensor's typical value, in its dtype: a smaller step is rounded away."""
        before = self.before[name]
        return float(before.abs().float().median()) * torch.finfo(before.dtype).eps

    def check_frozen(self) -> Verdict:
        now = tensor_checksums({name: p for name, p in self.model.named_parameters() if name in self.checksums})
        strayed = [name for name, checksum in self.checksums.items() if now.get(name) != checksum]
        if strayed:
            return refuted("frozen", f"{len(strayed)} frozen tensor(s) changed: {_some(strayed)}", tensors=strayed)
        return proven("frozen", f"all {len(self.checksums)} frozen tensors have their old bits", tensors=len(self.checksums))

    def _frozen_checksums(self) -> dict[str, int]:
        """Exact sums over every bit and its place, made on the device: no gigabytes travel to be hashed at every save."""
        return tensor_checksums({name: p for name, p in self.model.named_parameters() if not p.requires_grad})

    def _moved_shares(self) -> dict[str, float]:
        parameters = dict(self.model.named_parameters())
        shares = [(_watched(parameters[name]) != before).float().mean() for name, before in self.before.items()]
        return dict(zip(self.before, torch.stack(shares).tolist(), strict=True))  # one wait for all of them

    def _matrices(self) -> set[str]:
        """Names of the matrices, but for embeddings, of which a step moves only the rows that its tokens used."""
        return {name for name, p in self.model.named_parameters() if p.dim() == 2 and not {"embed", "position"} & set(name.split("."))}


def check_coded_moments(optimizer: torch.optim.Optimizer) -> list[Verdict]:
    """Check 8-bit optimizer moments: known values of ten sizes, coded and read back where the optimizer keeps its own, are what they were
    as near as the codes' levels lie; with another block's scale they would be a decade off. And a known matrix moves as AdamW's formula
    says: moments that are not kept, or not read, would show from the second step on. Nothing for other optimizers."""
    if not isinstance(optimizer, low_bit_adamw.LowBitAdamW) or not optimizer.coded:
        return []
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    count = CODED_BLOCKS * low_bit_adamw.MOMENTS_A_SCALE - 3  # the last block is not full
    place = torch.arange(count, device=device)
    sizes = 10.0 ** -(place // low_bit_adamw.MOMENTS_A_SCALE).float()
    worst = 0.0
    for signed in (True, False):
        values = sizes * (place.float().cos() if signed else place.float().cos().abs())
        read = low_bit_adamw.decode_moments(*low_bit_adamw.encode_moments(values, signed), values.shape, signed)
        worst = max(worst, float(((read - values).abs() / sizes).max()))
    words = f"{2 * count:,} known moments of {CODED_BLOCKS} sizes come back from 8 bits within {worst:.2%} of the largest beside them"
    if not worst <= CODED_ERROR:
        return [refuted("moments", f"{words}, bound {CODED_ERROR:.0%}: codes are read with another scale or map than they were made with; "
                                   "train with --optim adamw", worst=worst)]
    apart = known_steps_apart(device)
    words = f"{words}; {KNOWN_STEPS} steps of a known matrix are {apart:.2%} from AdamW's formula"
    if not apart <= CODED_STEPS:
        return [refuted("moments", f"{words}, bound {CODED_STEPS:.0%}: moments are not kept as they were made, or another formula is used; "
                                   "train with --optim adamw", worst=worst, steps=str(apart))]
    return [proven("moments", words, worst=worst, steps=apart)]


def known_steps_apart(device: torch.device) -> float:
    """How far a known matrix is, after known gradients, from where AdamW's formula takes it in fp32; of how far it went."""
    place = torch.arange(low_bit_adamw.LEAST_CODED, device=device).float()
    start, rate, decay, (one, two) = place.cos().view(64, -1), 1e-2, 0.1, (0.9, 0.95)
    moved, due, first, second = torch.nn.Parameter(start.clone()), start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    optimizer = low_bit_adamw.adamw_8bit([("known.weight", moved)], rate, (one, two), decay)
    for step in range(1, KNOWN_STEPS + 1):
        moved.grad = (step * place).sin().view_as(start)
        optimizer.step()
        first, second = one * first + (1 - one) * moved.grad, two * second + (1 - two) * moved.grad.square()
        due = (1 - rate * decay) * due - rate * first / (1 - one**step) / ((second / (1 - two**step)).sqrt() + 1e-8)
    return float((moved.detach() - due).norm() / (due - start).norm())


def check_steps(optimizer: torch.optim.Optimizer, taken: int) -> Verdict:
    """Steps that the optimizer applied, by its own count, against steps that the loop took: a skipped update is not a step."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if not counts:
        return unproven("steps", "this optimizer does not count its steps")
    if counts != {taken}:
        return refuted("steps", f"the loop took {taken} steps, the optimizer applied {', '.join(map(str, sorted(counts)))}: updates are "
                                "skipped, or its state is another run's", applied=sorted(counts))
    return proven("steps", f"all {taken} steps were applied", taken=taken)


def check_weights(model: nn.Module) -> Verdict:
    """Every weight is a number: a loss can stay finite for a while after a weight that few tokens use is not."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    sums = torch.stack([torch.linalg.vector_norm(p.detach(), 1, dtype=torch.float32) for p in named.values()]).tolist()  # one wait for all
    if bad := [name for name, total in zip(named, sums, strict=True) if not math.isfinite(total)]:
        return refuted("weights", f"{len(bad)} tensor(s) hold values that are not finite: {_some(bad)}", tensors=bad)
    return proven("weights", f"all {len(named)} tensors are finite", tensors=len(named))


def parameter_digests(model: nn.Module) -> dict[str, str]:
    """Digests of the parameters that a rank holds, for `check_replicas`."""
    return {name: tensor_sha256(p) for name, p in model.named_parameters()}


def check_replicas(digests_by_rank: Sequence[Mapping[str, str]]) -> Verdict:
    """Ranks that should hold the same tensors do, bit for bit: a gradient that was not reduced parts them in silence."""
    if len(digests_by_rank) < 2:
        return unproven("replicas", f"{len(digests_by_rank)} rank: there is nothing to compare")
    first = digests_by_rank[0]
    for rank, digests in enumerate(digests_by_rank):
        if apart := sorted(name for name in first.keys() | digests.keys() if first.get(name) != digests.get(name)):
            return refuted("replicas", f"rank {rank} holds other values than rank 0 in {len(apart)} of {len(first)} tensors: "
                                       f"{_some(apart)}", rank=rank, tensors=apart)
    return proven("replicas", f"{len(digests_by_rank)} ranks hold the same {len(first)} tensors, bit for bit", tensors=len(first))


def _apart(values: Tensor) -> Tensor:
    """The distance of numbers in bf16 from their neighbours, or half of it."""
    return values.abs().float() * torch.finfo(torch.bfloat16).eps / 2


def _watched(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


KEPT = 128  # losses, and readings of the clock, that are looked at together
READ_EVERY = 16  # steps between readings: one wait for the GPU each, none in between


class StepReading(NamedTuple):
    step: Step
    loss: float
    grad_norm: float
    metrics: Mapping[str, float]  # averages over what counted


class StepWatch:
    """Feed it every step; `read` gives the values that have been read back since the last reading.

    `peaks` are the optimizer's peak rates, group by group, and `planned` the multiplier of all of them at a step. `consumed`
    judges what the steps say they have read. Where steps are not `steady`, as of rollouts, neither the series of their losses
    nor their times say anything, and each is read as it comes.
    """

    def __init__(self, peaks: Sequence[float], planned: Multiplier, *, vocab: int | None = None,
                 parent_loss: float | None = None, consumed: Callable[[Sequence[Step]], Verdict] | None = None,
                 steady: bool = True):
        self.peaks, self.planned, self.consumed, self.steady = list(peaks), planned, consumed, steady
        self.vocab, self.parent_loss = vocab, parent_loss
        self.waiting: list[tuple[Step, list[float]]] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []  # wall time a step, one mean a reading: between two of them a GPU's steps have no time of their own
        self.work: list[float] = []  # the same in seconds of this thread, which no other tenant of the machine stretches
        self.verdicts: list[Verdict] = []  # of the last reading
        self.change = series_checks.ChangePoint()
        self._clock = _Clock()

    def begin(self) -> None:
        """A step begins now: what happened since the last one was none of its time."""
        self._clock.begin()

    def feed(self, step: Step, rates: Sequence[float]) -> list[StepReading]:
        """Add a step, and return the values that were read back from the device: none, most of the time."""
        self._clock.stop()
        self.waiting.append((step, list(rates)))
        return self.read() if len(self.waiting) >= (READ_EVERY if self.steady else 1) else []

    def read(self) -> list[StepReading]:
        if not self.waiting:
            return []
        steps, rates = zip(*self.waiting, strict=True)
        values = torch.stack([torch.stack([step.loss, step.grad_norm.to(step.loss.dtype)]) for step in steps]).tolist()
        self._note_time(len(steps))
        self.waiting, first = [], not self.losses
        losses = [loss for loss, _ in values]
        self.losses = [*self.losses[-KEPT:], *losses]
        self.verdicts = [series_checks.check_finite([v for pair in values for v in pair], "loss or gradient norm"),
                         *self._learning_rates(rates, steps[0].index)]
        if self.steady:
            self.verdicts += [series_checks.check_constant_loss(self.losses), self._step_time(), self.change.feed(losses)]
        if self.consumed is not None:
            self.verdicts.append(self.consumed(steps))
        if first:
            self.verdicts += self._first_loss(steps[0], losses[0])
        stop_if_refuted(self.verdicts)
        return [StepReading(step, loss, norm, averages(step.metrics)) for step, (loss, norm) in zip(steps, values, strict=True)]

    def pace(self) -> float | None:
        """Seconds a step, as a rule; None before the first reading."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else None

    def _note_time(self, steps: int) -> None:
        self._clock.stop()  # after the wait for the GPU, which is the steps' time
        wall, work = self._clock.spent(steps)
        self.seconds, self.work = [*self.seconds[-KEPT:], wall], [*self.work[-KEPT:], work]

    def _step_time(self) -> Verdict:
        verdict = series_checks.check_step_time(self.work)
        return replace(verdict, reason=f"in readings of {READ_EVERY} steps: {verdict.reason}")

    def _learning_rates(self, rates: Sequence[Sequence[float]], start: int) -> list[Verdict]:
        if any(len(row) != len(self.peaks) for row in rates):
            return [refuted("learning_rate", f"the plan has {len(self.peaks)} groups of parameters, the optimizer {len(rates[0])}")]
        by_group = zip(self.peaks, zip(*rates, strict=True), strict=True)
        return [series_checks.check_learning_rate(observed, lambda step, peak=peak: peak * self.planned(step), start=start)  # type: ignore[misc]
                for peak, observed in by_group]

    def _first_loss(self, step: Step, loss: float) -> list[Verdict]:
        if self.parent_loss is not None:
            return [series_checks.check_inherited_loss(loss, self.parent_loss)]
        return [series_checks.check_initial_loss(loss, self.vocab)] if self.vocab is not None and step.index == 0 else []


class _Clock:
    """Wall time and this thread's own time over stretches that begin and stop."""

    def __init__(self) -> None:
        self._wall = self._work = 0.0
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic(), time.thread_time()

    def stop(self) -> None:
        wall, work = self._began
        self.begin()
        self._wall, self._work = self._wall + self._began[0] - wall, self._work + self._began[1] - work

    def spent(self, steps: int) -> tuple[float, float]:
        """A step's share of both, and from here they count anew."""
        shares = self._wall / steps, self._work / steps
        self._wall = self._work = 0.0
        return shares


def check_detectors() -> Verdict:
    """The alarms of the loop and of its log are alive: each finds a planted value that is not finite, and only that."""
    found = series_checks.check_detector(series_checks.check_finite)
    if found.outcome is Outcome.REFUTED:
        return found
    for loss, norm in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)):
        if not _alarmed(loss, norm):
            return refuted("self_test", f"a planted loss of {loss} with gradient norm {norm} went through: the loop would step on it")
    if _alarmed(1.0, 1.0):
        return refuted("self_test", "the loop's alarm refuses finite values, so that it means nothing")
    return proven("self_test", f"{found.reason}, and the loop refused to step on 4 more")


def _alarmed(loss: float, norm: float) -> bool:
    try:
        loop.Alarm(torch.device("cpu")).watch(0, torch.tensor(loss), torch.tensor(norm))
    except GuardStop:
        return True
    return False


def check_initial_weights(parameters: Mapping[str, Tensor], depth: int, wide: float = 0.02, *, divided: bool = True) -> Verdict:
    """Fresh matrices are draws of their own, as wide as documented: 0.02, what a layer adds to the stream less by √(2 · depth); of a given
    shape, as its family has it."""
    wrong, seen = [], dict[tuple[float, ...], str]()
    for name, tensor in parameters.items():
        if tensor.dim() != 2:
            continue
        adds = divided and name.endswith(("attn.out.weight", "mlp.down.weight"))
        due = 0.001 if name.endswith("attn.gate.weight") else wide / math.sqrt(2 * depth) if adds else wide
        values = tensor.detach().double().cpu().flatten()
        if abs(float(values.std()) / due - 1) > UNLIKELY_SPREAD / math.sqrt(2 * len(values)):
            wrong.append(f"{name} has a standard deviation of {float(values.std()):.3g}, due is {due:.3g}")
        first = tuple(round(float(value) / due, 3) for value in values[:SAME_DRAWS])
        if (twin := seen.setdefault(first, name)) != name:
            wrong.append(f"{name} begins with the draws of {twin}")
    if wrong:
        return refuted("initial weights", f"{len(wrong)} matrices are not fresh draws: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("initial weights", f"{len(seen)} matrices are draws of their own, of the spread that is documented")


def stop_if_refuted(verdicts: Sequence[Verdict]) -> None:
    against = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    if against:
        raise GuardStop("; ".join(f"{verdict.check}: {verdict.reason}" for verdict in against), against)

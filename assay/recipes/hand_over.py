"""Hand-over: the best checkpoint is exported, its bytes are read back, and they must score what was recorded."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from assay.errors import ArtifactError, AssayError, StoreError
from assay.evaluation.held_out_loss import HeldOut
from assay.guard.base_difference import state_base_difference
from assay.guard.conclusion_checks import check_best, check_improvement
from assay.guard.kept_artifacts import FileStamps, file_stamps
from assay.guard.proof import ProofRequest, hallmark_or_quarantine, prove, proven_bytes, takes_much
from assay.guard.proof_subject import DEFAULT_SAMPLING, Expectation, ProofSampling
from assay.learn.ema import ema_weights
from assay.model.placement import default_device, place_for_inference
from assay.model.transformer import ModelConfig, Transformer
from assay.outcome import RunOutcome
from assay.recipes.compute_dtype import asked_compute
from assay.recipes.evaluator import HeldOutEvaluator
from assay.recipes.options import Trained
from assay.recipes.run import Run, plain
from assay.recipes.starting_model import writes_merged
from assay.recipes.suite import read_suite, run_suite
from assay.recipes.witness_records import looks_verdicts, witness_verdict
from assay.store import checkpoint, durable
from assay.store.artifact import Artifact, Destination, build_model, locate_artifact, merged_tensors, open_artifact, straight_to
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint
from assay.store.export_artifact import export_artifact
from assay.store.ledger import Event
from assay.store.saving import Ancestor, Lineage, model_contents
from assay.strict_json import read_json_lines
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven, without_optional

ScoreHeldOut = Callable[[Transformer], HeldOut]
SAME_SCORE = 1e-4  # in the unit of the score, or of a score above 1 that share: what fp32 sums in another order may differ by
SAME_LOSS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # a document's loss, compiled or not, relative to the mean


class HandedOver(NamedTuple):
    """`recorded` is the score of the best checkpoint on all held-out text, which `RUN/model` must have too."""

    best: Path
    places: list[Path]
    recorded: HeldOut
    verdicts: list[Verdict]


def hand_over(run: Run, evaluator: HeldOutEvaluator, score_all: ScoreHeldOut, base: Destination | None = None) -> HandedOver:
    """`RUN/model` is the best checkpoint as a plain Hugging Face folder, proven; `score_all` scores it, and that is the run's score.

    Of an adapter, `RUN/adapter` is the adapter as a PEFT folder, and `RUN/model` the two merged, where that is wanted. Its `base` is read
    anew, and goes where the run's own lies: a second copy would find no room on a GPU that the run itself just fits on.
    """
    best = evaluator.best_checkpoint()
    assert best is not None, "a run ends with an evaluation"
    run.say(f"best: {best.name}; {evaluator.best_in_words()}")
    run.spent.phase("hand-over")
    to = straight_to(evaluator.device or default_device())
    opened = OpenedBases(base or to)
    with Exporting(run, best, opened) as exporting:  # and the checkpoint is scored, while the last proofs go on
        exporting.wait_for_large_proofs(evaluator.device)
        with run.spent.part("evaluation"):
            saved = open_artifact(best, to=to, opened=opened)
            verdicts = [check_evaluated(evaluator, best, saved), *check_last_evaluated(run, evaluator.latest_step),
                        *check_chosen(run, evaluator), *check_improved(evaluator)]
            scored = scored_set(saved)
            recorded, alike = rescore(scored, score_all, evaluator.device), (saved.digest, saved.config) if scored is saved else None
            del saved, scored  # room for what is exported
        places = exporting.begin_proofs()
        with run.spent.part("evaluation"):
            exported = check_exported(open_artifact(places[-1], to=to, opened=opened), recorded, alike, score_all, evaluator.device)
        verdicts += [*exporting.verdicts(), exported]
        void_if_refuted(run, places, verdicts)
    forgotten = check_forgetting(run, places[-1], evaluator.device)  # takes long, and may be interrupted
    void_if_refuted(run, places, forgotten)
    verdicts += [*forgotten, *send_to_remote(run, places)]
    return HandedOver(best, places, recorded, verdicts)


def check_forgetting(run: Run, place: Path, device: str | None) -> list[Verdict]:
    """Measure forgetting (--suite): compare the exported model, read from disk, with the starting model on the suite's tasks and probes."""
    config = run.config
    if not isinstance(config, Trained) or config.suite is None:
        return []
    with run.spent.part("evaluation"):
        parent, child = open_artifact(str(config.from_ or config.model)), open_artifact(place)
        try:
            verdict = run_suite(read_suite(config.suite), parent, child, run.folder / "suite" / child.digest[:12],
                                device=device or default_device(), say=run.say).verdict
        except AssayError as error:  # what was trained stands, whatever the suite's files say
            verdict = unproven("forgetting", f"--suite {config.suite} could not be asked: {error}")
    run.say(str(verdict))
    return [verdict]


class OpenedBases:
    """The base of adapters, opened once for all that a hand-over looks at while its files are the same; a large one takes seconds each
    time. Adapters and whole models are read anew from the disk. Any thread may ask."""

    def __init__(self, to: Destination | None) -> None:
        self.to, self._opening = to, threading.Lock()
        self._bases: dict[tuple[Path, str | None], tuple[FileStamps, Artifact]] = {}

    def __call__(self, path: Path, /, *, held: str | None = None) -> Artifact:
        with self._opening:
            stamps, key = file_stamps(path), (path, held)
            if self._bases.get(key, ((),))[0] != stamps:
                self._bases[key] = stamps, open_artifact(path, to=self.to, held=held)
            return self._bases[key][1]


def check_last_evaluated(run: Run, evaluated: int | None) -> list[Verdict]:
    """Check that the last step was evaluated: the best is chosen among all that was learned."""
    taken = max((row["step"] + 1 for row in read_json_lines(run.metrics_file) if "loss" in row), default=None)
    if taken is None:
        return []
    words = f"{taken} steps were taken, the last evaluation was after {evaluated}"
    return [(proven if taken == evaluated else refuted)("last evaluation", words)]


def check_chosen(run: Run, evaluator: HeldOutEvaluator) -> list[Verdict]:
    """Check the choice of the best checkpoint against the scores in metrics.jsonl."""
    printed = {row["step"] + 1: row["eval_loss"] for row in read_json_lines(run.metrics_file) if isinstance(row.get("eval_loss"), float)}
    known = {step: loss for step, loss in printed.items() if step in evaluator.history.steps and math.isfinite(loss)}
    return [check_best(evaluator.best_step(), known, run.unsaved)] if known else []


def check_improved(evaluator: HeldOutEvaluator) -> list[Verdict]:
    """Whether the exported model is better than the starting model, where that was scored; with a warning where it is not."""
    history, best = evaluator.history, evaluator.best_step()
    if not history.steps or history.steps[0] != 0 or history.steps[-1] == 0:
        return []
    verdict = check_improvement(best, history.score_at(0), history.score_at(best))
    if verdict.outcome is not Outcome.PROVEN:
        evaluator.run.say(f"{verdict}")
    return [verdict]


def void_if_refuted(run: Run, places: list[Path], verdicts: list[Verdict]) -> None:
    """Take the hallmark back where a verdict of the hand-over goes against an exported model, which was proven by itself."""
    against = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    for where in places if against else []:
        quarantine_checkpoint(open_checkpoint(where), against)
        run.say(f"{where} is quarantined: {'; '.join(verdict.reason for verdict in against)}")
        if run.remote is not None:  # where it may lie with its hallmark
            run.say(str(run.remote.send_model([where])))


def check_handed_over(places: Sequence[Path], verdicts: Sequence[Verdict]) -> Verdict:
    """Check, when all is done, that what was proven is still there: every file, with a hallmark where no verdict goes against it."""
    holds = overall(without_optional(verdicts)) is Outcome.PROVEN
    for where in places:
        try:
            checkpoint = open_checkpoint(where, verify=False)
        except AssayError as error:
            return refuted("handed over", f"the run ends, and what it hands over is not there: {error}")
        if holds and checkpoint.hallmark is None:
            return refuted("handed over", f"{where}: every verdict holds, and it has no hallmark, by which others know it as proven")
    names = [where.name for where in places]
    return proven("handed over", f"{', '.join(names)}: every file is there{' with its hallmark' if holds else ''}", places=names)


def send_to_remote(run: Run, places: list[Path]) -> list[Verdict]:
    """Send the exported model (--remote) and check that it is at the URL, hallmark or quarantine included."""
    if run.remote is None:
        return []
    verdict = run.remote.send_model(places)
    run.say(str(verdict))
    return [verdict]


def conclude_hand_over(run: Run, handed: HandedOver, judged: list[Verdict], budget: Verdict, **told: Any) -> RunOutcome:
    """Conclude the run: where a verdict of `judged` refutes the exported model its hallmark is taken back; then everything is written to
    the ledger.
    """
    void_if_refuted(run, handed.places, judged)
    handed.verdicts.extend([*judged, budget])
    write_down(run, handed, **told)
    return RunOutcome(run.folder, handed.verdicts, model=handed.places[-1], results={"held_out": handed.recorded.estimate, **told})


def write_down(run: Run, handed: HandedOver, **more: Any) -> None:
    """Write the hand-over to the ledger, with what `more` the recipe has to say of `RUN/model`; the last look is whether it is there."""
    recorded = handed.recorded
    handed.verdicts.append(check_handed_over(handed.places, handed.verdicts))
    run.log(Event.HAND_OVER, checkpoint=handed.best.name, unit=recorded.unit, score=asdict(recorded.estimate), **plain(more),
                      verdicts=plain([verdict.to_json() for verdict in handed.verdicts]))
    for where in handed.places:
        run.say(f"{where}: {recorded.estimate} {recorded.unit} on all held-out text")


def handed_places(run: Run, best: Path) -> list[Path]:
    """`RUN/model`; of an adapter `RUN/adapter`, and `RUN/model` after it where it is merged too."""
    if not locate_artifact(best).adapter:
        return [run.folder / "model"]
    merged = writes_merged(run.config, open_checkpoint(best, verify=False).facts["base"]["path"])
    return [run.folder / name for name in (("adapter", "model") if merged else ("adapter",))]


class Export(NamedTuple):
    """A place that is handed over: `expect` says how it relates to the checkpoint, and `bound` how far its answers may be off. An `old` one
    was written and proven in an earlier session."""

    where: Path
    expect: Expectation = "same"
    bound: float | None = None
    old: bool = False


class Exporting:
    """Exports of a checkpoint, made in a thread of their own: written at once, proven from `begin_proofs` on, and removed where the run
    ends before they are handed over."""

    def __init__(self, run: Run, best: Path, opened: OpenedBases):
        self.run, self.best, self.exports = run, best, list[Export]()
        self._thread = ThreadPoolExecutor(1, "export")
        self._writing = self._thread.submit(write_exports, run, best, opened, self.exports)
        self._proving: Future[list[Verdict]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            wait([self._writing])
            remove_exports(self.run, self.exports)
        self._thread.shutdown()

    def wait_for_large_proofs(self, device: str) -> None:
        """Wait for the last checkpoints' proofs where they would leave no room on a GPU for an evaluation beside them."""
        if device.startswith("cuda") and takes_much(proven_bytes(self.best), device):
            with self.run.spent.part("proving"):
                self.run.settle_proofs()

    def begin_proofs(self) -> list[Path]:
        """Wait for the last checkpoints' proofs and for what is being written; then begin to prove that, and return where it is."""
        with self.run.spent.part("proving"):
            self.run.settle_proofs()
            self._writing.result()
        self._proving = self._thread.submit(prove_exports, self.run, self.best, self.exports)
        return [export.where for export in self.exports]

    def verdicts(self) -> list[Verdict]:
        """Verdicts of the proofs that were begun, once they are over."""
        assert self._proving is not None
        with self.run.spent.part("proving"):
            return self._proving.result()


def write_exports(run: Run, best: Path, opened: OpenedBases, exports: list[Export]) -> None:
    """Write every place that is handed over, unless an earlier session did. Each is in `exports` once it is there: the next may fail."""
    for where in handed_places(run, best):
        if handed_over_before(best, where):
            exports.append(Export(where, old=True))
        else:
            run.set_aside(where)
            exports.append(write_export(best, where, "peft" if where.name == "adapter" else None, opened))


def prove_exports(run: Run, best: Path, exports: Sequence[Export]) -> list[Verdict]:
    """Prove what was written, each place in a fresh process, and give it its hallmark."""
    verdicts = list[Verdict]()
    witness = [witness_verdict(run.folder, run.config.witness), *looks_verdicts(run.folder)] if run.witnesses else []
    own = [check_own_proof(best)] if run.proves else []
    for export in exports:
        found = [check_weight_set(best, export.where)] if export.old else prove_export(best, export, run.probing)
        if not export.old:
            hallmark_or_quarantine(open_checkpoint(export.where), [*own, *found, *witness])
        verdicts += found
    return [*own, *verdicts, *state_base_difference(best), *witness]


def check_own_proof(best: Path) -> Verdict:
    """Check that the checkpoint that is exported was proven itself: its export is only shown to be the same."""
    checkpoint = open_checkpoint(best, verify=False)
    if (marked := checkpoint.quarantined) is not None:
        against = "; ".join(verdict["reason"] for verdict in marked["verdicts"] if verdict["outcome"] == Outcome.REFUTED)
        return refuted("checkpoint", f"{best.name}, of which this is made, is quarantined: {against}")
    if checkpoint.hallmark is None:
        return unproven("checkpoint", f"{best.name}, of which this is made, has no hallmark: its proof came to no end; the same command "
                                      "proves it again")
    return proven("checkpoint", f"{best.name}, of which this is made, has its hallmark")


def remove_exports(run: Run, exports: Sequence[Export]) -> None:
    """Remove what was written and not yet handed over: the run ends before it is proven, by an error that a disk's must not hide."""
    for export in exports:
        try:
            if not export.old:
                durable.remove_folder(export.where)
        except StoreError as error:
            run.say(f"{export.where} is not handed over, and could not be removed: {error}")


def handed_over_before(best: Path, where: Path) -> bool:
    """An earlier session wrote these very weights, and they were proven; a longer run may since have found better ones."""
    if not where.exists():
        return False
    try:
        return open_checkpoint(where).hallmark is not None and check_weight_set(best, where).outcome is Outcome.PROVEN
    except ArtifactError:
        return False


def scored_set(saved: Artifact) -> Artifact:
    """The weight set of a checkpoint that evaluations scored: its model, or the average in its optimizer's file."""
    assert saved.raw.checkpoint is not None
    if saved.raw.checkpoint.facts["scored_set"] != "ema":
        return saved
    return replace(saved, tensors=ema_weights(saved.raw.checkpoint.optimizer() or {}))


def prove_export(best: Path, export: Export, probing: ProofSampling = DEFAULT_SAMPLING) -> list[Verdict]:
    """Prove an export in a fresh process, against the checkpoint that it was made of."""
    verdicts = prove(ProofRequest(str(export.where), str(best), expect=export.expect, bound=export.bound, probing=probing))
    return verdicts if export.expect == "same" else [*verdicts, check_weight_set(best, export.where)]


def write_export(best: Path, where: Path, form: Literal["peft"] | None = None, opened: OpenedBases | None = None) -> Export:
    """Write the scored set as a Hugging Face folder: the checkpoint's model, or its average."""
    saved = open_artifact(best, opened=opened if form == "peft" else None)
    if saved.patch is not None:
        bound = export_artifact(saved, "peft", where) if form == "peft" else export_artifact(saved, "merged", where, "float32")
        return Export(where, bound=bound)
    if (chosen := scored_set(saved)) is saved:
        return Export(where, bound=export_artifact(saved, "hf", where))
    lineage = Lineage("moved", Ancestor(saved.digest, str(best)), weight_set="ema", scored_set="ema")
    checkpoint.write_checkpoint(where, model_contents(build_model(chosen), saved.tokenizer, saved.stops, lineage))
    return Export(where, "moved")


def check_weight_set(best: Path, where: Path) -> Verdict:
    """Check that the weights at `where` are, bit for bit, the set that was scored (raw or averaged), and not the other one."""
    due, found = (_as_stored(where, artifact) for artifact in (scored_set(open_artifact(best)), open_artifact(where)))
    assert due.keys() == found.keys(), "both were opened strictly, as the same architecture"
    wrong = sorted(name for name in due if not torch.equal(due[name], found[name]))
    words = f"{len(due) - len(wrong)} of {len(due)} tensors are those that were scored, bit for bit"
    if wrong:
        return refuted("weight set", f"{words}; {', '.join(wrong[:3])} are not", tensors=wrong)
    return proven("weight set", words, tensors=len(due))


def _as_stored(where: Path, artifact: Artifact) -> dict[str, Tensor]:
    """An adapter's own tensors where an adapter was written, the merged model's where a model was."""
    if artifact.patch is None:
        return artifact.tensors
    return artifact.raw.tensors if locate_artifact(where).adapter else merged_tensors(artifact, torch.float32)


def rescore(artifact: Artifact, score_all: ScoreHeldOut, device: str | None = None) -> HeldOut:
    """The score of the bytes on disk, not of any model in memory."""
    return score_all(build_model(artifact, None).to(device or default_device()))


def check_evaluated(evaluator: HeldOutEvaluator, best: Path, saved: Artifact | None = None) -> Verdict:
    """The bytes of the best checkpoint, `saved` as they were opened, score what was recorded of the live model: they are the weights that
    were scored."""
    saved = saved or open_artifact(best, to=straight_to(evaluator.device))
    model = place_for_inference(build_model(scored_set(saved), None), evaluator.device, compute=asked_compute(evaluator.run.config))
    found, recorded = evaluator.score(model).per_document, evaluator.best_losses()
    bound, scale = SAME_LOSS[model.compute_dtype or torch.float32], evaluator.scale or recorded.mean()
    error = float(abs(found - recorded).max() / scale)
    words = (f"{best.name} as saved and as scored then differ by {error:.1e} (relative, the worst of {len(found)} documents), "
             f"bound {bound:.0e}")
    if not error <= bound:
        return refuted("score", f"{words}: what was saved is not what was scored", error=str(error))
    return proven("score", words, error=error)


def check_exported(exported: Artifact, recorded: HeldOut, scored: tuple[str, ModelConfig] | None, score_all: ScoreHeldOut,
                   device: str | None) -> Verdict:
    """Check the score of the bytes that were exported. Where they are, tensor by tensor and under the same config, what was read from the
    best checkpoint and `scored`, they have its score; others, an adapter's merged ones or an average's, are scored too.
    """
    if (exported.digest, exported.config) != scored:
        return check_exported_score(recorded, rescore(exported, score_all, device))
    return proven("score", f"the exported weights and config are those of the checkpoint that scored {recorded.estimate} {recorded.unit}, "
                  "by digest", weights=exported.digest)


def check_exported_score(recorded: HeldOut, found: HeldOut) -> Verdict:
    difference = abs(recorded.estimate.mean - found.estimate.mean)
    words = f"exported bytes score {found.estimate} {found.unit}, recorded {recorded.estimate.mean:.6f}"
    same = difference <= SAME_SCORE * max(1.0, abs(recorded.estimate.mean))
    return (proven if same else refuted)("score", words, difference=difference)

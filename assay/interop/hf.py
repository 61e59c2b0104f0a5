"""Prove callback for transformers' Trainer and TRL: every checkpoint that training writes is proven.

    Trainer(…, callbacks=[Prove()])

Before the first step: every trainable tensor is in the optimizer. At every save: what moved and what did not is accounted for,
a fresh process opens the written folder and proves what can be proven of it, its answers are those of the live model, and
`assay-proof.json` in the folder holds the sha256 of every file and every verdict. What is refuted stops the training.

What has not had its chance is not held against a run: rates of 0 in a warm-up, steps that a loss scaler skipped, and tensors that get
no gradient while their partner is still 0 (LoRA's A in the first step). What Assay cannot open, a family or an adapter that it does
not know, is UNPROVEN: said, written beside the checkpoint, and training goes on.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from assay.errors import ArtifactError, AssayError
from assay.guard.proof import ProofRequest, prove
from assay.guard.series_checks import check_constant_loss, check_finite
from assay.guard.training_guards import UpdateAccount, check_optimizer, check_weights, stop_if_refuted
from assay.model.probe_logits import ProbeLogits, compute_probe_logits, probe_distance, probe_inputs
from assay.store import durable, sealed
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.digests import environment
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven, without_optional

PROOF = "assay-proof.json"
_LIMIT = 16 << 20
_SAME = {torch.float32: 2e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # relative distance of answers that rounding explains


class Prove(TrainerCallback):
    """`against` names what training started from, a folder or file; without it, whether anything was learned stays UNPROVEN.

    `base` names an adapter's base where the adapter does not. With `stop=False` what is refuted is said and written down only.
    """

    def __init__(self, against: str | None = None, *, base: str | None = None, stop: bool = True):
        self.against, self.base, self.stop = against, base, stop
        self.proofs: dict[str, list[Verdict]] = {}  # checkpoint → what was said of it
        self.losses: list[float] = []
        self.account: TrainerAccount | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        model, optimizer = given["model"], given.get("optimizer")
        self.account = TrainerAccount(model)
        if optimizer is not None:
            held = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            self._judge("before step 1", [check_optimizer(model, held, [n for n, p in model.named_parameters() if p.requires_grad])])

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Record the update after it was taken and before the schedule goes on: these are the rates that the step was taken at."""
        if self.account is not None and given.get("optimizer") is not None:
            self.account.record_update(given["optimizer"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None,
               **given: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self._judge("log", [check_finite([self.losses[-1]], "loss"), check_constant_loss(self.losses)])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        model, account = given["model"], self.account
        accounted = [] if account is None else [account.check_moved(), account.check_frozen()]
        verdicts = [*accounted, check_weights(model), *_supported(folder, model, self.against, self.base)]
        if account is not None and account.waiting and state.global_step < state.max_steps:
            verdicts = [_excused(verdict) for verdict in verdicts]
        write_proof(folder, verdicts)
        self._judge(folder.name, verdicts)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        for name, verdicts in self.proofs.items():
            print(f"assay: {name}: {overall(without_optional(verdicts))}", flush=True)

    def _judge(self, what: str, verdicts: list[Verdict]) -> None:
        if what.startswith("checkpoint-"):
            self.proofs[what] = verdicts
        against = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
        for verdict in (*against, *(verdict for verdict in verdicts if verdict.check == "support")):
            print(f"assay: {what}: {verdict}", flush=True)
        if self.stop:
            stop_if_refuted(against)


class TrainerAccount(UpdateAccount):
    """Update accounting that knows which updates of a trainer's could move what: `updates` counts those at a rate above 0."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.updates = 0
        self.peak: float | None = None
        zero = {name for name, watched in self.before.items() if not watched.any()}
        self.late = self.before.keys() - zero if zero else set()  # a factor has no gradient while the other one is 0

    def record_update(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.peak = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        rates = [float(group["lr"]) for group in groups]
        if max(rates) > 0 and not getattr(optimizer, "step_was_skipped", False):  # as a loss scaler does in its first steps
            self.updates += 1
            self.record_step(max(rates) / self.peak if self.peak else 1.0, min(rates))

    @property
    def waiting(self) -> bool:
        """Whether no update could have moved anything yet, and one will."""
        return self.updates == 0 and self.peak is not None and self.peak > 0

    def check_moved(self) -> Verdict:
        whole = self.before
        if self.updates == 1:
            self.before = {name: watched for name, watched in whole.items() if name not in self.late}
        try:
            return super().check_moved()
        finally:
            self.before = whole

    def _matrices(self) -> set[str]:
        """Tables of embeddings move where their tokens occurred, whatever they are called."""
        tables = {f"{name}.weight" for name, module in self.model.named_modules() if isinstance(module, nn.Embedding)}
        return {name for name in super()._matrices() - tables if "lora_embedding" not in name}


def _excused(verdict: Verdict) -> Verdict:
    """Weaken a refuted verdict to UNPROVEN before the first update that could move anything: until then, that nothing moved says
    nothing."""
    unmoved = verdict.check in ("movement", "lineage") or (verdict.check == "architecture" and "has no effect" in verdict.reason)
    if verdict.outcome is not Outcome.REFUTED or not unmoved:
        return verdict
    return replace(verdict, outcome=Outcome.UNPROVEN, reason=f"no update was taken at a rate above 0 yet; {verdict.reason}")


def _supported(folder: Path, model: nn.Module, against: str | None, base: str | None) -> list[Verdict]:
    """A checkpoint that Assay cannot open is no fault of the training."""
    try:
        return prove_folder(folder, model, against, base)
    except AssayError as error:
        return [unproven("support", f"Assay cannot open {folder.name}, so nothing is proven of it: {error}")]


def prove_folder(folder: Path, model: nn.Module, against: str | None = None, base: str | None = None) -> list[Verdict]:
    """Prove a folder in a fresh process, and check that its bytes answer as the live model does."""
    verdicts = prove(ProofRequest(str(folder), against=against, base=base))
    unopened = any(v.outcome is Outcome.REFUTED and v.check in ("whole", "architecture", "process") for v in verdicts)
    if unopened or any(v.check == "support" for v in verdicts):
        return verdicts
    return [*verdicts, check_live(model, open_artifact(folder, base=base))]


def check_live(model: nn.Module, saved: Artifact) -> Verdict:
    """The bytes in the folder say what the model in memory says, token for token."""
    dtype = next(model.parameters()).dtype
    bound = _SAME.get(dtype, 3e-2)
    error = probe_distance(compute_probe_logits(build_model(saved)), live_answer(model, saved))
    words = f"probe logits differ from the live model's by {error:.1e} (relative), bound {bound:.0e}"
    if not error <= bound:
        return refuted("live", f"{words}: what was saved is not what was trained", error=str(error))
    return proven("live", words, error=error)


@torch.no_grad()
def live_answer(model: nn.Module, saved: Artifact) -> ProbeLogits:
    """Probe logits through the model's own forward, in eval mode, which is left as it was found."""
    tokens, ids = probe_inputs(saved.config.vocab, saved.config.max_length)
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        logits = model(input_ids=tokens.to(device), use_cache=False).logits.float().cpu()
    finally:
        model.train(training)
    return ProbeLogits(logits[..., ids], logits.logsumexp(-1))


def write_proof(folder: Path, verdicts: list[Verdict]) -> None:
    document = {"format": "assay-proof/1", "files": {name: durable.hash_file(folder / name) for name in _files(folder)},
                "outcome": str(overall(without_optional(verdicts))), "environment": environment(),
                "verdicts": [{**v.to_json(), "evidence": {key: str(value) for key, value in v.evidence.items()}} for v in verdicts]}
    durable.replace_file(folder / PROOF, sealed.seal(document, where=str(folder / PROOF), indent=1))


def verify_proof(folder: Path) -> Verdict:
    """The folder is byte for byte what was proven when it was written."""
    try:
        record = sealed.unseal(durable.read_file(folder / PROOF, limit=_LIMIT), where=str(folder / PROOF), indent=1)
    except ArtifactError as error:
        return refuted("proof", str(error))
    now = {name: durable.hash_file(folder / name) for name in _files(folder)}
    changed = sorted(name for name in now.keys() | record["files"].keys() if now.get(name) != record["files"].get(name))
    if changed:
        return refuted("proof", f"{len(changed)} file(s) are not as they were proven: {', '.join(changed[:3])}", files=changed)
    words = f"{len(now)} files are as they were when they were examined"
    if record["outcome"] == str(Outcome.PROVEN):
        return proven("proof", words, files=len(now))
    open_points = [f"{v['check']}: {v['reason']}" for v in record["verdicts"] if v["outcome"] == record["outcome"]]
    said = refuted if record["outcome"] == str(Outcome.REFUTED) else unproven
    return said("proof", f"{words}, and {record['outcome']} then: {'; '.join(open_points[:3])}", files=len(now))


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            relative = str((Path(parent) / name).relative_to(folder))
            if relative != PROOF:
                yield relative



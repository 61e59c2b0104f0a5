"""Replay of one optimizer step: from the run's options, its data and the state before, what the state after must be.

A record is a folder that the run left: `record.json` (which step, the ids it read, its loss), `before.safetensors` and
`after.safetensors` (what is trained, and the optimizer's moments, on both sides of the step). Everything else comes from config.yaml,
the data files and the model's folder. The gradient is read off the first moments, which are linear in it: unlike Adam's update, it
does not turn the rounding of a tiny gradient into a step of full length.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.strict_json import parse_yaml
from assay.verdict import Outcome, Verdict, proven, refuted, unproven
from assay.witness.due_base import asked_base_dtype, due_base
from assay.witness.due_evaluation import decoded
from assay.witness.due_gradient import (
    Adapter,
    CostOfTokens,
    DueGradient,
    TwinModel,
    blended,
    cross_entropy,
    due_gradient,
    live_weights,
    read_safetensors,
)
from assay.witness.due_pairs import PAIRED, PairPlan, pair_costs, reward_costs, side_texts
from assay.witness.due_rewards import wrong_rewards
from assay.witness.due_rollout import DueRollout, PromptPlan, due_rollout, fork_weights, policy_costs, wrong_prompts
from assay.witness.due_rows import DueText, MixedPlan, MixedWindows, PackedPlan, WindowPlan
from assay.witness.due_texts import NotWitnessed, Renderer, named_sources, read_fields, texts_to_learn
from assay.witness.due_update import (
    BETAS,
    MOMENTUM,
    PRETRAINING,
    TUNING,
    Budgeted,
    adamw_weight,
    clipped,
    decays,
    muon_weight,
    orthogonal,
    rate_share,
)

WITNESS_FOLDER, RECORD, BEFORE, AFTER, SAID = "witness", "record.json", "before.safetensors", "after.safetensors", "verdict.json"
LEAST_ERROR, OWN_ERRORS = {"float32": 1e-4, "bfloat16": 2e-2}, {"float32": 30.0, "bfloat16": 10.0}  # of a gradient; times our own rounding
UPDATE_ERROR, MUON_ERROR = 1e-4, 1e-2  # of a weight's step; of a matrix's
LOSS_ERROR = {"float32": 1e-4, "bfloat16": 2e-2}
ULP = 2.0**-23
_NAMED = 3  # tensors, rows or ids that a sentence names


class KeptStep:
    """A record, opened on the device where it is replayed."""

    def __init__(self, folder: Path, device: str = "cpu"):
        self.folder, self.run, self.device = folder, folder.parent.parent, device
        self.facts: dict[str, Any] = json.loads((folder / RECORD).read_text())
        self.options: dict[str, Any] = parse_yaml((self.run / "config.yaml").read_bytes(), where=str(self.run / "config.yaml"))
        self.options |= self.facts.get("local", {})  # what was named by a URL lies here
        self.recipe, self.step = self.facts["recipe"], self.facts["step"]
        self.before, self.after = (read_safetensors(folder, name, device) for name in (BEFORE, AFTER))

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("weights/"): tensor for name, tensor in tensors.items() if name.startswith("weights/")}

    def moment(self, tensors: Mapping[str, Tensor], name: str, key: str) -> Tensor:
        return tensors[f"state/{name}/{key}"].double()

    @property
    def taken(self) -> int:
        """Steps that the moments have seen, this one among them."""
        return self.step + 1 + self.facts["steps_before"]

    @property
    def compute(self) -> str:
        """The dtype of the forward pass: bf16 on a GPU, fp32 elsewhere, or as asked for. Weights and moments are fp32 everywhere."""
        asked = self.options.get("dtype") or ("bf16" if self.facts["device"].startswith("cuda") else "fp32")
        if asked == "fp16":
            raise NotWitnessed("--dtype fp16: the rounding of a gradient at a loss scale is not made again here")
        return {"bf16": "bfloat16", "fp32": "float32"}[asked]

    @property
    def exact(self) -> torch.dtype:
        """The dtype of the gradient that was due: on a GPU fp32, which is to the run's bf16 what double precision is to fp32."""
        return torch.float64 if self.device == "cpu" or self.compute == "float32" else torch.float32

    @property
    def folder_of_model(self) -> Path:
        return Path(self.facts["base"] or self.facts["parent"])

    @cached_property
    def rollout(self) -> DueRollout:
        return due_rollout(self.facts["rollout"], self.options)

    @cached_property
    def prompts(self) -> PromptPlan:
        fields = read_fields(self.folder_of_model / "config.json")
        return PromptPlan(self.tokenizer_folder, self.options, fields.get("max_position_embeddings") or fields["n_positions"])

    @cached_property
    def pairs(self) -> PairPlan:
        return PairPlan(self.tokenizer_folder, self.options, self.recipe)

    @property
    def divisor(self) -> float | None:
        """Divisor of the sum over the step, where that is not its learned tokens."""
        if self.recipe in PAIRED:
            return float(sum(map(len, self.pairs.due(self.step))))
        return self.rollout.divisor if self.recipe == "Grpo" else None

    @property
    def tokenizer_folder(self) -> Path:
        """An adapter's own, where it has one."""
        own = Path(self.facts["parent"])
        return own if (own / "tokenizer.json").is_file() else self.folder_of_model


def replay_step(folder: Path, device: str = "cpu") -> Verdict:
    """Replay one kept step as the witness, and judge it; a setting that it does not know is UNPROVEN."""
    try:
        kept = KeptStep(folder, device)
        return judge_step(kept, *due_texts(kept))
    except NotWitnessed as why:
        return unproven("witness", f"{folder.name} was not replayed: {why}", optional=True)


def replay_steps(folders: Sequence[Path], device: str = "cpu") -> Verdict:
    """Replay several kept steps; each verdict is left beside its record, whose tensors go where nothing is against them."""
    said = []
    for folder in folders:
        began = time.monotonic()
        found = replay_step(folder, device)
        said.append(settle_record(folder, replace(found, evidence=found.evidence | {"seconds": round(time.monotonic() - began, 3)})))
    return summary(said)


def settle_record(folder: Path, said: Verdict) -> Verdict:
    (folder / SAID).write_text(json.dumps(said.to_json(), default=str))
    if said.outcome is not Outcome.REFUTED:
        for name in (BEFORE, AFTER):
            (folder / name).unlink(missing_ok=True)
    return said


def summary(said: Sequence[Verdict]) -> Verdict:
    """Many verdicts as one: against, where one is; PROVEN where one proves, with what was not replayed."""
    against, good = ([each for each in said if each.outcome is outcome] for outcome in (Outcome.REFUTED, Outcome.PROVEN))
    if against:
        return refuted("witness", "; ".join(each.reason for each in against), steps=[each.evidence.get("step") for each in against])
    missed = [each.reason for each in said if each not in good]
    if not good:
        return unproven("witness", "; ".join(missed[:_NAMED]) or "no step was kept to be replayed", optional=True)
    worst = max(good, key=lambda each: each.evidence["share_of_bound"])
    steps = [each.evidence["step"] for each in good]
    return proven("witness", f"{len(good)} kept step(s), {shown(steps)}, replayed from options and files alone: {worst.reason}"
                  + (f"; {len(missed)} not replayed: {missed[0]}" if missed else ""), steps=steps, worst=worst.evidence)

# ---------------------------------------------------------------- what was due


def due_texts(kept: KeptStep) -> tuple[list[list[DueText]], int | None]:
    """The rows of the step, and how many steps the run takes where options and data say."""
    options = kept.options
    if kept.recipe == "Pretrain":
        corpus: MixedWindows | WindowPlan
        corpus = mixed_windows(options) if options.get("mix") else WindowPlan(Path(options["corpus"]), options)
        steps = None if options["tokens"] is None else max(1, math.ceil(options["tokens"] / (corpus.rows * options["max_length"])))
        return corpus.due(kept.step), steps
    if kept.recipe == "Grpo":
        if options.get("environment") and not options["max_steps"] and options["minutes"] is None:
            raise NotWitnessed("--environment without --max-steps: how many tasks there were is not kept")
        steps = None if options["minutes"] is not None else options["max_steps"] or kept.prompts.steps
        return [[text] for text in kept.rollout.texts], steps
    if kept.recipe in PAIRED:
        steps = None if options["minutes"] is not None else options["max_steps"] or kept.pairs.steps
        return [side_texts(row) for row in kept.pairs.due(kept.step)], steps
    if kept.recipe not in ("Sft", "Distill"):
        raise NotWitnessed(f"the witness does not know {kept.recipe.lower()}")
    if options.get("on_policy"):
        raise NotWitnessed("--on-policy: what the student said at a step is not kept")
    if options.get("how") == "text":
        options = options | {"data": [str(kept.run / "teacher.jsonl")], "held_out_data": str(kept.run / "teacher-held-out.jsonl"),
                             "limit": None}
    texts, sources = texts_to_learn(kept.tokenizer_folder, options), named_sources(options)
    packed: PackedPlan | MixedPlan = PackedPlan(texts, options) if sources[0][1] is None else MixedPlan(texts, sources, options)
    return packed.due(kept.step), None if options["minutes"] is not None else options["max_steps"] or packed.steps


def mixed_windows(options: Mapping[str, Any]) -> MixedWindows:
    """--corpus and what --mix adds to it, each FOLDER:SHARE."""
    added = [entry.rpartition(":") for entry in options["mix"]]
    copies = options.get("copies", {})
    return MixedWindows([(Path(options["corpus"]), Fraction(0)), *((Path(copies.get(folder, folder)), Fraction(share))
                                                                   for folder, _, share in added)], dict(options))


def asked_adapter(kept: KeptStep) -> Adapter | None:
    """Alpha over r, or over its root, and the layers, from the options; of an adapter that is trained on, from its own file."""
    options = kept.options
    if kept.recipe == "Pretrain":
        return None
    earlier = read_fields(Path(kept.facts["parent"]) / "adapter_config.json")
    odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform") if earlier.get(name)]
    if odd or earlier.get("bias", "none") != "none" or isinstance(earlier.get("target_modules"), str):
        raise NotWitnessed(f"{kept.facts['parent']} is an adapter of a kind that is not replayed ({shown(odd)})")
    rank, alpha = (earlier["r"], earlier["lora_alpha"]) if earlier else (options["lora_r"], options["lora_alpha"] or 2 * options["lora_r"])
    if not rank:
        return None
    root = earlier["use_rslora"] if earlier else options["use_rslora"]
    targets = earlier.get("target_modules") or options["lora_target_modules"] or (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn", "c_proj", "c_fc")
    return Adapter(rank, alpha / (math.sqrt(rank) if root else rank), tuple(targets))


def model_shape(kept: KeptStep) -> dict[str, Any] | Path:
    """The model's folder; of a model from scratch, the config that --depth comes to."""
    if kept.recipe != "Pretrain":
        return kept.folder_of_model
    options = kept.options
    if options["shape"] == "assay":
        raise NotWitnessed("transformers has no model of --shape assay")
    if options["shape"] != "qwen3":
        given = Path(options["shape"])
        return read_fields(given / "config.json" if given.is_dir() else given)
    width = 64 * options["depth"]
    vocab = len(kept.weights(kept.before)["embed.weight"])
    return {"model_type": "qwen3", "vocab_size": vocab, "hidden_size": width, "intermediate_size": math.ceil(width * 8 / 3 / 64) * 64,
            "num_hidden_layers": options["depth"], "num_attention_heads": options["depth"], "num_key_value_heads": options["depth"],
            "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": max(options["max_length"], 64), "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": True, "attention_bias": False}


def base_weights(kept: KeptStep, twin: TwinModel) -> dict[str, Tensor]:
    """Weights of the model's folder, in the dtype that an adapter's base is held in."""
    dtype = asked_base_dtype(kept.options, Path(kept.facts["parent"]))
    held = due_base(read_safetensors(kept.folder_of_model), dtype, transposed=twin.gpt2)
    return {name: tensor.to(kept.device) for name, tensor in held.items()}


def forked_from(kept: KeptStep, twin: TwinModel, adapter: Adapter | None) -> dict[str, Tensor]:
    """Weights that the run began with, by the parent's bytes."""
    earlier = Path(kept.facts["parent"]) / "adapter_model.safetensors"
    factors = read_safetensors(earlier.parent, earlier.name) if earlier.is_file() else {}
    return fork_weights(twin, base_weights(kept, twin), factors, adapter)


def due_costs(kept: KeptStep, twin: TwinModel, adapter: Adapter | None) -> CostOfTokens:
    """Loss of predicting a token: its cross-entropy, the teacher's divergence, or the reward of its completion."""
    options = kept.options
    if kept.recipe in PAIRED:
        trained = {name: tensor.to(twin.device, twin.dtype) for name, tensor in kept.weights(kept.before).items()}
        policy = live_weights(twin, trained, {} if adapter is None else base_weights(kept, twin), adapter)
        due = [pair for row in kept.pairs.due(kept.step) for pair in row]
        if kept.recipe == "RewardModel":
            return reward_costs(twin, policy, due, options, kept.pairs.reward_token)
        return pair_costs(twin, policy, forked_from(kept, twin, adapter), due, options, kept.recipe)
    if kept.recipe == "Grpo":
        return policy_costs(kept.rollout, options, kept.step, twin, forked_from(kept, twin, adapter))
    if options.get("how", "text") == "text":
        return cross_entropy
    if "=" in options["teacher"]:
        raise NotWitnessed("several teachers are not asked again here")
    if options["how"] == "stored":
        raise NotWitnessed("--how stored: the teacher's stored logits are not made again here")
    folder = Path(options["teacher"])
    teacher = TwinModel(folder, twin.dtype, twin.device, twin.loss)
    same = teacher.model.config.vocab_size == twin.model.config.vocab_size
    vocab = None if same else max(Renderer(kept.tokenizer_folder, options).vocabulary.get_vocab(True).values()) + 1
    return blended(teacher, read_safetensors(folder), options, vocab)

# ---------------------------------------------------------------- what was found


def judge_step(kept: KeptStep, rows: list[list[DueText]], steps: int | None) -> Verdict:
    """Judge a replayed step: every difference in words; the first of them is usually the cause of the others."""
    if kept.options.get("master_dtype", "fp32") != "fp32":
        raise NotWitnessed("--master-dtype bf16: the draws of stochastic rounding are not made again here")
    if (optim := kept.options.get("optim", "adamw")) != "adamw":
        raise NotWitnessed(f"--optim {optim}: moments in 8 bits do not hold the gradient that a step took")
    shape, adapter = model_shape(kept), asked_adapter(kept)
    exact, rounded = TwinModel(shape, kept.exact, kept.device), TwinModel(shape, getattr(torch, kept.compute), kept.device, torch.float32)
    frozen = {} if adapter is None else base_weights(kept, exact)
    trained, texts = kept.weights(kept.before), [text for row in rows for text in row]
    against = [*wrong_rows(kept, rows), *wrong_tensors(kept, exact, trained, adapter), *wrong_beginning(kept, exact, adapter)]
    if any("tensors" in each for each in against):
        return refuted("witness", f"step {kept.step + 1}: {'; '.join(against)}", step=kept.step + 1)
    if kept.recipe in ("Grpo", *PAIRED) and kept.compute != "float32":
        return without_gradient(kept, against, steps, adapter)
    due, ours = (due_gradient(twin, trained, frozen, adapter, texts, due_costs(kept, twin, adapter), kept.divisor)
                 for twin in (exact, rounded))
    against += wrong_loss(kept, due)
    scaled, norm = clipped(due.gradients, kept.options["max_grad_norm"])
    found = found_gradients(kept)
    share, worst = gradient_errors(kept, due, ours, scaled, found, norm)
    if share > 1:
        against.append(worst)
    against += [*still_rows(due, found), *wrong_seconds(kept, found), *wrong_weights(kept, found, steps, adapter)]
    if against:
        return refuted("witness", f"step {kept.step + 1}: {'; '.join(against)}", step=kept.step + 1)
    return proven("witness", f"step {kept.step + 1} read the {len(texts)} texts that were due, and {worst}; its {len(trained)} tensors "
                             "moved as the optimizer's formula says", step=kept.step + 1, share_of_bound=share, loss=due.loss, norm=norm)


def without_gradient(kept: KeptStep, against: list[str], steps: int | None, adapter: Adapter | None) -> Verdict:
    """A policy's gradient is a sum of terms that cancel, of which bf16 may leave its rounding alone: all but that is judged."""
    found = found_gradients(kept)
    against = [*against, *wrong_seconds(kept, found), *wrong_weights(kept, found, steps, adapter)]
    if against:
        return refuted("witness", f"step {kept.step + 1}: {'; '.join(against)}", step=kept.step + 1)
    raise NotWitnessed("what it read, its moments and weights are those that were due, and a policy's gradient in bf16 is not judged")


def wrong_rows(kept: KeptStep, rows: list[list[DueText]]) -> list[str]:
    if kept.recipe == "Grpo":
        groups = kept.facts["rollout"]
        learned = Counter(name for row in kept.facts["ids"] for name in row)
        if learned != Counter(group["prompt"] for group in groups for said in group["completions"] for _ in said.get("sequences", [said])):
            return ["the step learned from other completions than those that were kept of its rollout"]
        if kept.options.get("environment"):
            return []
        if against := wrong_prompts(kept.prompts, kept.step, groups):
            return against
        vocabulary = kept.prompts.renderer.vocabulary
        said = [[decoded(vocabulary, completion["ids"]) for completion in group["completions"]] for group in groups]
        return wrong_rewards(groups, said, kept.options)
    read, due = [[str(name) for name in row] for row in kept.facts["ids"]], [list(dict.fromkeys(text.name for text in row)) for row in rows]
    wrong = [number for number, (one, other) in enumerate(zip(read, due, strict=False)) if one != other]
    if len(read) != len(due):
        return [f"{len(read)} rows were read, {len(due)} were due"]
    return [f"{len(wrong)} of {len(due)} rows are not those that were due: row {wrong[0]} read {shown(read[wrong[0]])}, due was "
            f"{shown(due[wrong[0]])}"] if wrong else []


def wrong_tensors(kept: KeptStep, twin: TwinModel, trained: Mapping[str, Tensor], adapter: Adapter | None) -> list[str]:
    """Difference between the trained tensors and those that the options ask for: every tensor of the model, or both factors of every
    adapted layer."""
    if adapter is None:
        due, found = set(twin.shapes), {each for name in trained for each in twin.foreign(name)}
    else:
        stems = dict.fromkeys(name.rsplit(".", 2)[0] for name in trained)
        due, found = twin.adaptable(adapter), set()
        for stem in stems:
            layers = twin.adapted(f"{stem}.weight", adapter)
            held = [number for number in range(len(layers)) if f"{stem}.lefts.{number}" in trained and f"{stem}.rights.{number}" in trained]
            found |= {layers[number] for number in held}
            if len(held) != len(layers) or f"{stem}.lefts.{len(layers)}" in trained:
                return [f"{stem} does not carry the adapters that the options ask for: other tensors are trained"]
    idle = [name for name in trained if not any(key.startswith(f"state/{name}/") for key in kept.before)]
    if idle:
        return [f"the optimizer does not hold {len(idle)} tensors that are to be trained ({shown(idle)})"]
    missing, extra = sorted(due - found), sorted(found - due)
    return [f"the tensors that are trained are not those that were due: {len(missing)} missing ({shown(missing)}), {len(extra)} too many "
            f"({shown(extra)})"] if missing or extra else []


def wrong_beginning(kept: KeptStep, twin: TwinModel, adapter: Adapter | None) -> list[str]:
    """Step 1 begins with the parent's weights and moments of 0; the first after a resume with what the checkpoint holds."""
    trained, checkpoint = kept.weights(kept.before), kept.run / "checkpoints" / f"step-{kept.step:06d}"
    if kept.step == 0 and kept.options.get("optimizer_state") != "carried":
        moved = [name for name, tensor in kept.before.items() if name.startswith("state/") and tensor.any()]
        if moved:
            return [f"{len(moved)} of the optimizer's moments are not 0 before step 1 ({shown(moved)})"]
    if adapter is not None or not kept.facts["first"]:
        return []
    source = checkpoint if kept.step and (checkpoint / "model.safetensors").is_file() else None
    if not kept.step and kept.recipe != "Pretrain" and (kept.folder_of_model / "config.json").is_file():
        source = kept.folder_of_model
    if source is None:
        return []
    saved = read_safetensors(source, device=kept.device)
    wrong = [name for name, tensor in trained.items() for each, view in twin.views(name, tensor).items()
             if each in saved and not torch.equal(saved[each].to(view.dtype), view)]
    return [f"{len(wrong)} weights before the step are not those of {source} ({shown(wrong)})"] if wrong else []


def wrong_loss(kept: KeptStep, due: DueGradient) -> list[str]:
    against, loss = [], kept.facts["loss"]
    if not math.isclose(kept.facts["weight"], due.weight, rel_tol=1e-5):
        against.append(f"{kept.facts['weight']:g} tokens were learned from, {due.weight:g} were due")
    if not abs(loss - due.loss) <= LOSS_ERROR[kept.compute] * max(1.0, abs(due.loss)):
        against.append(f"its loss was {loss:.6f}, due was {due.loss:.6f}")
    return against

# ---------------------------------------------------------------- gradients, moments, weights


def first_moment(kept: KeptStep, name: str) -> tuple[str, float]:
    """Key of a tensor's first moment, and how much of the old one stays."""
    return ("momentum", MOMENTUM) if f"state/{name}/momentum" in kept.before else ("exp_avg", BETAS[0])


def found_gradients(kept: KeptStep) -> dict[str, Tensor]:
    """Gradient that the first moments took in, which is the gradient after clipping."""
    found = {}
    for name in kept.weights(kept.before):
        key, stays = first_moment(kept, name)
        found[name] = (kept.moment(kept.after, name, key) - stays * kept.moment(kept.before, name, key)) / (1 - stays)
    return found


def gradient_errors(kept: KeptStep, due: DueGradient, ours: DueGradient, scaled: Mapping[str, Tensor], found: Mapping[str, Tensor],
                    norm: float) -> tuple[float, str]:
    """The tensor whose gradient is farthest off, in shares of what rounding may do to it; and that in words.

    Our own rounding of the same gradient is measured: the distance of the run's dtype from double precision, or on a GPU from fp32; the
    loss itself in fp32, as every run has it.
    """
    clip, times, shares = min(1.0, kept.options["max_grad_norm"] / (norm + 1e-6)), OWN_ERRORS[kept.compute], {}
    for name, gradient in scaled.items():
        own = float((ours.gradients[name] - due.gradients[name]).norm()) * clip
        key, stays = first_moment(kept, name)
        kept_digits = 4 * ULP / (1 - stays) * float(kept.moment(kept.before, name, key).norm())
        allowed = times * own + LEAST_ERROR[kept.compute] * (float(gradient.norm()) + 0.01 * norm * clip) + kept_digits
        error = float((found[name] - gradient).norm())
        if not math.isfinite(own):
            raise NotWitnessed(f"the gradient of {name} in {kept.compute}, made again, is no number")
        shares[name] = 0.0 if error == 0 else error / allowed if allowed and math.isfinite(error) else math.inf
    worst = max(shares, key=lambda name: shares[name])
    error = float((found[worst] - scaled[worst]).norm()) / (float(scaled[worst].norm()) or math.inf)
    return shares[worst], (f"the gradient that the optimizer took is off by {error:.1e} at most (relative, {worst}), {shares[worst]:.2g} "
                           f"of what rounding may do" if shares[worst] <= 1 else
                           f"the gradients of {sum(share > 1 for share in shares.values())} of {len(shares)} tensors are not those of "
                           f"these texts, clipped to {kept.options['max_grad_norm']:g}: {worst} is off by {error:.1e} (relative)")


def still_rows(due: DueGradient, found: Mapping[str, Tensor]) -> list[str]:
    """Embedding rows that were due and took in nothing."""
    if "embed.weight" not in found:
        return []
    wanted, got = due.gradients["embed.weight"].norm(dim=1), found["embed.weight"].norm(dim=1)
    rows = ((wanted > 1e-2 * wanted.max()) & (got == 0)).nonzero().flatten().tolist()
    count = int((wanted > 1e-2 * wanted.max()).sum())
    return [f"{len(rows)} of {count} embedding rows that were due took in no gradient ({shown(rows)})"] if rows else []


def wrong_seconds(kept: KeptStep, found: Mapping[str, Tensor]) -> list[str]:
    wrong = []
    for name, gradient in found.items():
        if first_moment(kept, name)[0] == "momentum":
            continue
        before, after, mean = (kept.moment(*where) for where in ((kept.before, name, "exp_avg_sq"), (kept.after, name, "exp_avg_sq"),
                                                                 (kept.before, name, "exp_avg")))
        due = BETAS[1] * before + (1 - BETAS[1]) * gradient.square()
        allowed = 1e-3 * (1 - BETAS[1]) * gradient.square().norm() + 1e-5 * (before.norm() + mean.square().norm()) + 1e-30
        if float((after - due).norm()) > float(allowed):
            wrong.append(name)
        if int(kept.after[f"state/{name}/step"]) != kept.taken:
            return [f"the optimizer counts {int(kept.after[f'state/{name}/step'])} steps, {kept.taken} were taken"]
    return [f"the second moments of {len(wrong)} tensors are not 0.95 of the old and 0.05 of the squared gradient ({shown(wrong)})"
            ] if wrong else []


def peak_and_decay(kept: KeptStep, name: str, tensor: Tensor, adapter: Adapter | None) -> tuple[float, float]:
    """Peak learning rate and weight decay of a tensor, as the options say."""
    options, decaying = kept.options, decays(name, tensor)
    if kept.recipe != "Pretrain":
        whole, low_rank = TUNING[kept.recipe]
        return options["learning_rate"] or (low_rank if adapter else whole), options["weight_decay"] if decaying else 0.0
    peak, decay = PRETRAINING[options["optimizer"]]
    peak, decay = options["learning_rate"] or peak, decay if options["weight_decay"] is None else options["weight_decay"]
    if options["optimizer"] == "muon":
        matrix = decaying and name != "head.weight"
        return (peak, decay) if matrix else (options["embedding_learning_rate"], 0.0)
    return peak, decay if decaying else 0.0


def wrong_weights(kept: KeptStep, found: Mapping[str, Tensor], steps: int | None, adapter: Adapter | None) -> list[str]:
    """The weights after the step, from those before, the moments after, and the rate and decay of the options."""
    end = Budgeted(steps if steps is not None else kept.facts["stop_at"], kept.facts["decay_from"] if steps is None else None)
    share = rate_share(kept.step, kept.options, steps, end, tuning=kept.recipe != "Pretrain")
    wrong, moved, asked = list[str](), 0.0, 0.0
    for name, before in kept.weights(kept.before).items():
        peak, decay = peak_and_decay(kept, name, before, adapter)
        after, before = kept.weights(kept.after)[name].double(), before.double()
        due = due_weight(kept, name, before, found[name], peak * share, decay)
        if not moved_as_due(kept, name, before, after, due, found[name], peak * share):
            wrong.append(name)
            moved, asked = math.hypot(moved, float((after - before).norm())), math.hypot(asked, float((due - before).norm()))
    return [f"{len(wrong)} of {len(found)} tensors ({shown(wrong)}) did not move as the options say: {moved / (asked or math.nan):.3g} "
            f"times as far, where the rate is {share:.4g} of its peak"] if wrong else []


def due_weight(kept: KeptStep, name: str, before: Tensor, gradient: Tensor, rate: float, decay: float) -> Tensor:
    if first_moment(kept, name)[0] == "momentum":
        return muon_weight(before, gradient, kept.moment(kept.after, name, "momentum"), matrix_rows(kept, name), rate, decay)
    first, second = (kept.moment(kept.after, name, key) for key in ("exp_avg", "exp_avg_sq"))
    return adamw_weight(before, first, second, kept.taken, rate, decay)


def moved_as_due(kept: KeptStep, name: str, before: Tensor, after: Tensor, due: Tensor, gradient: Tensor, rate: float) -> bool:
    """Element by element for AdamW. Orthogonalising lifts rounding a thousandfold, so that Muon's matrices are compared as wholes."""
    if first_moment(kept, name)[0] == "momentum":
        own = 0.0
        if kept.facts["device"].startswith("cuda"):  # where it is computed in bf16
            part = gradient.split(matrix_rows(kept, name))[0]
            own = float((orthogonal(part.bfloat16()).double() - orthogonal(part)).norm() / orthogonal(part).norm())
        allowed = max(MUON_ERROR, OWN_ERRORS["bfloat16"] * own) * float((due - before).norm()) + 4 * ULP * float(before.norm())
        return float((after - due).norm()) <= allowed
    return bool(((after - due).abs() <= 4 * ULP * (before.abs() + rate) + UPDATE_ERROR * (due - before).abs()).all())


def matrix_rows(kept: KeptStep, name: str) -> tuple[int, ...]:
    """q, k and v, and gate and up, are matrices of their own, stored one below the other: k and v of as many heads as they have."""
    rows, fields = len(kept.before[f"weights/{name}"]), model_shape(kept)
    assert isinstance(fields, dict), "Muon trains models from scratch"
    heads = fields.get("num_attention_heads", 1)
    groups = fields.get("num_key_value_heads") or heads
    gated = fields["model_type"] != "gpt2"
    parts = (heads, groups, groups) if name.endswith("attn.qkv.weight") else (1, 1) if name.endswith("mlp.up.weight") and gated else (1,)
    return tuple(rows * part // sum(parts) for part in parts)


def shown(items: Sequence[Any]) -> str:
    """A few of them."""
    return ", ".join(map(str, items[:_NAMED])) + (", …" if len(items) > _NAMED else "") if items else "none"

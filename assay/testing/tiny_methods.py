"""Tiny runs of KTO, reward models, on-policy distillation and merges, with the checks that real ones have."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.data import feedback
from assay.data.chat import TrainingExample
from assay.data.feedback import LabelledPair, PackedFeedback, feedback_rows
from assay.data.packing import packed_rows
from assay.data.preferences import PackedPairs
from assay.data.reference_store import StoredReference
from assay.evaluation.held_out_feedback import score_feedback
from assay.generate.generation_request import Sampling
from assay.guard.distillation_checks import check_drawn_tokens, check_own_words_loss
from assay.guard.kto_checks import check_feedback, check_feedback_direction, check_kl_estimate, check_kto_moves, preflight_kto
from assay.guard.merge_checks import check_merged_bytes, check_relatives, check_same_shape
from assay.guard.preference_checks import moved_reference
from assay.guard.reward_model_checks import check_reward_head, preflight_reward_model
from assay.learn import bradley_terry, distillation, loop, unpaired
from assay.learn.bradley_terry import REWARD_TOKEN, RewardModelSettings
from assay.learn.distillation import DistillationSettings
from assay.learn.unpaired import KtoSettings
from assay.model import merging
from assay.model.merging import Merge
from assay.model.resize_embeddings import resize_embeddings, with_new_tokens
from assay.model.tokenizer import Tokenizer
from assay.recipes import on_policy
from assay.recipes.prompts import Prompt, read_prompts
from assay.recipes.rewards import check_reward_readings
from assay.recipes.rollouts import Sampler
from assay.store.artifact import assemble_model, merged_tensors, open_artifact
from assay.store.checkpoint import write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.testing.fault_injection import Plant
from assay.testing.tiny_models import save_model, tiny_model, tiny_tokenizer, tokenizer_and_stops
from assay.testing.tiny_preferences import SIDE_TOKENS, asked_reference, parent_model, tiny_pairs, write_rows
from assay.testing.tiny_training import make_optimizer
from assay.verdict import Outcome, Verdict

OTHER_TOKENS = {"<|im_start|>": "<<turn>>", "<|im_end|>": "<<stop>>", "<|endoftext|>": "<<end>>"}
OTHER_TEMPLATE = ("{%- for message in messages -%}<<turn>>{{ message.role }}: {{ message.content }}<<stop>>{%- endfor -%}"
                  "{%- if add_generation_prompt -%}<<turn>>assistant: {%- endif -%}")
KTO_STEPS, ROW = 20, 2 * SIDE_TOKENS


def feedback_said(count: int = 24, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}: ", "completion": f"yes, {number} it is" if number % 2 else f"no, not {number}",
             "label": bool(number % 2)} for number in range(first, first + count)]


def tiny_feedback(folder: Path) -> list[LabelledPair]:
    """Read from a file and rendered, as a run's are."""
    said = feedback.read_feedback(write_rows(folder / "answers.jsonl", feedback_said()))
    return feedback.render_feedback(said, *tokenizer_and_stops(), length=SIDE_TOKENS)[0]


def a_kto_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: some KTO steps; then what was learned is asked of other answers."""
    settings = KtoSettings()
    apart = feedback.read_feedback(write_rows(folder / "held.jsonl", feedback_said(16, 40)))
    held_out = feedback.render_feedback(apart, *tokenizer_and_stops(), length=SIDE_TOKENS)[0]
    with plant(folder):
        pairs, policy = tiny_feedback(folder), parent_model()
        losses, due = kto_steps(policy, pairs, asked_reference(folder, pairs, parent_model()), settings)
    (folder / "held").mkdir()
    judged = asked_reference(folder / "held", held_out, parent_model())
    batches = [judged.attached(feedback_rows([[pair] for pair in held_out], ROW))]
    before, after = (score_feedback(model, batches, settings, rows=len(held_out)) for model in (parent_model(), policy))
    return [check_kto_moves(losses[1:], due[1:]), check_feedback_direction(before, after)]


def kto_steps(policy: Any, pairs: Sequence[LabelledPair], stored: StoredReference,
              settings: KtoSettings) -> tuple[list[float], list[float]]:
    """The loss of every step, and what it would be at the reference."""
    order = PackedFeedback(pairs, 0, 4, ROW, epochs=KTO_STEPS)
    labels = [[1.0 if order.examples[index].desirable else -1.0 for row in order.plan(step) for index in row] for step in range(KTO_STEPS)]
    due = [settings.at_reference(torch.tensor(each)) for each in labels]
    batches = (unpaired.with_baseline(policy, stored.attached(order.batch(step)), 2) for step in range(KTO_STEPS))
    steps = loop.train(policy, make_optimizer(policy, 1e-3), batches, unpaired.kto_objective(settings), micro=2)
    return [float(step.loss) for step in steps], due


def a_kto_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """KTO preflight of a policy that is its reference, as before step 1; the KL is estimated against a reference that it has left."""
    settings = KtoSettings()
    with plant(folder):
        pairs, policy = tiny_feedback(folder), parent_model()
        batch = asked_reference(folder, pairs, parent_model()).attached(PackedFeedback(pairs, 0, 4, ROW).batch(0))
        batch = unpaired.with_baseline(policy, moved_reference(batch), 2)
        objective = unpaired.kto_objective(settings)
        return [check_feedback(pairs), check_kl_estimate(policy, batch), *preflight_kto(policy, objective, batch, settings)]

# ---------------------------------------------------------------- reward models


def a_score_head_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    settings = RewardModelSettings(7)
    with plant(folder):
        batch = PackedPairs(tiny_pairs(folder), 0, 4, ROW).batch(0)
        return preflight_reward_model(parent_model(), bradley_terry.reward_objective(settings), batch, settings)


def a_written_reward_model(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: a reward model is written and opened again, after its score head has moved."""
    (before, stops), base = tokenizer_and_stops(), tiny_model("llama")
    after = with_new_tokens(before, (REWARD_TOKEN,))
    grown = resize_embeddings(base.config, {name: p.detach() for name, p in base.named_parameters()}, before, after)
    began = grown.tensors["embed.weight"][grown.rows[0]].clone()
    model = assemble_model(grown.config, grown.tensors, torch.float32)
    with plant(folder):
        move_reward_head(model, grown.rows[0])
        write_checkpoint(folder / "model", model_contents(model.eval(), after, stops, Lineage()))
        return [check_reward_head(open_artifact(folder / "model"), began)]


def move_reward_head(model: Any, row: int) -> None:
    """Move the reward token's row as training would."""
    with torch.no_grad():
        model.head_weight()[row].add_(0.1)

def other_tokenizer(template: str | None = OTHER_TEMPLATE) -> Tokenizer:
    """Tokenizer of a reward model that is no relative of the policy: other words, other special tokens, another template."""
    document = json.dumps(tiny_tokenizer(words=("Ġor", "on")).document)
    for ours, theirs in OTHER_TOKENS.items():
        document = document.replace(ours, theirs)
    return Tokenizer.from_parts(document, template, eos_token=OTHER_TOKENS["<|im_end|>"], pad_token=OTHER_TOKENS["<|endoftext|>"])


def a_stranger_reward_model(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: a reward model whose tokenizer and template are not the policy's: what it reads of prompts that are messages."""
    save_model(folder / "reward", tiny_model("llama"), tokenizer=with_new_tokens(other_tokenizer(), (REWARD_TOKEN,)))
    rows = [{"prompt": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    policy = tokenizer_and_stops()[0]
    prompts = read_prompts(str(write_rows(folder / "prompts.jsonl", rows)), policy)
    with plant(folder):
        return [check_reward_readings(str(folder / "reward"), policy, prompts)]

# ---------------------------------------------------------------- the student's own words


def own_words_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: on-policy preflight on some prompts that the student answers itself, and its teacher reads."""
    tokenizer, stops = tokenizer_and_stops()
    student, teacher, blend = tiny_model("llama"), tiny_model("llama", 5).requires_grad_(False), DistillationSettings("reverse")
    prompts = [Prompt(str(n), tuple(tokenizer.encode(f"question {n}:")), "", {}) for n in range(4)]
    examples = [prompt_alone(prompt) for prompt in prompts]
    sampler = Sampler(student, tokenizer, stops, slots=4, length=SIDE_TOKENS)
    drawn = [group[0] for group in sampler.draw(prompts, Sampling(max_new=12), ("own words",), 1)]
    with plant(folder):
        made = [on_policy.spoken(example, said) for example, said in zip(examples, drawn, strict=True)]
        batch = packed_rows([made[:2], made[2:]], 2 * SIDE_TOKENS, 0)
        return [check_drawn_tokens(batch, [(prompt.ids, said.ids) for prompt, said in zip(prompts, drawn, strict=True)]),
                check_own_words_loss(student, distillation.distillation(teacher, blend), batch, blend, teacher)]


def prompt_alone(prompt: Prompt) -> TrainingExample:
    """Prompt as an example with one token to learn, which the student's own answer takes the place of."""
    weight = np.array([0.0] * len(prompt.ids) + [1.0])
    return TrainingExample(prompt.id, np.array([*prompt.ids, 5]), weight, (), len(prompt.ids))

# ---------------------------------------------------------------- merges


def a_merge_of_models(folder: Path, plant: Plant) -> list[Verdict]:
    return merged_two(folder, plant, Merge("ties", (1.0, 1.0), density=0.3))


def a_merge_by_lot(folder: Path, plant: Plant) -> list[Verdict]:
    return merged_two(folder, plant, Merge("dare", (1.0, 1.0), density=0.3))


def merged_two(folder: Path, plant: Plant, asked: Merge) -> list[Verdict]:
    """A base, two models that moved from it, and their merge, where they may be merged."""
    with plant(folder):
        for place, name in enumerate(("base", "one", "two")):
            save_model(folder / name, fine_tune(place))
        base, *parents = [open_artifact(folder / name) for name in ("base", "one", "two")]
        found = [check_same_shape([base, *parents]), check_relatives([base, *parents])]
        if any(verdict.outcome is Outcome.REFUTED for verdict in found):
            return found
        models, ground = [merged_tensors(parent) for parent in parents], merged_tensors(base)
        return [*found, check_merged_bytes(merging.merged_models(asked, models, ground), asked, models, ground)]


def fine_tune(place: int) -> Any:
    """Number 0 is the base; the others moved a little from it, each its own way."""
    model, draw = tiny_model("llama"), torch.Generator().manual_seed(place)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.004 * (place > 0)) * torch.randn(parameter.shape, generator=draw))
    return model

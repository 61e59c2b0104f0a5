"""Method faults: KTO that learns the opposite, score heads that were never learned, teachers of the neighbour's token, merged strangers."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data import feedback
from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.feedback import LabelledPair
from assay.evaluation import held_out_feedback
from assay.learn import bradley_terry, distillation, unpaired
from assay.learn.preference import PairScores
from assay.model import merging
from assay.model.transformer import Transformer
from assay.recipes import on_policy
from assay.reward import model_reward
from assay.testing import tiny_methods
from assay.testing.fault_injection import fault, in_place_of, swap
from assay.testing.tiny_methods import (
    a_kto_preflight,
    a_kto_run,
    a_merge_by_lot,
    a_merge_of_models,
    a_score_head_preflight,
    a_stranger_reward_model,
    a_written_reward_model,
    own_words_preflight,
)
from assay.testing.tiny_models import tiny_model, tokenizer_and_stops

# ---------------------------------------------------------------- KTO


@fault("KTO with labels flipped", rows=(), stage="data", check="direction", job=a_kto_run)
@in_place_of(tiny_methods, "tiny_feedback")
def labels_flipped(usual: Any, *given: Any) -> list[LabelledPair]:
    """1 means bad in this file: what is undesirable is taught, and loss and reward of training look as good as ever."""
    return [replace(pair, desirable=not pair.desirable) for pair in usual(*given)]


fault("KTO's reference follows the policy", rows=("R22",), stage="loss", check="loss moves", job=a_kto_run)(
    in_place_of(unpaired, "pair_scores")(lambda usual, *given: _following(usual(*given))))
fault("KTO's completions not mismatched", rows=(), stage="data", check="feedback", job=a_kto_preflight)(
    # The KL is then the reward itself, as in a batch of one example: nothing is learned.
    in_place_of(feedback, "mismatched")(lambda usual, kept, place, length: replace(usual(kept, place, length), tokens=kept[place][1].tokens,
                                                                                   weight=kept[place][1].weight)))


@fault("KTO's KL of each micro-batch", rows=("L03", "N41"), stage="loss", check="kl", job=a_kto_preflight)
@in_place_of(unpaired, "with_baseline")
def kl_of_each_micro_batch(_: Any, model: Transformer, batch: Batch, micro: int) -> Batch:
    """Fault, as many trainers have it: the KL is estimated in each micro-batch, so that how the step was cut decides what every example is
    compared with."""
    parts = [torch.full_like(part.weight, unpaired.mismatch_kl(model, [part])) for part in batch.split(1)]
    return replace(batch, baseline=torch.cat(parts) + torch.arange(len(parts))[:, None] * 1e-3)


fault("KTO's KL of its own answers", rows=(), stage="loss", check="kl", job=a_kto_preflight)(
    # The reward is then compared with itself: of a policy that is still its reference both are 0, and it shows later, if ever.
    in_place_of(unpaired, "pair_scores")(lambda usual, *given: (scores := usual(*given))._replace(
        rejected=scores.chosen, rejected_reference=scores.chosen_reference)))
fault("KTO's KL added instead of taken off", rows=(), stage="loss", check="loss", job=a_kto_preflight)(
    in_place_of(unpaired, "kto_losses")(lambda usual, settings, ratio, labels, baseline: usual(settings, ratio, labels, -baseline)))
fault("KTO's evaluation by another baseline", rows=(), stage="eval", check="scores", job=a_kto_preflight)(
    # Training is right; the held-out loss, by which the best step is chosen, is another's.
    in_place_of(held_out_feedback, "kto_losses")(lambda usual, settings, ratio, labels, baseline: usual(
        settings, ratio, labels, baseline + 1)))
fault("KTO's weights exchanged", rows=(), stage="loss", check="loss", job=a_kto_preflight)(
    in_place_of(unpaired, "kto_losses")(lambda usual, settings, ratio, labels, baseline: usual(settings, ratio, -labels, baseline)))

# ---------------------------------------------------------------- reward models


fault("score head as it began", rows=("S2",), stage="save", check="reward head", job=a_written_reward_model)(
    # Everything is there and loads; what it was taught is not: the rewards are those of a row of means.
    lambda _: swap(tiny_methods, "move_reward_head", lambda model, row: None))
fault("reward of the first token", rows=(), stage="loss", check="loss", job=a_score_head_preflight)(
    # Of right-padded rows the wrong end: every text of one prompt is worth the same.
    lambda _: swap(bradley_terry, "last_tokens", lambda documents: _first_tokens(documents)))

fault("reward model asked in the policy's template", rows=(), stage="reward", check="reward words", job=a_stranger_reward_model)(
    # Markers of turns that are no tokens to it, and its own, by which it knows an answer, nowhere.
    in_place_of(model_reward, "_conversation")(lambda usual, path, artifact, asked, completion: replace(
        usual(path, artifact, asked, completion), messages=(),
        plain=(tokenizer_and_stops()[0].render(asked.messages, add_generation_prompt=True), completion))))

fault("chats that the reward model reads as plain text", rows=(), stage="reward", check="reward words", job=a_stranger_reward_model)(
    # No marker of a turn, its own or another's: texts of a kind that it was never trained on.
    in_place_of(model_reward, "_conversation")(lambda usual, path, artifact, asked, completion: replace(
        usual(path, artifact, asked, completion), messages=(), plain=(asked.messages[-1]["content"], completion))))

# ---------------------------------------------------------------- the student's own words


@fault("teacher off by one token on the student's own words", rows=("L05",), stage="distil", check="own words' loss",
       job=own_words_preflight)
@in_place_of(distillation, "flat_states")
def off_by_one_on_own_words(usual: Any, model: Transformer, batch: Batch) -> Tensor:
    """Fault: on the data's text the teacher is asked rightly; what the student says is scored one token late."""
    states = usual(model, batch)
    return states if model.embed.weight.requires_grad else states.roll(-1, 0)


@fault("student's words masked one token late", rows=("N14",), stage="distil", check="own words", job=own_words_preflight)
@in_place_of(on_policy, "spoken")
def masked_late(usual: Any, *given: Any) -> TrainingExample:
    made = usual(*given)
    return replace(made, weight=np.concatenate([made.weight[1:], [1.0]]) * (np.arange(len(made)) > 0))


fault("whole text of the student learned", rows=("N14",), stage="distil", check="own words", job=own_words_preflight)(
    # The mask of the completion is dropped on this path alone: the prompt is taught too.
    in_place_of(on_policy, "spoken")(lambda usual, *given: replace(made := usual(*given), weight=np.arange(len(made)) > 0)))

# ---------------------------------------------------------------- merges


fault("merge of unrelated parents", rows=(), stage="merge", check="relatives", job=a_merge_of_models)(
    # Of one geometry and one tokenizer, and never trained from one model: it loads, and says nothing.
    in_place_of(tiny_methods, "fine_tune")(lambda usual, place: tiny_model("llama", 11) if place == 2 else usual(place)))
fault("task vectors without the base", rows=("M01",), stage="merge", check="arithmetic", job=a_merge_of_models)(
    lambda _: swap(merging, "TASK_SUMS", merging.TASK_SUMS | {"ties": lambda asked, name, tasks: torch.zeros_like(tasks[0])}))
fault("TIES without its signs", rows=(), stage="merge", check="arithmetic", job=a_merge_of_models)(
    # A mean of all that was kept: where two fine-tunes disagree, they cancel.
    lambda _: swap(merging, "TASK_SUMS", merging.TASK_SUMS | {"ties": lambda asked, name, tasks: torch.stack(
        [merging.trimmed(task, asked.density) for task in tasks]).mean(0)}))
fault("DARE without its scale", rows=(), stage="merge", check="arithmetic", job=a_merge_by_lot)(
    # What is left of each task vector is not made larger: most of what was learned is gone, and no mean of entries shows it.
    lambda _: swap(merging, "TASK_SUMS", merging.TASK_SUMS | {"dare": lambda asked, name, tasks: asked.density * merging.dare_sum(
        asked, name, tasks)}))

# ---------------------------------------------------------------- where in our code they are planted


def _following(found: PairScores) -> PairScores:
    return found._replace(chosen_reference=found.chosen.detach(), rejected_reference=found.rejected.detach())


def _first_tokens(documents: Tensor) -> Tensor:
    before = torch.cat([torch.full_like(documents[:, :1], -1), documents[:, :-1]], 1)
    return (documents >= 0) & (documents != before)

"""On-policy distillation: in a share of the steps the student answers the step's prompts itself, and its teacher scores what it said.

Which steps, is a function of seed and step (GKD's lambda is the share). What is drawn comes from the student's own weights as they are
at that step, with the prompts of the examples that the step reads anyway, packed into a batch of the same shape. Where the completions
do not fit into it, the last examples of the step are left out, and the metrics say how many were learned from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.packing import fill_rows, packed_rows
from assay.errors import UsageError
from assay.evaluation.held_out_loss import with_padding_rows
from assay.generate.generation_request import Completion, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import check_version, version_name
from assay.guard.training_guards import stop_if_refuted
from assay.learn.sharded import ShardedModel
from assay.model.transformer import ModelConfig
from assay.recipes.options import Distill
from assay.recipes.processes import check_gathered
from assay.recipes.prompts import Prompt
from assay.recipes.rollout_batch import Drawn
from assay.recipes.rollouts import Sampler
from assay.recipes.starting_model import StartingModel
from assay.recipes.trainer import Trainer
from assay.seeds import derive

_SEEDS = 2**63  # how many there are
DRAWN_FROM = 1.0  # temperature of the student's sampling, where none is given: its own distribution


def longest_own_words(config: Distill, student: ModelConfig) -> int:
    """Tokens of a prompt with what the student says to it: a row's, as far as its context reaches."""
    return min(config.max_length, student.max_length)


class OnPolicy:
    """The student's own completions in the place of the data's. `learned` says how many stood in each such step."""

    def __init__(self, config: Distill, start: StartingModel, examples: Sequence[TrainingExample]):
        self.share, self.seed, self.length = config.on_policy, config.seed, config.max_length
        self.longest = longest_own_words(config, start.model.config)
        self.temperature = DRAWN_FROM if config.sample_temperature is None else config.sample_temperature
        if self.temperature <= 0:
            raise UsageError(f"--on-policy with --sample-temperature {self.temperature:g}: its completions are drawn from its own "
                             "distribution, which the divergence is over; give a temperature above 0")
        self.max_new = config.max_new_tokens
        self.examples = {example.id: example for example in examples}
        self._sampler_of = partial(Sampler, tokenizer=None, stops=start.parent.stops, slots=config.batch_tokens // config.max_length * 8,
                                   length=config.max_length)  # ids alone: nobody reads the text
        self.sampler = self._sampler_of(start.model)
        self.sharded: ShardedModel | None = None
        self.learned: dict[int, int] = {}

    def sample_gathered(self, trainer: Trainer) -> None:
        """Sample from a gathered copy from here on, since nobody holds the sharded student whole: it is gathered in process 0 whenever it
        is sampled from."""
        assert trainer.sharded is not None
        self.sharded = trainer.sharded
        self.sampler = self._sampler_of(trainer.sampled_weights().model, gather=self.sharded.refresh,
                                        device=None if trainer.device == "cpu" else trainer.device)

    def due(self, step: int) -> bool:
        return derive(self.seed, "on-policy", step) < self.share * _SEEDS

    def batches(self, planned: Iterable[Batch], start: int) -> Iterator[Batch]:
        """Batches with the student's own answers, each drawn when it is asked for: from the weights of that step."""
        for step, batch in enumerate(planned, start):
            yield self.sampled(batch, step) if self.due(step) else batch

    def sampled(self, batch: Batch, step: int) -> Batch:
        made = self.packed(batch, self.draw(batch, step))
        assert made.documents is not None
        self.learned[step] = int((made.documents.max(1).values + 1).sum())
        return made

    def packed(self, batch: Batch, drawn: Drawn) -> Batch:
        """Sampled answers as a batch, in the shape of the batch whose prompts were answered, under its ids."""
        made = [spoken(self.examples[prompt.id], completion) for prompt, completion in drawn]
        rows = rows_that_fit(made, len(batch), self.length)
        packed = packed_rows([[made[place] for place in row] for row in rows], self.length, 0)
        return replace(with_padding_rows(packed, len(batch)), ids=batch.ids)

    def draw(self, batch: Batch, step: int) -> Drawn:
        """Prompts of the step's examples with what the student says to them now, in the order of the batch. The run stops where other
        weights than the trainer's said it."""
        self.sampler.load(step)
        named = list(dict.fromkeys(str(id) for row in batch.ids for id in row))
        prompts = [Prompt(id, tuple(self.examples[id].tokens[: self.examples[id].prompt].tolist()), "", {}) for id in named]
        said: dict[str, Completion] = {}
        for room in sorted({self.room(prompt) for prompt in prompts}):  # a row has room for so many tokens after the prompt
            alike = [prompt for prompt in prompts if self.room(prompt) == room]
            sampling = Sampling(max_new=room, temperature=self.temperature, seed=self.seed)
            said |= {prompt.id: group[0] for prompt, group in zip(alike, self.sampler.draw(alike, sampling, ("on-policy", step), 1),
                                                                  strict=True)}
        due = version_name(step, fingerprint(self.sampler.model))
        stop_if_refuted([check_version([completion.version for completion in said.values()], due), *check_gathered(self.sharded)])
        return [(prompt, said[prompt.id]) for prompt in prompts]

    def room(self, prompt: Prompt) -> int:
        """Tokens that may be drawn: all that are asked for, or what is left of a row or of the context, in steps of a sixteenth of it."""
        left = self.longest - len(prompt.ids)
        coarse = max(1, self.longest // 16)
        return self.max_new if left >= self.max_new else max(1, left // coarse * coarse)


def measured_words(own_words: OnPolicy | None, step: int) -> dict[str, Any]:
    """Metrics of a step's own answers; nothing where no step is on-policy."""
    if own_words is None:
        return {}
    count = own_words.learned.pop(step, None)
    return {"on_policy": int(own_words.due(step)), **({} if count is None else {"on_policy_completions": count})}


def spoken(example: TrainingExample, said: Completion) -> TrainingExample:
    """The example's prompt with what was said to it: every drawn token counts, the one that ended it among them."""
    tokens = [*example.tokens[: example.prompt].tolist(), *said.ids]
    return TrainingExample(example.id, np.array(tokens), np.array([0.0] * example.prompt + [1.0] * len(said.ids)), (), example.prompt)


def rows_that_fit(made: Sequence[TrainingExample], rows: int, length: int) -> list[list[int]]:
    """Packing of as many of the first examples as fit into `rows` rows: which are left out depends on the order of the data, not on what
    was said."""
    lengths = np.array([len(example) for example in made], np.int64)

    def packed(count: int) -> list[list[int]]:
        return fill_rows(np.arange(count), lengths, length)

    fits, too_many = 1, len(made) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if len(packed(middle)) <= rows else (fits, middle)
    return packed(fits)

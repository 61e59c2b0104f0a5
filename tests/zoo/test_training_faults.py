"""Every fault of training, data, measuring and resuming is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.guard import loss_preflight
from assay.recipes import trainer
from assay.testing.fault_injection import swap
from assay.testing.tiny_training import TinyRun, run_guarded
from assay.verdict import proven
from assay.zoo import catalogue, observe
from tests.zoo.sightings import sight
from tests.zoo.test_conclusion_faults import REASONS as OF_CONCLUSIONS
from tests.zoo.test_serving_faults import MINE as OF_SERVING
from tests.zoo.test_sft_faults import REASONS as OF_SFT
from tests.zoo.test_zoo import REASONS as OF_ARTIFACTS

REASONS = {
    # training
    "mean of micro-batch means": "4 rows one at a time, and all at once: loss 5.79",
    "micro-batches never averaged": "4 rows one at a time, and all at once: loss 23.1",
    "objective that takes a mean": "4 rows one at a time",
    "backward of a fused kernel gives twice the gradient": "2.006 (*.mlp.up.weight) times what they should be",
    "divided by the configured window": "2 rows one at a time, and all at once: loss 2.90",
    "shifted twice": "the objective and plain cross-entropy: loss 5.77",
    "not shifted": "the objective and plain cross-entropy: loss 4.6",
    "padding counted": "eight columns of padding change the loss from",
    "gradient scaled by the first token's": "gradients apart by at most 2",
    "window ignored by attention": "a window, a cap, a mask, a mix or a gate of the config is not applied",
    "soft cap ignored by the model": "a window, a cap, a mask, a mix or a gate of the config is not applied",
    "values of the first layer not mixed in": "a window, a cap, a mask, a mix or a gate of the config is not applied",
    "gates of the heads ignored": "a window, a cap, a mask, a mix or a gate of the config is not applied",
    "soft cap ignored by the loss": "the objective and plain cross-entropy: loss",
    "dropout in evaluation": "dropout or hidden state is active",
    "never in evaluation mode": "still in training mode after eval(): the model",
    "updates below the rounding": "trainable tensors did not move: blocks.0.attn_norm.weight",
    "every step skipped": "the loop took 8 steps, the optimizer applied 0",
    "optimizer of tensors before wrapping": "14 trainable tensor(s) are not in the optimizer",
    "layer frozen by mistake": "are frozen or not in the model: blocks.1.mlp.down.weight",
    "gradient cut by checkpointing": "6 of 14 trainable tensors got no gradient: blocks.0",
    "scheduler stepped per micro-batch": "the scheduler is stepped 2 times a step",
    "replicas part": "rank 1 holds other values than rank 0 in 5 of 14 tensors: blocks.0.attn_norm.weight",
    "NaN filtered from the log": "step 4: loss nan",
    "NaN stepped on": "14 tensor(s) hold values that are not finite",
    "NaN counter that never counts": "a planted nan went unnoticed",
    "alarm that never rings": "the loop would step on it",
    # corpora
    "an epoch in disguise": "one of them 41 times",
    "cache of another tokenizer": "does not encode to its stored ids",
    "poisoned cache": "does not encode to its stored ids",
    "held-out text trained on": "11 of 13 held-out documents stand whole in training",
    "evaluation set from the training text": "11 of 13 held-out documents stand in training",
    "same rows on every rank": "76 of the first 152 windows of an epoch are read more than once by the 2 rank(s)",
    "same random state in every worker": "are read more than once by the 2 rank(s)",
    "same order in every epoch": "the second epoch reads in the order of the first",
    "placeholder after the data ran out": "the loss is 1.0 3 times in a row from 4 on",
    "data begins again in silence": "which are those of step 0",
    "packing not seen by the model": "packing leaks",
    "mask dropped by the backend": "packing leaks",
    "positions reset, attention open": "packing leaks",
    # measuring
    "stopped on noise": "the run stopped after 4 of 24 evaluations, by a rule that could not know",
    "learned by heart": "the gap between train and held-out loss widened",
    "two seeds of three collapse": "two modes: {42} near 3.5",
    "small source of a mixture ran out": "rows away from its share; a source ran out, and the others took its place",
    "replayed shard of a mixture": "a part of it is replayed, and another never comes",
    # resuming
    "place in the data lost": "step 11 read the windows 159, 299, 176, 189, …, the plan has 1, 210, 321, 225, …, which are those of step 0",
    "order of the first epoch again": "which are those of step 1",
    "resume offset in every later epoch": "step 11 read the windows",
    "rows of the shuffle buffer lost": "step 11 read the windows",
    "another batch written down than was read": "step 11 wrote down that it read",
    "cold moments": "0 weights and 22 tensors of the optimizer in memory are not those of step-000011",
    "going on from the average": "13 weights and 0 tensors of the optimizer in memory are not those of step-000011",
    "another held-out set": "its held-out scores do not compare",
    "average scored, raw weights saved for it": "what was saved is not what was scored",
    "raw weights scored for the average": "what was saved is not what was scored",
    "average with another decay": "numbers of the moving average are not what the weights of",
    "average that stands still": "numbers of the moving average are not what the weights of",
}
MODULES = {"adapter_faults", "checkpoint_faults", "file_format_faults", "training_faults", "corpus_faults", "conclusion_faults",
           "run_faults"}  # the others have tests of their own
WANTED = {*(f"S{i}" for i in range(3, 7)), *(f"D{i}" for i in range(14, 24)), *(f"L{i:02d}" for i in range(1, 8)), "L11", "L12",
          *(f"O{i:02d}" for i in (1, 2, 3, 4, 7, 8, 12)), *(f"C{i}" for i in range(15, 20)), "E01", "E02"}


def test_every_row_about_training_has_a_fault_and_every_fault_its_reason():
    here = {name for name, fault in catalogue().items() if fault.plant.__module__.removeprefix("assay.zoo.") in MODULES}
    assert here == OF_ARTIFACTS.keys() | REASONS.keys() | OF_CONCLUSIONS.keys() | OF_SFT.keys() | {fault.name for fault in OF_SERVING}
    assert not WANTED - {row for name in REASONS for row in catalogue()[name].rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown


def test_a_blind_check_misses_its_fault():
    """One that runs before step 1, one that reads every step of the recipe."""
    with swap(loss_preflight, "check_isolation", lambda model, batch: proven("isolation", "looks fine")):
        assert not observe(catalogue()["packing not seen by the model"]).caught
    with swap(trainer, "check_consumed", lambda steps, order: proven("consumed", "looks fine")):
        assert not observe(catalogue()["place in the data lost"]).caught


def test_nothing_planted_outlives_its_job():
    before = [str(verdict) for verdict in run_guarded(TinyRun(steps=3))]
    for name in ("mean of micro-batch means", "every step skipped", "scheduler stepped per micro-batch", "NaN stepped on", "not shifted"):
        observe(catalogue()[name])
    assert [str(verdict) for verdict in run_guarded(TinyRun(steps=3))] == before

"""Options of preference learning: which pairs, which loss, and how far the policy may go from its reference."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from assay.config import option
from assay.recipes.options import ByForm, Tuned

PREFERENCE_RATES = ByForm(whole=1e-6, adapter=1e-5)
BETA, SIMPO_BETA = 0.1, 2.0
ROW_SIDES = 4  # sides of full length that a packed row has room for


@dataclass(frozen=True, kw_only=True)
class PairedOptions(Tuned):
    """Options of every recipe whose examples stand in a row as two neighbouring documents."""

    RATES: ClassVar[ByForm] = PREFERENCE_RATES

    max_length: int = option("the most tokens of a prompt with one of its completions; a row has room for two to four of them",
                             group="data",
                             default=1024)
    too_long: Literal["drop", "truncate", "error"] = option("what to do with examples that have a longer completion; truncate cuts at the "
                                                            "end",
                                                            group="data", default="drop")
    packing: bool = option("pack several examples into each row; they do not attend to each other", group="data", default=True)
    held_out: float = option("share of the prompts whose examples are never trained on, and scored at every evaluation", group="evaluation",
                             least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these examples instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("passes over the examples, reshuffled each time", group="budget", least=1, default=1)
    eval_examples: int = option("held-out examples scored at each evaluation; the final model is scored on all",
                                group="evaluation", least=2, default=256)
    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None, default_text=str(PREFERENCE_RATES))

    @property
    def row_length(self) -> int:
        """A row holds a pair at least; in rows of two full pairs, where a step has as many tokens, the shorter ones leave less padding."""
        return self.max_length * max(2, min(ROW_SIDES if self.packing else 2, self.batch_tokens // self.max_length))


@dataclass(frozen=True, kw_only=True)
class AgainstReference(PairedOptions):
    """Options of the recipes that compare the policy with its parent."""

    reference: Literal["stored", "live"] = option(
        "how the reference's log-probabilities are computed: once for all examples before step 1, into RUN/reference (stored), or for "
        "each batch, by frozen reference weights beside the policy (live)", group="method", default="stored")


@dataclass(frozen=True, kw_only=True)
class Dpo(AgainstReference):
    """Train a model on preference pairs with DPO or a variant of it, the whole model or a LoRA adapter. The same command resumes an
    interrupted run in --out.

    The reference is the starting model. Its log-probabilities are computed once, before step 1, and kept in RUN/reference; with
    --reference live they are computed for each batch.
    """

    data: tuple[str, ...] = option("pairs: .jsonl(.gz), .parquet or .csv with prompt, chosen and rejected as texts or lists of messages, "
                                   "or with chosen and rejected that begin alike; several files are read as one or, where each has its "
                                   "share of the rows (a.jsonl:0.7 b.jsonl:0.3), as a mixture", group="data", metavar="FILE")
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "simpo", "orpo"] = option(
        "loss: DPO (sigmoid), DPO with means over tokens (sigmoid_norm), IPO, SLiC's hinge, or robust DPO; SimPO and ORPO, which have no "
        "reference",
        group="method", default="sigmoid")
    beta: float | None = option("strength of the log-ratio to the reference; with simpo and orpo the weight of the preference",
                                group="method", above=0, default=None, default_text=f"{BETA:g}; with --loss-type simpo {SIMPO_BETA:g}")
    label_smoothing: float = option("expected share of wrongly labelled pairs: with sigmoid conservative DPO, with robust unbiased",
                                    group="method", least=0, below=0.5, default=0.0)
    simpo_gamma: float = option("the margin by which the chosen answer's reward should be larger",
                                needs="--loss-type simpo", group="method", least=0,
                                default=0.5)

    def strength(self) -> float:
        """Beta, as asked for or as the loss has it."""
        return self.beta or (SIMPO_BETA if self.loss_type == "simpo" else BETA)

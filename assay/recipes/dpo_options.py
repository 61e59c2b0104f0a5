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

    max_length: int = option("most tokens of a prompt with one of its completions; a row has room for two to four of them", group="data",
                             default=1024)
    too_long: Literal["drop", "truncate", "error"] = option("what happens to examples with a longer completion; they are cut at the end",
                                                            group="data", default="drop")
    packing: bool = option("several examples share a row and do not see each other", group="data", default=True)
    held_out: float = option("share of the prompts whose examples are never trained on and scored at every evaluation", group="evaluation",
                             least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these examples instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("how often the examples are read, reshuffled each time", group="budget", least=1, default=1)
    eval_examples: int = option("held-out examples that an evaluation scores; the model that is handed over is scored on all",
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
        "the parent's log-probabilities: of all examples once, before step 1, kept in RUN/reference (stored); or of each batch as it is "
        "read, by the parent's frozen weights beside the policy (live)", group="method", default="stored")


@dataclass(frozen=True, kw_only=True)
class Dpo(AgainstReference):
    """Teach a model which of two answers is preferred, the whole of it or a LoRA adapter. An interrupted run in --out goes on where it
    stopped.

    The reference is the model as it was given. Its log-probabilities are computed once, before step 1, and kept in RUN/reference; with
    --reference live they are computed for each batch.
    """

    data: tuple[str, ...] = option("pairs: .jsonl(.gz), .parquet or .csv with prompt, chosen and rejected, texts or lists of messages, or "
                                   "chosen and rejected that begin alike; several files are read as one, or, each with the share of the "
                                   "rows that come from it (a.jsonl:0.7 b.jsonl:0.3), as a mixture", group="data", metavar="FILE")
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "simpo", "orpo"] = option(
        "DPO (sigmoid), by means over tokens (sigmoid_norm), IPO, SLiC's hinge, robust DPO; SimPO and ORPO, which have no reference",
        group="method", default="sigmoid")
    beta: float | None = option("how much the log-ratio to the reference counts; of SimPO and ORPO the weight of the preference",
                                group="method", above=0, default=None, default_text=f"{BETA:g}; with --loss-type simpo {SIMPO_BETA:g}")
    label_smoothing: float = option("share of pairs that may be labelled wrongly: with sigmoid conservative DPO, with robust unbiased",
                                    group="method", least=0, below=0.5, default=0.0)
    simpo_gamma: float = option("with --loss-type simpo: the margin that the chosen answer's reward should have", group="method", least=0,
                                default=0.5)

    def strength(self) -> float:
        """Beta, as asked for or as the loss has it."""
        return self.beta or (SIMPO_BETA if self.loss_type == "simpo" else BETA)

"""Options of KTO: which answers were called good or bad, how much each kind weighs, and how far the policy may go from its reference."""

from dataclasses import dataclass
from typing import Literal

from assay.config import option
from assay.recipes.dpo_options import BETA, AgainstReference


@dataclass(frozen=True, kw_only=True)
class Kto(AgainstReference):
    """Train a model with KTO on single answers labelled desirable or undesirable, the whole model or a LoRA adapter. The same command
    resumes an interrupted run in --out.

    The reference is the starting model. Its log-probabilities are computed once, before step 1, and kept in RUN/reference: of every
    answer, and of an answer to another prompt, by which the KL of the policy is estimated; with --reference live they are computed for
    each batch.
    """

    data: tuple[str, ...] = option("answers: .jsonl(.gz), .parquet or .csv with prompt, completion (texts or lists of messages) and "
                                   "label, true or false; or with prompt, chosen and rejected; several files are read as one or, where "
                                   "each has its share of the rows (a.jsonl:0.7 b.jsonl:0.3), as a mixture", group="data", metavar="FILE")
    loss_type: Literal["kto", "apo_zero_unpaired"] = option("loss: KTO, relative to the KL of the whole step, or unpaired APO-zero, "
                                                            "relative to 0",
                                                            group="method", default="kto")
    beta: float = option("strength of the log-ratio to the reference", group="method", above=0, default=BETA)
    desirable_weight: float = option("weight of the desirable answers", group="method", above=0, default=1.0)
    undesirable_weight: float = option("weight of the undesirable answers; weight times number should be about equal for both kinds",
                                       group="method",
                                       above=0, default=1.0)

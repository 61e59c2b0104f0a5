"""Options of a reward model: which pairs it learns to tell apart, and how its rewards are kept about 0."""

from dataclasses import dataclass
from typing import ClassVar

from assay.config import option
from assay.recipes.dpo_options import PairedOptions
from assay.recipes.options import ByForm

REWARD_RATES = ByForm(whole=1e-5, adapter=1e-4)


@dataclass(frozen=True, kw_only=True)
class RewardModel(PairedOptions):
    """Teach a model what an answer is worth, from pairs of which one is preferred (Bradley–Terry). An interrupted run in --out goes on
    where it stopped.

    The reward is the logit of the token <|reward|> at the end of a text. What is handed over serves as assay grpo --reward model:PATH.
    """

    RATES: ClassVar[ByForm] = REWARD_RATES

    data: tuple[str, ...] = option("pairs: .jsonl(.gz), .parquet or .csv with prompt, chosen and rejected, as in assay dpo; several as "
                                   "one, or by weight (a.jsonl:0.7 b.jsonl:0.3)", group="data", metavar="FILE")
    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None,
                                         default_text=f"{REWARD_RATES.whole:g}")
    center_rewards_coefficient: float = option("weight of (chosen + rejected)², which keeps rewards about 0; TRL suggests 0.01",
                                               group="method", least=0, default=0.0)
    probe_samples: int = option("texts by which a proof may judge what a checkpoint says; a reward model is not there to speak",
                                group="checkpoints", least=0, default=0)

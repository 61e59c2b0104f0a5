"""lm-eval adapter (extra): EleutherAI's harness scores our checkpoints through its three requests.

    from lm_eval import simple_evaluate
    simple_evaluate(model=lm_eval_model("runs/a/checkpoints/step-000500"), tasks=["arc_easy"])
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.evaluation.loaded_model import LoadedModel
from assay.generate.generation_request import Sampling
from assay.store.artifact import open_artifact

MAX_NEW = 256  # where a task names no limit


def lm_eval_model(path: str | Path, *, base: str | None = None, device: str = "cpu", seed: int = 0) -> Any:
    """An lm_eval.api.model.LM. Prompts are taken as lm-eval writes them: it has its own chat templates and few-shot texts."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UsageError("scoring through lm-eval needs the package of that name; pip install lm-eval") from None
    opened = LoadedModel(open_artifact(path, base=base), device=device)

    class Examinee(LM):
        tokenizer_name = opened.tokenizer.digest

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            likelihoods, greedy = opened.loglikelihood(pairs), opened.greedily(pairs)
            return [(likelihood.nats, said) for likelihood, said in zip(likelihoods, greedy, strict=True)]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [likelihood.nats for likelihood in opened.loglikelihood_rolling([request.args[0] for request in requests])]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return generate_texts(opened, [request.args for request in requests], seed=seed)

        def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            return opened.tokenizer.render(chat_history, add_generation_prompt=add_generation_prompt)

    return Examinee()


def generate_texts(opened: LoadedModel, requests: Sequence[tuple[str, dict[str, Any]]], *, seed: int) -> list[str]:
    """Requests with the same options are served together."""
    alike: dict[tuple[Sampling, tuple[str, ...]], dict[str, str]] = {}
    for number, (prompt, options) in enumerate(requests):
        alike.setdefault((sampling_of(options, seed), stop_strings(options.get("until", ()))), {})[str(number)] = prompt
    texts: dict[str, str] = {}
    for (sampling, stop), prompts in alike.items():
        found = opened.generate_until(prompts, sampling, k=1, stop=stop, raw=True)
        texts |= {number: completion.text or "" for number, [completion] in found.items()}
    return [texts[str(number)] for number in range(len(requests))]


def sampling_of(options: dict[str, Any], seed: int) -> Sampling:
    """An option that we would have to ignore is refused: the score would be of another request."""
    known = {"until", "max_gen_toks", "max_new_tokens", "temperature", "do_sample", "top_p", "top_k"}
    if strange := sorted(set(options) - known):
        raise UsageError(f"lm-eval asks for {strange[0]} = {options[strange[0]]!r}, which the sampler does not have")
    warm = options.get("do_sample", options.get("temperature", 0) > 0)
    return Sampling(max_new=options.get("max_gen_toks", options.get("max_new_tokens", MAX_NEW)),
                    temperature=options.get("temperature", 1.0) if warm else 0.0,
                    top_p=options.get("top_p", 1.0), top_k=options.get("top_k", 0), seed=seed)


def stop_strings(until: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings of a request; one may come bare: taken letter by letter it would cut every answer short."""
    return tuple(text for text in ([until] if isinstance(until, str) else until) if text)

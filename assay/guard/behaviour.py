"""Checks on what the reloaded model does: the live model's answers, also through other people's loaders; texts that end.
"""

import contextlib
import importlib.util
import io
import warnings
from typing import Any, cast

import torch

from assay.generate.sampler import Completion, Sampling, sample
from assay.guard.subject import Subject
from assay.model.families import FAMILIES
from assay.model.probe import Answer, distance, questions
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact
from assay.verdict import Verdict, proven, refuted, unproven

# Relative error of the answers. The same fp32 weights on another machine or through another implementation differ by
# rounding (1e-6 to 1e-5 seen). A wrong rotary base moves them by 0.3 in SmolLM2-135M, and by 2e-3 in a model that has
# not learned anything yet: the faintest fault that must show.
SAME_WEIGHTS = 2e-4
TEXTS = ("The capital of France is", "def add(a, b):\n", "Once upon a time")
QUESTIONS = ("Say yes.", "What is 2 + 2? Reply with the number only.", "Name one colour, in one word.")  # short answers end soon
NEW_TOKENS, AGAIN = 32, 8


def check_answers(subject: Subject) -> Verdict:
    """The reloaded model answers the probe as the live one did when it was saved."""
    if subject.raw.checkpoint is None or not subject.raw.checkpoint.probes():
        return unproven("answers", "nothing recorded what the live model answered before it was saved", optional=subject.is_copy)
    error = distance(subject.answers, Answer(**subject.raw.checkpoint.probes()))
    words = f"probe logits differ from the live model's by {error:.1e} (relative), bound {SAME_WEIGHTS:.0e}"
    if not error <= SAME_WEIGHTS:
        return refuted("answers", f"{words}: the bytes are intact but the model computes something else",
                       error=str(error), bound=SAME_WEIGHTS)
    return proven("answers", words, error=error, bound=SAME_WEIGHTS)


def check_consumer(subject: Subject) -> Verdict:
    """The same folder through transformers or PEFT: nothing missing, nothing left over, the same answers."""
    if reason := _no_consumer(subject):
        return unproven("consumer", reason, optional=True)
    name = "peft" if subject.raw.place.adapter else "transformers"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # their progress bars and advice
        warnings.simplefilter("ignore")
        model, problems = _load_with_peft(subject.artifact) if subject.raw.place.adapter else _load_with_transformers(subject.artifact)
    if problems:
        return refuted("consumer", f"{name} does not load it whole: {'; '.join(problems)}", problems=problems)
    tokens, ids = questions(subject.artifact.config.vocab, subject.artifact.config.max_length)
    with torch.no_grad():
        logits = model(tokens).logits.float()
    error = distance(Answer(logits[..., ids], logits.logsumexp(-1)), subject.answers)
    words = f"through {name} the answers differ by {error:.1e} (relative), bound {SAME_WEIGHTS:.0e}"
    if not error <= SAME_WEIGHTS:
        return refuted("consumer", f"{words}: {name} makes another model of these files", error=str(error), bound=SAME_WEIGHTS)
    return proven("consumer", words, error=error, bound=SAME_WEIGHTS)


def check_generations(subject: Subject) -> Verdict:
    """A few greedy texts: valid ids, the same twice, and ended by a stop token where the model was taught to stop."""
    artifact = subject.artifact
    completions = greedy(subject.model, artifact)
    again = greedy(subject.model, artifact, AGAIN)
    if [c.ids[:AGAIN] for c in completions] != [c.ids for c in again]:
        return refuted("generations", "two greedy generations from the same prompts differ; something in the model is not deterministic")
    ended = _ended(completions)
    texts = [artifact.tokenizer.decode(list(c.ids)) if artifact.tokenizer else str(c.ids[:12]) for c in completions]
    words = f"{ended} of {len(completions)} greedy generations ended within {max(len(c.ids) for c in completions)} tokens"
    evidence = {"ended": ended, "n": len(completions), "texts": texts}
    if ended or subject.facts.get("taught_to_stop") is False:
        return proven("generations", words if ended else f"{words}; nothing has taught this model to stop yet", **evidence)
    if subject.facts.get("taught_to_stop") or (subject.against is not None and _ended(greedy(subject.against_model, subject.against))):
        return refuted("generations", f"{words}, though the model was taught to stop: the stop token or the template was lost", **evidence)
    if subject.is_copy:
        return proven("generations", f"{words}; the source's do not end either", **evidence)
    reason = "whether it was taught to stop is not recorded" if artifact.stops.stop_ids else "no stop id is known"
    return unproven("generations", f"{words}; {reason}", **evidence)


def greedy(model: Transformer, artifact: Artifact, new: int = NEW_TOKENS) -> list[Completion]:
    longest = artifact.config.max_length
    room = longest - min(NEW_TOKENS, longest // 2)  # the same prompts, however much is generated
    return sample(model, prompts(artifact, room), artifact.stops.stop_ids,
                  Sampling(max_new=min(new, longest - room), temperature=0))


def prompts(artifact: Artifact, room: int) -> list[list[int]]:
    """Three short prompts as this model takes them: through its chat template, as plain text, or as bare ids."""
    tokenizer = artifact.tokenizer
    if tokenizer is None:
        tokens, _ = questions(artifact.config.vocab, artifact.config.max_length)
        return [row[:8].tolist() for row in tokens]
    if tokenizer.template is not None:
        turns = [[{"role": "user", "content": text}] for text in QUESTIONS]
        encoded = [tokenizer.encode(tokenizer.render(turn, add_generation_prompt=True)) for turn in turns]
    else:
        encoded = [tokenizer.encode(text) for text in TEXTS]
    return [ids[-room:] or [0] for ids in encoded]


def _ended(completions: list[Completion]) -> int:
    return sum(completion.ended == "stop" for completion in completions)


def _no_consumer(subject: Subject) -> str | None:
    wanted = ["transformers", "peft"] if subject.raw.place.adapter else ["transformers"]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed (pip install 'assay[hf]'), so only Assay's own loader has read it"
    if subject.raw.squeezed is not None:
        return "a squeezed file is Assay's own; nobody else reads it"
    if FAMILIES[subject.artifact.config.family].gguf is None:
        return f"transformers has no {subject.artifact.config.family!r} architecture; only Assay loads it"
    if subject.artifact.base is not None and subject.artifact.base.raw.place.kind == "gguf":
        return "the base is a GGUF file, which PEFT cannot adapt as it is"
    return None


def _load_with_transformers(artifact: Artifact) -> tuple[torch.nn.Module, list[str]]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, options = artifact.path, {}
    if artifact.raw.place.kind == "gguf":
        path, options = path.parent, {"gguf_file": path.name}
    loader: Any = transformers.AutoModelForCausalLM  # its types do not know that it returns a pair here
    model, info = loader.from_pretrained(path, dtype=torch.float32, output_loading_info=True, local_files_only=True,
                                         trust_remote_code=False, attn_implementation="eager", **options)
    tied = {"lm_head.weight"} if artifact.config.tied else set()
    problems = [f"{kind}: {sorted(map(str, keys))[:3]}" for kind, keys in info.items() if set(map(str, keys)) - tied]
    return model.eval(), problems


def _load_with_peft(artifact: Artifact) -> tuple[torch.nn.Module, list[str]]:
    import peft

    assert artifact.base is not None
    base, problems = _load_with_transformers(artifact.base)
    if artifact.config.vocab != artifact.base.config.vocab:
        cast(Any, base).resize_token_embeddings(artifact.config.vocab)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base, str(artifact.path))
    problems += [str(w.message).split("\n")[0][:160] for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
    return model.eval(), problems


"""Behaviour checks on a reloaded model: the live model's answers, texts that end, and healthy samples.

Of the samples only what is wrong with a text whatever was asked counts: loops, bytes that make no characters, words in no order;
and nothing said, which proves nothing. A run may well teach another language or nothing but sums; `assay probe` judges that too.

When it counts: REFUTED where more of the texts are shown to be malformed than are tolerated, and more of them than of the parent's
to the same prompts. Without a parent nothing can have been lost: a model in its first steps babbles, and that is UNPROVEN. So is
silence: a model that was taught one thing alone may have nothing to say to the rest.
"""

import contextlib
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from assay.evaluation.loaded_model import LoadedModel
from assay.generate.engine import sample
from assay.generate.generation_request import Completion, Sampling
from assay.guard.proof_subject import ProofSubject
from assay.health.degenerate import Expected
from assay.health.generation_probe import Health, ModelGenerator, compare_health, probe
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS, ProbePrompt
from assay.model.families import HARMLESS, config_to_hf, hf_layout, to_foreign
from assay.model.probe_logits import ProbeLogits, probe_distance, probe_inputs
from assay.model.transformer import Transformer
from assay.statistics.sequential import SEQUENTIAL_LEVEL
from assay.store.artifact import Artifact
from assay.store.compressed_tensors import recipe_of
from assay.store.export_artifact import EXPORT_ROUNDING, majority_dtype
from assay.strict_json import read_json_if_there
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

# Relative error of the answers. The same fp32 weights on another machine or through another implementation differ by
# rounding (1e-6 to 1e-5 seen). A wrong rotary base moves them by 0.3 in SmolLM2-135M, and by 2e-3 in a model that has
# not learned anything yet: the faintest fault that must show.
SAME_WEIGHTS = 2e-4
INDEX = "model.safetensors.index.json"
TEXTS = ("The capital of France is", "def add(a, b):\n", "Once upon a time")
QUESTIONS = ("Say yes.", "What is 2 + 2? Reply with the number only.", "Name one colour, in one word.")  # short answers end soon
NEW_TOKENS, AGAIN = 32, 8
MORE_TOKENS = 256  # for a model that may have learned to say more than its parent
KNOWN_STOP = 0.1  # a parent that gives its stop token less came upon it by chance
STOP_SHARE = 0.1  # of the parent's probability: a child that leaves its stop token less has lost it


def check_answers(subject: ProofSubject) -> Verdict:
    """The reloaded model answers the probe as the live one did when it was saved."""
    if subject.raw.checkpoint is None or not subject.raw.checkpoint.probes():
        return unproven("answers", "nothing recorded what the live model answered before it was saved", optional=subject.is_copy)
    error = probe_distance(subject.answers, ProbeLogits(**subject.raw.checkpoint.probes()))
    words = f"probe logits differ from the live model's by {error:.1e} (relative), bound {SAME_WEIGHTS:.0e}"
    if not error <= SAME_WEIGHTS:
        return refuted("answers", f"{words}: the bytes are intact but the model computes something else",
                       error=str(error), bound=SAME_WEIGHTS)
    return proven("answers", words, error=error, bound=SAME_WEIGHTS)


def check_consumer(subject: ProofSubject) -> Verdict:
    """Check the same folder through transformers or PEFT: nothing missing, nothing left over, the same answers."""
    if reason := _no_consumer(subject):
        return unproven("consumer", reason, optional=True)
    folder = (subject.artifact.base or subject.artifact).path
    if "metadata" not in (read_json_if_there(folder / INDEX) or {"metadata": {}}):
        return refuted("consumer", f"{folder / INDEX} has no metadata, without which transformers does not open the folder; add "
                                   '"metadata": {} to it')
    if subject.raw.place.kind == "gguf":
        return _gguf_consumer(subject)
    return _read_by(subject, partial(_load_with_peft, subject) if subject.raw.place.adapter else
                    partial(_loaded, subject.artifact, subject.device))


def _read_by(subject: ProofSubject, load: Callable[[], tuple[torch.nn.Module, list[str]]]) -> Verdict:
    name = "peft" if subject.raw.place.adapter else "transformers"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # their progress bars and advice
        warnings.simplefilter("ignore")
        model, problems = load()
    if problems:
        return refuted("consumer", f"{name} does not load it whole: {'; '.join(problems)}", problems=problems)
    tokens, ids = probe_inputs(subject.artifact.config.vocab, subject.artifact.config.max_length)
    error = probe_distance(_consumer_answers(model, tokens, ids, subject.device), subject.answers)
    _give_base_back(subject, model)
    bound = _consumer_bound(subject)
    words = f"through {name} the answers differ by {error:.1e} (relative), bound {bound:.0e}"
    if not error <= bound:
        return refuted("consumer", f"{words}: {name} makes another model of these files", error=str(error), bound=bound)
    return proven("consumer", words, error=error, bound=bound)


def _gguf_consumer(subject: ProofSubject) -> Verdict:
    """transformers has a reader of GGUF for some architectures, and for some of those reads a part of the geometry: what it does not look
    at in a header is no fault of the file. Where it makes another model by its own reading, it is given the geometry and asked again."""
    try:
        found = _read_by(subject, partial(_loaded, subject.artifact, subject.device))
    except (ValueError, RuntimeError, KeyError) as error:
        if "is not supported yet" in str(error):
            return unproven("consumer", f"transformers cannot read it ({error}); llama.cpp does", optional=True)
        found = refuted("consumer", f"transformers does not open it: {type(error).__name__}: {str(error).splitlines()[0]}")
    if found.outcome is not Outcome.REFUTED:
        return found
    misread = _misread_fields(subject.artifact)
    if not misread:
        return found
    told = _read_by(subject, partial(_loaded, subject.artifact, subject.device, config=_own_config(subject.artifact)))
    if told.outcome is Outcome.REFUTED:
        return told
    words = (f"transformers' reader of GGUF takes {', '.join(misread[:4])}, which it does not look up in the header; told so, it is the "
             f"same model ({told.reason}). Open it with llama.cpp, or use a folder for transformers")
    return unproven("consumer", words, optional=True, fields=misread, **told.evidence)


def _own_config(artifact: Artifact) -> Any:
    import transformers

    fields = config_to_hf(artifact.config, "float32")
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def _misread_fields(artifact: Artifact) -> list[str]:
    """Fields of the geometry that transformers takes from a GGUF file and that are not what its header says, in words."""
    import transformers

    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        read = transformers.AutoConfig.from_pretrained(artifact.path.parent, gguf_file=artifact.path.name, local_files_only=True)
    theirs, ours = read.to_dict(), _own_config(artifact).to_dict()
    unsaid = {"rope_scaling", "rope_theta", "router_aux_loss_coef", "max_window_layers"}  # in other fields, or of no effect here
    named = config_to_hf(artifact.config, "float32").keys() - HARMLESS - unsaid
    return [f"{name} for {str(theirs[name])[:80]} where it is {str(ours[name])[:80]}" for name in sorted(named & theirs.keys())
            if not _alike(theirs[name], ours.get(name))]


def _alike(one: Any, other: Any) -> bool:
    """GGUF has numbers in single precision."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def _consumer_bound(subject: ProofSubject) -> float:
    """A library that computes with codes rounds what goes into each layer as well, as the folder's config asks it to; and what codes and
    scales stand for, to the scales' dtype."""
    if not subject.raw.compressed:
        return SAME_WEIGHTS
    scheme = recipe_of(subject.raw.fields, str(subject.path)).scheme
    scales = {name: tensor for name, tensor in subject.raw.tensors.items() if name.endswith(".weight_scale")}
    return scheme.answers if scheme.activations else EXPORT_ROUNDING[majority_dtype(scales)]


@torch.no_grad()
def _consumer_answers(model: torch.nn.Module, tokens: Tensor, ids: Tensor, device: str) -> ProbeLogits:
    """Logits through transformers, computed on the CPU where the device has no room for one more model: whatever is proven beside it stays
    there."""
    try:
        logits = model.to(device)(tokens.to(device)).logits.float().cpu()
    except torch.OutOfMemoryError:
        logits = model.to("cpu")(tokens).logits.float()
    return ProbeLogits(logits[..., ids], logits.logsumexp(-1))


def known_of_source(subject: ProofSubject, check: str) -> Verdict | None:
    """Earlier verdict on the very same bytes: of a copy whose source, file for file the same and written by the same code, carries a
    hallmark that says so. One model speaks alike wherever its files lie."""
    source = None if subject.against is None or not subject.is_copy else subject.against.raw.checkpoint
    mine = subject.raw.checkpoint
    if source is None or mine is None or source.hallmark is None or mine.model_files() != source.model_files():
        return None
    if any(mine.facts.get(name) != source.facts.get(name) for name in ("code", "environment", "base")):
        return None
    said = next((verdict for verdict in source.hallmark["verdicts"] if verdict["check"] == check), None)
    if said is None or said["outcome"] != Outcome.PROVEN:
        return None
    return proven(check, f"these are the files of {source.folder.name}, byte for byte, of which its hallmark says: {said['reason']}",
                  **said["evidence"] | {"shared_with": source.digest})


def check_generations(subject: ProofSubject) -> Verdict:
    """A few greedy texts: valid ids, the same twice, and ended by a stop token where the model was taught to stop."""
    if (known := known_of_source(subject, "generations")) is not None:
        return known
    artifact = subject.artifact
    completions = greedy_completions(subject.model, artifact)
    again = greedy_completions(subject.model, artifact, AGAIN)
    if [c.ids[:AGAIN] for c in completions] != [c.ids for c in again]:
        return refuted("generations", "two greedy generations from the same prompts differ; something in the model is not deterministic")
    ended = _ended(completions)
    texts = [artifact.tokenizer.decode(list(c.ids)) if artifact.tokenizer else str(c.ids[:12]) for c in completions]
    words = f"{ended} of {len(completions)} greedy generations ended within {max(len(c.ids) for c in completions)} tokens"
    evidence = {"ended": ended, "n": len(completions), "texts": texts}
    if ended:
        return proven("generations", words, **evidence)
    if subject.facts.get("taught_to_stop"):
        return refuted("generations", f"{words}, though the model was taught to stop: the stop token or the template was lost", **evidence)
    if subject.against is not None and (verdict := _held_to_parent(subject, subject.against, words, evidence)) is not None:
        return verdict
    if subject.is_copy:
        return proven("generations", f"{words}; the source's do not end either", **evidence)
    if subject.facts.get("taught_to_stop") is False:
        before = "nothing has taught this model to stop yet" if subject.against is None else "its parent's do not end either"
        return proven("generations", f"{words}; {before}", **evidence)
    reason = "whether it was taught to stop is not recorded" if artifact.stops.stop_ids else "no stop id is known"
    return unproven("generations", f"{words}; {reason}", **evidence)


def _held_to_parent(subject: ProofSubject, parent: Artifact, words: str, evidence: dict[str, Any]) -> Verdict | None:
    """Compare a model whose texts do not end with its parent: whether it lost what its parent knew. None where the parent's do not end
    either.

    A model that learned to say more ends later. So it is given more room, and a stop is lost only where it is no longer likely where
    the parent's own texts ended.
    """
    if _template_lost(subject.artifact, parent):
        if _ended(greedy_completions(subject.against_model, parent)):
            return refuted("generations", f"{words}, and its parent's end: the chat template was lost", **evidence)
        return None
    ends = _ends_of_parent(subject, parent)
    known = _stop_likelihood(subject.against_model, ends, parent.stops.stop_ids)
    if known < KNOWN_STOP:
        return None
    later = _ended(greedy_completions(subject.model, subject.artifact, MORE_TOKENS, room_for=MORE_TOKENS))
    if later:
        return proven("generations", f"{words}, {later} within {MORE_TOKENS}", **evidence)
    left = _stop_likelihood(subject.model, ends, subject.artifact.stops.stop_ids)
    words = (f"{words} nor within {MORE_TOKENS}; where its parent's texts end, a stop token has probability {left:.2g}, "
             f"the parent gives it {known:.2g}")
    evidence = evidence | {"stop_likelihood": left, "stop_likelihood_of_parent": known}
    if left < known * STOP_SHARE:
        return refuted("generations", f"{words}: training or saving has lost the stop token; see that the data ends its answers with "
                                      "one, and that it is learned from", **evidence)
    return unproven("generations", f"{words}: longer texts, or texts without an end", optional=True, **evidence)


def _template_lost(artifact: Artifact, parent: Artifact) -> bool:
    tokenizers = (artifact.tokenizer, parent.tokenizer)
    return [tokenizer is not None and tokenizer.template is not None for tokenizer in tokenizers] == [False, True]


def _ends_of_parent(subject: ProofSubject, parent: Artifact) -> list[list[int]]:
    """The prompts as the child takes them with what its parent says to them, up to where a stop token came."""
    longest = min(parent.config.max_length, subject.artifact.config.max_length)
    room = longest - min(NEW_TOKENS, longest // 2)
    prompts, vocab = short_prompts(subject.artifact, room), min(parent.config.vocab, subject.artifact.config.vocab)
    if max(map(max, prompts)) >= vocab:
        return []  # tokens that the parent does not have
    said = sample(subject.against_model, prompts, parent.stops.stop_ids, Sampling(max_new=longest - room, temperature=0), graphed=False)
    ends = [[*prompt, *completion.ids[:-1]] for prompt, completion in zip(prompts, said, strict=True) if completion.ended == "stop"]
    return [end for end in ends if max(end) < vocab]


@torch.no_grad()
def _stop_likelihood(model: Transformer, ends: list[list[int]], stop_ids: Collection[int]) -> float:
    """How likely any stop token is at the end of these texts, on average; 0 where there are none."""
    if not ends or not stop_ids:
        return 0.0
    tokens = [torch.tensor([end], device=model.embed.weight.device) for end in ends]
    found = [model.logits(model.hidden(end))[0, -1].float().softmax(-1)[list(stop_ids)].sum() for end in tokens]
    return float(torch.stack(found).mean())


def greedy_completions(model: Transformer, artifact: Artifact, new: int = NEW_TOKENS, *, room_for: int = NEW_TOKENS) -> list[Completion]:
    longest = artifact.config.max_length
    room = longest - min(room_for, longest // 2)  # the same prompts, however much is generated
    return sample(model, short_prompts(artifact, room), artifact.stops.stop_ids,
                  Sampling(max_new=min(new, longest - room), temperature=0), graphed=False)


def short_prompts(artifact: Artifact, room: int) -> list[list[int]]:
    """Three short prompts as this model takes them: through its chat template, as plain text, or as bare ids."""
    tokenizer = artifact.tokenizer
    if tokenizer is None:
        tokens, _ = probe_inputs(artifact.config.vocab, artifact.config.max_length)
        return [row[:8].tolist() for row in tokens]
    if tokenizer.template is not None:
        turns = [[{"role": "user", "content": text}] for text in QUESTIONS]
        encoded = [tokenizer.encode(tokenizer.render(turn, add_generation_prompt=True)) for turn in turns]
    else:
        encoded = [tokenizer.encode(text) for text in TEXTS]
    return [ids[-room:] or [0] for ids in encoded]


def _ended(completions: list[Completion]) -> int:
    return sum(completion.ended == "stop" for completion in completions)


def _no_consumer(subject: ProofSubject) -> str | None:
    wanted = ["transformers", "peft"] if subject.raw.place.adapter else ["transformers"]
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed (pip install 'assay[hf]'), so only Assay's own loader has read it"
    if subject.raw.place.format.unreadable is not None:
        return subject.raw.place.format.unreadable
    if subject.raw.compressed and importlib.util.find_spec("compressed_tensors") is None:
        return "transformers loads such codes with compressed-tensors, which is not installed (pip install 'assay[compressed]')"
    if subject.artifact.config.family == "assay":
        return f"transformers has no {subject.artifact.config.family!r} architecture; only Assay loads it"
    if subject.artifact.base is not None and subject.artifact.base.raw.place.kind == "gguf":
        return "the base is a GGUF file, which PEFT cannot adapt as it is"
    if subject.artifact.base is not None and subject.artifact.base.held and subject.artifact.config.experts is not None:
        return f"PEFT was not shown it: a mixture's base in {subject.artifact.base.held} is not put into transformers' own model"
    return None


def _loaded(artifact: Artifact, device: str, **options: Any) -> tuple[torch.nn.Module, list[str]]:
    """Load the model through transformers, straight onto a GPU where `accelerate` is there for it and the GPU has room: an fp32 copy of a
    large model on the host takes minutes."""
    if device == "cpu" or importlib.util.find_spec("accelerate") is None:
        return _load_with_transformers(artifact, **options)
    try:
        return _load_with_transformers(artifact, device_map={"": device}, **options)
    except torch.OutOfMemoryError:
        return _load_with_transformers(artifact, **options)


def _load_with_transformers(artifact: Artifact, **options: Any) -> tuple[torch.nn.Module, list[str]]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = artifact.path
    if artifact.raw.place.kind == "gguf":
        path, options = path.parent, options | {"gguf_file": path.name}
    loader: Any = transformers.AutoModelForCausalLM  # its types do not know that it returns a pair here
    model, info = loader.from_pretrained(path, dtype=torch.float32, output_loading_info=True, local_files_only=True,
                                         trust_remote_code=False, attn_implementation="eager", **options)
    tied = {"lm_head.weight"} if artifact.config.tied else set()
    problems = [f"{kind}: {sorted(map(str, keys))[:3]}" for kind, keys in info.items() if set(map(str, keys)) - tied]
    return model.eval(), problems


def _load_with_peft(subject: ProofSubject) -> tuple[torch.nn.Module, list[str]]:
    import peft

    artifact, problems = subject.artifact, list[str]()
    assert artifact.base is not None
    assert subject.read.base is not None

    def load(of: Artifact = artifact.base) -> torch.nn.Module:
        model, found = _loaded(of, subject.device)
        problems.extend(found)
        if of.held is not None:
            problems.extend(_put_in(model, to_foreign(hf_layout(of.config), of.tensors)))
        return model.to(subject.device)

    base = subject.kept.place(subject.read.base).lend_consumer(subject.device, load)
    if artifact.config.vocab != artifact.base.config.vocab:
        cast(Any, base).resize_token_embeddings(artifact.config.vocab)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(base, str(artifact.path))
    problems += [str(w.message).split("\n")[0][:160] for w in caught if "missing" in str(w.message) or "unexpected" in str(w.message)]
    return model.eval(), problems


@torch.no_grad()
def _put_in(model: torch.nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """The weights that an adapter was trained on, where its base was held in few bits, in the place of their file's."""
    state = model.state_dict()
    for name in weights.keys() & state.keys():
        state[name].copy_(weights[name])
    return [f"no place for {name}" for name in sorted(weights.keys() - state.keys())[:3]]


def _give_base_back(subject: ProofSubject, model: torch.nn.Module) -> None:
    """Keep, on a GPU, the base that transformers loaded for the next adapter, once this one is taken off it."""
    artifact = subject.read
    if artifact.base is not None and subject.device != "cpu" and artifact.config.vocab == artifact.base.config.vocab:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject.kept.place(artifact.base).take_back(subject.device, cast(Any, model).unload())


PROMPT_NAMES = ("chat-greeting", "chat-explain", "short-colour", "reasoning-order", "code-function", "other-sea", "other-soup",
                "other-list")
ANY_TEXT = Expected(script="", code=True, numbers=True, short=True, ends=False)
_FEWEST = 4  # prompts that must fit into the context
BOUND = 0.5  # what a few clean samples must exclude: of the runs that went wrong every other text was malformed
HEALTH_SAMPLING = Sampling(max_new=32, temperature=0.7)


def check_health(subject: ProofSubject) -> Verdict:
    """A few samples prove little, so what they leave open is UNPROVEN and not demanded; what they refute stops a run."""
    if subject.probing.samples == 0:
        return unproven("health", "no texts were asked for (--probe-samples 0)", optional=True)
    if subject.artifact.tokenizer is None:
        return unproven("health", "there is no tokenizer here, so nothing that it says is text", optional=True)
    if (known := known_of_source(subject, "health")) is not None:
        return known
    try:
        return _judged(subject, subject.probing.device)
    except torch.OutOfMemoryError:  # the run that is proven here may fill its GPU
        if subject.device != "cpu":
            raise  # then all of the proof is made on the CPU
        return _judged(subject, "cpu")


def _judged(subject: ProofSubject, device: str) -> Verdict:
    built = device == subject.device  # the proof has built both there already
    ahead = 1 if device == "cpu" else subject.probing.samples
    child = _speaker(subject.artifact, subject.model if built else None, device, ahead)
    prompts = health_prompts(child)
    if len(prompts) < _FEWEST:
        return unproven("health", f"a context of {subject.artifact.config.max_length} tokens has no room for our questions", optional=True)
    parent = None
    if subject.against is not None and subject.against.tokenizer is not None:
        parent = _speaker(subject.against, subject.against_model if built else None, device, ahead)
    # What it was not taught surprises a parent; words in no order do so far more than our prompts, which are in order.
    of_parent: dict[str, Any] = {"surprise": parent.surprise, "usual": parent.reading(prompts)} if parent else {}
    probed = partial(probe, child, prompts, n=subject.probing.samples, bound=BOUND, **of_parent)
    health = probed(enough=lambda health: health.malformed or health.healthy)
    verdict = health.verdict()
    if health.malformed:
        verdict = _held_against(health, probed, partial(probe, parent, prompts) if parent else None)
    optional = {"optional": True} if verdict.outcome is Outcome.UNPROVEN else {}
    return replace(verdict, evidence=health.verdict().evidence | verdict.evidence | {"device": device} | optional)


def _held_against(first: Health, again: Callable[..., Health], of_parent: Callable[..., Health] | None) -> Verdict:
    """Malformed texts are held against a model whose parent's are not, and only where that is shown, by all the samples there may be."""
    if of_parent is None:
        return unproven("health", f"{first.sentence}; it has no parent whose texts were better: in its first steps every model babbles")
    spoken, parent = _spoken(first), _spoken(of_parent(n=first.rounds))
    if not spoken.malformed:
        return unproven("health", f"{first.sentence}; nothing is wrong with what was said")
    if parent.bad >= spoken.bad:
        return unproven("health", f"{first.sentence}; of its parent's {parent.bad} of {len(parent.samples)}: no better")
    health = _spoken(again(enough=lambda _: False))
    parent = _spoken(of_parent(n=health.rounds, enough=lambda _: False))
    effect, _ = compare_health(health, parent)
    words = f"{health.sentence}; of its parent's {parent.bad} of {len(parent.samples)}"
    if effect.mean > 0 and effect.p <= 1 - SEQUENTIAL_LEVEL:
        return refuted("health", f"{words}: shown worse, p = {effect.p:.2g} (--probe-samples 0 leaves this check out)",
                       **health.verdict().evidence, parent_bad=parent.bad)
    return unproven("health", f"{words}: not shown worse", **health.verdict().evidence, parent_bad=parent.bad)


def _spoken(health: Health) -> Health:
    """Samples in which silence is no fault."""
    silent = [sample.wrong is not None and sample.wrong.cause == "empty" for sample in health.samples]
    return replace(health, samples=tuple(replace(sample, wrong=None) if nothing else sample
                                         for sample, nothing in zip(health.samples, silent, strict=True)))


def health_prompts(speaker: ModelGenerator) -> tuple[ProbePrompt, ...]:
    """Questions that fit, for a model that answers; beginnings, as much of them as fits, for one that continues. Any text is an answer."""
    room = speaker.loaded.model.config.max_length - HEALTH_SAMPLING.max_new
    if speaker.raw:
        wanted = tuple(replace(prompt, text=_end(prompt.text, speaker, room)) for prompt in TEXT_BEGINNINGS)
    else:
        wanted = tuple(prompt for prompt in BUILT_IN_PROMPTS if prompt.id in PROMPT_NAMES
                       and speaker.loaded.length_of(prompt.text, raw=False) <= room)
    return tuple(replace(prompt, expected=ANY_TEXT) for prompt in wanted if prompt.text)


def _end(text: str, speaker: ModelGenerator, room: int) -> str:
    """Last words of a text, as many as fit."""
    words = text.split(" ")
    fitting = (" ".join(words[first:]) for first in range(len(words)))
    return next((end for end in fitting if speaker.loaded.length_of(end, raw=True) <= room), "")


def _speaker(artifact: Artifact, built: Transformer | None, device: str, ahead: int = 1) -> ModelGenerator:
    """Generator for the texts of a proof. Nothing is compiled: a few hundred tokens are over sooner."""
    return ModelGenerator(LoadedModel(artifact, device=device, model=built, graphed=False), HEALTH_SAMPLING, ahead=ahead)

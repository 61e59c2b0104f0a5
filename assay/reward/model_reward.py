"""Learned reward: what a reward model that `assay reward-model` made says a completion is worth, in a worker process of its own.

It reads a text as in its training, whatever tokenizer and template the policy has: messages by its own template, plain text as it is.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from assay.data.batch import Batch
from assay.data.chat import TrainingExample, render_conversations, text_prefix_ids
from assay.data.layouts import Conversation
from assay.errors import AssayError, DataError, UsageError
from assay.learn.bradley_terry import REWARD_TOKEN, token_rewards
from assay.model.placement import place_for_inference
from assay.model.transformer import Transformer
from assay.reward.worker_pool import AskedPrompt
from assay.store.artifact import Artifact, build_model, open_artifact, refuse_quarantined

STAND_IN = "yes"  # for a completion, where the prompt alone is looked at
_UNBOUNDED = 10**9  # tokens: what is too long for the reward model is an error row, and is not cut


def text_reward(path: str, prompt: str, completion: str, device: str) -> float:
    """Reward of the prompt as the policy was given it, with the completion and the end of its turn."""
    return ids_reward(path, text_ids(reward_artifact(path), prompt, completion), device)


def ids_reward(path: str, ids: Sequence[int], device: str) -> float:
    artifact, model = reward_artifact(path), loaded_reward_model(path, device)
    if len(ids) > artifact.config.max_length:
        raise DataError(f"{len(ids)} tokens, and the reward model {path} reads {artifact.config.max_length}")
    assert artifact.tokenizer is not None
    with torch.no_grad():
        batch = Batch(torch.tensor([list(ids)]), torch.zeros(1, len(ids))).to(device)
        return float(token_rewards(model, batch, artifact.tokenizer.ids[REWARD_TOKEN])[0, -1])


def text_ids(artifact: Artifact, prompt: str, completion: str) -> list[int]:
    """Token ids of a text as in training: the prompt, the completion, and the token that ends it."""
    assert artifact.tokenizer is not None
    begin, asked = text_prefix_ids(artifact.tokenizer), artifact.tokenizer.encode(prompt)
    end = artifact.stops.turn_end if artifact.stops.turn_end is not None else artifact.stops.eos
    body = asked if asked[: len(begin)] == begin else begin + asked
    return [*body, *artifact.tokenizer.encode(completion), *([] if end is None else [end])]


def read_by_reward_model(path: str, said: Sequence[tuple[AskedPrompt, str]]) -> list[TrainingExample]:
    """Prompts with completions, written by the reward model's own template and tokenizer as its training pairs were."""
    artifact = reward_artifact(path)
    assert artifact.tokenizer is not None
    conversations = [_conversation(path, artifact, *each) for each in said]
    return render_conversations(conversations, artifact.tokenizer, artifact.stops, length=_UNBOUNDED).examples


def reading_ids(path: str, said: Sequence[tuple[AskedPrompt, str]]) -> list[list[int] | str]:
    """Token ids that the reward model reads for each prompt and completion; or why its template does not render it."""
    try:
        read = read_by_reward_model(path, [(asked, completion if completion.strip() else STAND_IN) for asked, completion in said])
        return [_ids(path, example, completion) for example, (_, completion) in zip(read, said, strict=True)]
    except AssayError as error:
        return [str(error)] if len(said) == 1 else [reading for each in said for reading in reading_ids(path, [each])]


def _ids(path: str, example: TrainingExample, completion: str) -> list[int]:
    """Token ids that were read; of a completion that says nothing, which no training text does, its prompt and the end of a turn around
    it."""
    ids, tokenizer = example.tokens.tolist(), reward_artifact(path).tokenizer
    assert tokenizer is not None
    return ids if completion.strip() else [*ids[: example.prompt], *tokenizer.encode(completion), ids[-1]]


def _conversation(path: str, artifact: Artifact, asked: AskedPrompt, completion: str) -> Conversation:
    assert artifact.tokenizer is not None
    if asked.messages and artifact.tokenizer.template is not None:
        messages = (*asked.messages, {"role": "assistant", "content": completion})
        return Conversation(f"{asked.where}:", asked.where, messages, learned_from=len(asked.messages), tools=asked.tools)
    if asked.plain is None:
        raise UsageError(f"--reward model:{path}: {asked.where} has messages, and the reward model has no chat template to read them by; "
                         "train one on a model that has a template, or give prompts as text")
    return Conversation(f"{asked.where}:", asked.where, plain=(asked.plain, completion))


@lru_cache(maxsize=2)
def reward_artifact(path: str) -> Artifact:
    """Open a reward model; anything else is refused."""
    artifact = refuse_quarantined(open_artifact(path))
    if artifact.tokenizer is None or REWARD_TOKEN not in artifact.tokenizer.ids:
        raise UsageError(f"--reward model:{path}: its tokenizer has no {REWARD_TOKEN}: it is no reward model; make one with assay "
                         "reward-model")
    return artifact


@lru_cache(maxsize=2)
def loaded_reward_model(path: str, device: str) -> Transformer:
    return place_for_inference(build_model(reward_artifact(path), None).requires_grad_(False), device).eval()

"""Learned reward: what a reward model that `assay reward-model` made says a completion is worth, in a worker process of its own."""

from functools import lru_cache

import torch

from assay.data.batch import Batch
from assay.data.chat import text_prefix_ids
from assay.errors import DataError, UsageError
from assay.learn.bradley_terry import REWARD_TOKEN, token_rewards
from assay.model.placement import place_for_inference
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, build_model, open_artifact


def text_reward(path: str, prompt: str, completion: str, device: str) -> float:
    """Of the prompt as the policy was given it, with the completion and the end of its turn."""
    artifact, model = reward_artifact(path), loaded_reward_model(path, device)
    ids = text_ids(artifact, prompt, completion)
    if len(ids) > artifact.config.max_length:
        raise DataError(f"{len(ids)} tokens, and the reward model {path} reads {artifact.config.max_length}")
    assert artifact.tokenizer is not None
    with torch.no_grad():
        batch = Batch(torch.tensor([ids]), torch.zeros(1, len(ids))).to(device)
        return float(token_rewards(model, batch, artifact.tokenizer.ids[REWARD_TOKEN])[0, -1])


def text_ids(artifact: Artifact, prompt: str, completion: str) -> list[int]:
    """As in training: the prompt, the completion, and the token that ends it."""
    assert artifact.tokenizer is not None
    begin, asked = text_prefix_ids(artifact.tokenizer), artifact.tokenizer.encode(prompt)
    end = artifact.stops.turn_end if artifact.stops.turn_end is not None else artifact.stops.eos
    body = asked if asked[: len(begin)] == begin else begin + asked
    return [*body, *artifact.tokenizer.encode(completion), *([] if end is None else [end])]


@lru_cache(maxsize=2)
def reward_artifact(path: str) -> Artifact:
    """Refused unless it is a reward model."""
    artifact = open_artifact(path)
    if artifact.tokenizer is None or REWARD_TOKEN not in artifact.tokenizer.ids:
        raise UsageError(f"--reward model:{path}: its tokenizer has no {REWARD_TOKEN}: it is no reward model; make one with assay "
                         "reward-model")
    return artifact


@lru_cache(maxsize=2)
def loaded_reward_model(path: str, device: str) -> Transformer:
    return place_for_inference(build_model(reward_artifact(path), None).requires_grad_(False), device).eval()

"""Drawn records: a rollout that waits to be learned from, as JSON in a checkpoint, and read back as it was."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from assay.agents.episodes import PlayedEpisodes, SampledTurn
from assay.agents.trajectory import Piece, TokenSequence, Trajectory
from assay.generate.generation_request import Completion
from assay.recipes.prompts import Prompt
from assay.recipes.rewards import Group
from assay.recipes.rollouts import DrawnGroups
from assay.reward.worker_pool import ScoredItem


def drawn_json(drawn: DrawnGroups | PlayedEpisodes) -> dict[str, Any]:
    if isinstance(drawn, DrawnGroups):
        places = {id(group): place for place, group in enumerate(drawn.everything)}
        return {"everything": [group_json(group) for group in drawn.everything], "groups": [places[id(group)] for group in drawn.groups]}
    return {"episodes": [[asdict(trajectory) for trajectory in group] for group in drawn.groups],
            "sampled": [{"prompt": list(turn.prompt), "completion": asdict(turn.completion)} for turn in drawn.sampled],
            "given": drawn.given, "over": drawn.over}


def read_drawn(facts: Mapping[str, Any], prompts: Sequence[Prompt]) -> DrawnGroups | PlayedEpisodes:
    if "everything" in facts:
        by_id = {prompt.id: prompt for prompt in prompts}
        everything = [Group(by_id[group["prompt"]], [kept_completion(said) for said in group["completions"]],
                            [ScoredItem(**scored) for scored in group["scored"]]) for group in facts["everything"]]
        return DrawnGroups([everything[place] for place in facts["groups"]], everything)
    return PlayedEpisodes([[read_trajectory(each) for each in group] for group in facts["episodes"]],
                          [SampledTurn(tuple(turn["prompt"]), kept_completion(turn["completion"])) for turn in facts["sampled"]],
                          {name: list(rewards) for name, rewards in facts["given"].items()}, list(facts["over"]))


def group_json(group: Group) -> dict[str, Any]:
    return {"prompt": group.prompt.id, "completions": [asdict(said) for said in group.completions],
            "scored": [{"value": each.value, "error": each.error, "components": dict(each.components)} for each in group.scored]}


def kept_completion(facts: Mapping[str, Any]) -> Completion:
    return Completion(**{**facts, "ids": tuple(facts["ids"]), "logprobs": tuple(facts["logprobs"])})


def read_trajectory(facts: Mapping[str, Any]) -> Trajectory:
    sequences = tuple(TokenSequence(tuple(Piece(**{**piece, "ids": tuple(piece["ids"]), "logprobs": tuple(piece["logprobs"])})
                                          for piece in sequence["pieces"])) for sequence in facts["sequences"])
    return Trajectory(**{**facts, "sequences": sequences, "messages": tuple(facts["messages"]), "rewards": tuple(facts["rewards"])})

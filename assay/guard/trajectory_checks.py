"""Trajectory checks: what is trained on is what was sampled and nothing else, each reward once, and no kind of episode is lost.

They are made from the engine's own record of every turn and the environments' own record of every reward, not from what the recipe
made of them.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from assay.agents.episodes import SampledTurn
from assay.agents.tool_calls import TOOL_FORMATS, ToolCall, ToolFormat
from assay.agents.trajectory import Trajectory
from assay.agents.transcript import CANARY_CALL, CANARY_TOOL, call_as_templated
from assay.data.batch import Batch
from assay.guard.loss_preflight import loss_gradients
from assay.guard.policy_identity import document_arrays
from assay.learn.advantage import Normalise
from assay.learn.objectives import Loss, Objective
from assay.learn.policy import token_logprobs
from assay.model.attention import PADDING
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted, unproven

SAME_WEIGHT = 1e-5  # relative: token weights are held in fp32
HASH_BASE = 1_000_003
LEFT_TO_LEARN = -1e-3  # nats: below it a token that counts has a gradient; of one that is certain nothing may be left
FEWEST_OF_A_KIND = 20  # episodes that a share of errors is at least taken of
KNOWN_CALLS = (CANARY_CALL, ToolCall("assay_other", {"words": 'two "words"', "deep": '{"not": "read"}'}))
# Turns of each format with how many calls and how many faults they hold: calls that were not closed, are no JSON, or were only thought of.
KNOWN_TURNS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "hermes": (('<tool_call>{"name": "a", "arguments": {}}', 0, 1), ("<tool_call>no</tool_call>", 0, 1),
               ('<think><tool_call>{"name": "a", "arguments": {}}</tool_call></think>no', 0, 0),
               ('<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>no</tool_call>', 1, 1)),
    "qwen3_coder": (("<tool_call><function=a></function>", 0, 1), ("<tool_call>no</tool_call>", 0, 1),
                    ("<think><tool_call><function=a></function></tool_call></think>no", 0, 0),
                    ("<tool_call><function=a><parameter=b>1</function></tool_call>", 0, 1),
                    ("<tool_call><function=a></function></tool_call><tool_call>no</tool_call>", 1, 1)),
    "llama3": (("<|python_tag|>no", 0, 1), ('{"name": "a", "parameters": ', 0, 1), ('{"name": "a", "parameters": {}}; {"name": 3}', 1, 1)),
    "mistral": (("[TOOL_CALLS]no", 0, 1), ("[TOOL_CALLS]a[ARGS]{", 0, 1), ("[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]a[ARGS]no", 1, 1)),
    "gpt_oss": (("<|channel|>commentary to=functions.a<|message|>no<|call|>", 0, 1), ("<|channel|>commentary to=functions.a", 0, 1),
                ("<|channel|>analysis<|message|>functions.a({})", 0, 0),
                ("<|channel|>commentary to=functions.a<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=b<|message|>{}",
                 1, 1))}


def check_token_law(batch: Batch, sampled: Sequence[SampledTurn], counted: Counter[tuple[int, ...]], *, stop_ids: Collection[int],
                    cap: int) -> Verdict:
    """Every sequence of the batch ends with a turn that was sampled after what stands before it; what counts are sampled tokens.

    `counted` are the token sequences of trajectories that are learned from, as often as they occur: of these every sampled token counts.
    A turn shorter than the cap ends with a stop id.
    """
    for turn in sampled:
        said = turn.completion
        if len(said.ids) < cap and said.ids[-1] not in stop_ids:
            return refuted("token_law", f"a turn of {len(said.ids)} of {cap} tokens ends with id {said.ids[-1]}, which stops nothing: its "
                           "stop token was cut off")
    rows, whole, tokens = document_arrays(batch), Counter[tuple[int, ...]](), 0
    written = [tuple(ids.tolist()) for ids, _ in rows]
    for ids, (_, weight), said_T in zip(written, rows, sampled_places(sampled, written), strict=True):
        if said_T is None:
            return refuted("token_law", f"a trained sequence of {len(ids)} ids has turns that were never sampled after what stands before "
                           "them: its history was written anew, or its text was encoded again")
        wrong = np.flatnonzero((weight != 0) & ~said_T)
        if len(wrong):
            return refuted("token_law", f"{len(wrong)} tokens of a sequence of {len(ids)} are trained on that the policy did not sample "
                           f"(the first at place {wrong[0]}): an environment's or a template's words", tokens=len(wrong))
        whole[ids] += bool((weight[said_T] != 0).all())
        tokens += int(said_T.sum())
    if lost := counted - whole:
        return refuted("token_law", f"{sum(lost.values())} of {counted.total()} sequences that count are not in the batch with all that "
                       "was sampled in them: a branch or a turn is lost")
    if more := whole - counted:
        return refuted("token_law", f"{sum(more.values())} sequences are trained on that should not count: their episodes ended with an "
                       "error, or hit a cap that is masked")
    return proven("token_law", f"{len(sampled)} turns were sampled; {len(rows)} sequences hold {tokens} of their tokens as they were, and "
                  "no other counts", turns=len(sampled), sequences=len(rows))


def sampled_places(sampled: Sequence[SampledTurn], sequences: Sequence[tuple[int, ...]]) -> list[NDArray[np.bool_] | None]:
    """Mask of each sequence's sampled tokens, by the engine's own record of every turn and what that was sampled after; None where the last
    turn was not sampled after what stands before it.

    Whether a beginning of a sequence is what a turn was sampled after is asked by hashes, for all at once: there are many beginnings,
    and comparing each with each would take longer than a step. What the hashes find is then compared.
    """
    after: dict[int, list[SampledTurn]] = {}
    for turn, value in zip(sampled, whole_hashes([turn.prompt for turn in sampled]), strict=True):
        after.setdefault(value, []).append(turn)
    hashes_NT, length_N = prefix_hashes(sequences), np.array([len(ids) for ids in sequences])
    begins_NT = np.isin(hashes_NT, np.array(list(after), np.uint64)) & (np.arange(hashes_NT.shape[1]) < length_N[:, None])
    found: list[NDArray[np.bool_] | None] = []
    for number, ids in enumerate(sequences):
        said_T, ended = np.zeros(len(ids), bool), False
        for place in np.flatnonzero(begins_NT[number]).tolist():
            for prompt, said in after[int(hashes_NT[number, place])]:
                begin, end = place + 1, place + 1 + len(said.ids)
                if ids[begin:end] == said.ids and ids[:begin] == prompt:
                    said_T[begin:end] = True
                    ended |= end == len(ids)
        found.append(said_T if ended else None)
    return found


def prefix_hashes(sequences: Sequence[tuple[int, ...]]) -> NDArray[np.uint64]:
    """(N, T): of every beginning of each sequence, modulo 2⁶⁴; what stands after a sequence's end is no hash."""
    lengths = [len(ids) for ids in sequences]
    width = max(lengths, default=0)
    ids_NT = np.zeros((len(sequences), width), np.uint64)
    ids_NT[np.arange(width) < np.array(lengths, np.int64)[:, None]] = np.fromiter(chain.from_iterable(sequences), np.uint64, sum(lengths))
    return np.cumsum((ids_NT + np.uint64(1)) * np.cumprod(np.full(width, HASH_BASE, np.uint64)), 1)


def whole_hashes(sequences: Sequence[tuple[int, ...]]) -> list[int]:
    hashes_NT = prefix_hashes(sequences)
    return [int(hashes[len(ids) - 1]) for ids, hashes in zip(sequences, hashes_NT, strict=True)]


def check_every_turn(sampled: Sequence[SampledTurn], trajectories: Sequence[Trajectory]) -> Verdict:
    """Each turn that the engine sampled stands in one trajectory, with its log-probabilities and its version as they were."""
    due = Counter((turn.completion.ids, turn.completion.logprobs, turn.completion.version) for turn in sampled)
    held = Counter((turn.ids, turn.logprobs, turn.version) for trajectory in trajectories for turn in trajectory.turns)
    if lost := due - held:
        return refuted("every_turn", f"{sum(lost.values())} of {len(sampled)} sampled turns are in no trajectory as they were sampled: a "
                       "branch was lost, or a turn changed")
    if more := held - due:
        return refuted("every_turn", f"{sum(more.values())} turns of the trajectories were never sampled, or stand in two of them")
    return proven("every_turn", f"{len(sampled)} sampled turns stand in {len(trajectories)} trajectories", turns=len(sampled))


def check_trajectory_weights(batch: Batch, trajectories: Sequence[Trajectory], counted_N: Sequence[bool], normalise: Normalise,
                             cap: int) -> Verdict:
    """A trajectory weighs what it should with all its sequences together, and the batch is divided by what it should be."""
    weights: dict[tuple[int, ...], float] = {}
    for ids_T, weight_T in document_arrays(batch):
        ids = (*ids_T.tolist(),)
        weights[ids] = weights.get(ids, 0.0) + float(weight_T.sum(dtype=np.float64))
    rows = Counter(sequence.ids for trajectory in trajectories for sequence in trajectory.sequences)
    for trajectory, counts in zip(trajectories, counted_N, strict=True):
        due = 0.0 if not counts else 1.0 if normalise == "sequence" else float(trajectory.tokens)
        shared = any(rows[sequence.ids] > 1 for sequence in trajectory.sequences)  # two that say the same may count differently
        found = sum(weights.get(sequence.ids, 0.0) for sequence in trajectory.sequences)
        if not shared and abs(found - due) > SAME_WEIGHT * max(1.0, due):
            return refuted("trajectory_weights", f"episode {trajectory.episode} with {len(trajectory.sequences)} sequences "
                           f"and {trajectory.tokens} sampled tokens weighs {found:.4g} where {due:.4g} is due")
    due_all = sum(1.0 if normalise == "sequence" else float(trajectory.tokens)
                  for trajectory, counts in zip(trajectories, counted_N, strict=True) if counts)
    if abs((found_all := sum(weights.values())) - due_all) > SAME_WEIGHT * max(1.0, due_all):  # of those that say the same, together
        return refuted("trajectory_weights", f"the batch weighs {found_all:.4g}, {sum(counted_N)} trajectories that count {due_all:.4g}")
    divisor = float(sum(counted_N) * cap) if normalise == "constant" else None
    if divisor is not None and (batch.divisor is None or abs(batch.divisor - divisor) > SAME_WEIGHT * divisor):
        return refuted("trajectory_weights", f"the batch is divided by {batch.divisor}, {sum(counted_N)} trajectories of at most {cap} "
                       f"tokens give {divisor:g}")
    return proven("trajectory_weights", f"{sum(counted_N)} of {len(counted_N)} trajectories count, each as one", counted=sum(counted_N))


def check_episode_rewards(trajectories: Sequence[Trajectory], rewards: Sequence[float | None],
                          given: Mapping[str, Sequence[float]]) -> Verdict:
    """Each episode's reward is the sum of what its environment gave, each step once; an error has none. `given` is the pool's record, or
    a server's, in which what was never paid does not stand."""
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        name = trajectory.episode
        if trajectory.error is not None:
            if reward is not None:
                return refuted("episode_rewards", f"episode {name} ended with an error ({trajectory.error}) and has a reward of "
                               f"{reward:g}: an error is no reward", episode=name)
            continue
        if name not in given and reward is not None:
            return refuted("episode_rewards", f"episode {name} was given no reward and is learned from with {reward:g}: unknown is not 0",
                           episode=name)
        due = sum(given.get(name, ()))
        if reward is None or abs(reward - due) > 1e-9 * max(1.0, abs(due)):
            return refuted("episode_rewards", f"episode {name} was given rewards that add up to {due:g}, and is learned "
                           f"from with {reward}: a reward was lost, or counted twice", episode=name)
    return proven("episode_rewards", f"{len(trajectories)} episodes have the rewards that their environments gave",
                  episodes=len(trajectories))


def check_episode_ends(trajectories: Sequence[Trajectory], over: Collection[str], turns: int) -> Verdict:
    """An episode is done where its environment said so, and nowhere else; one that ran out of turns had all of them. `over` is the pool's
    own record."""
    for trajectory in trajectories:
        name, said = trajectory.episode, trajectory.episode in over
        if trajectory.error is None and (trajectory.ended == "done") != said:
            return refuted("episode_ends", f"episode {name} ended by {trajectory.ended!r} after {len(trajectory.turns)} turns, and its "
                           f"environment said that it {'is over' if said else 'goes on'}: it was cut short, or went on alone", episode=name)
        if trajectory.error is None and trajectory.ended == "turns" and len(trajectory.turns) != turns:
            return refuted("episode_ends", f"episode {name} ended for want of turns after {len(trajectory.turns)} of {turns}", episode=name)
    return proven("episode_ends", f"{len(over)} of {len(trajectories)} episodes are done, each as its environment said")


def check_episode_figures(measured: Mapping[str, float], trajectories: Sequence[Trajectory]) -> Verdict:
    """Check the metrics of a rollout's episodes, counted again by the standard library."""
    counts: dict[str, Callable[[Trajectory], int]] = {
        "episodes/turns": lambda each: len(each.turns), "episodes/sequences": lambda each: len(each.sequences),
        "episodes/calls": lambda each: sum(len(said.get("tool_calls", ())) for said in each.messages),
        "episodes/faults": lambda each: sum(len(said.get("faults", ())) for said in each.messages),
        "episodes/done": lambda each: each.ended == "done"}
    due = {name: statistics.fmean(map(count, trajectories)) for name, count in counts.items()}
    wrong = [f"{name} is {value:.6g}, written {measured.get(name)}" for name, value in due.items()
             if name not in measured or not math.isclose(measured[name], value, rel_tol=SAME_WEIGHT, abs_tol=SAME_WEIGHT)]
    if wrong:
        return refuted("episode_figures", f"the episodes do not give what is written of them: {'; '.join(wrong)}", wrong=wrong)
    return proven("episode_figures", f"{len(due)} figures of {len(trajectories)} episodes are what they give when they are counted again")


def check_kinds(dropped: Mapping[str, int], every: Mapping[str, int], allowed: float) -> Verdict:
    """Check that of no kind of episode (with tools, without) more is dropped than errors are allowed: else the other kind alone is learned
    from."""
    shares = {kind: dropped.get(kind, 0) / max(count, FEWEST_OF_A_KIND) for kind, count in every.items()}
    words = "; ".join(f"{kind} {dropped.get(kind, 0)} of {count} dropped" for kind, count in every.items())
    over = [kind for kind, share in shares.items() if share > allowed]
    if over:
        return refuted("episode_kinds", f"{words}; {allowed:.3g} are allowed: episodes {over[0]} are not learned from, and the policy "
                       "would learn to do without", **{kind: dropped.get(kind, 0) for kind in every})
    if not any(every.values()):
        return unproven("episode_kinds", "there was no episode")
    return proven("episode_kinds", words or "there was no episode")


def check_tool_format(tokenizer: Tokenizer, spoken: ToolFormat) -> Verdict:
    """A tool call is read as the model's own chat template writes it: else every call of the policy would be taken for an answer, or for
    a fault, and it would be taught to call in another way than it knows. And known turns are read as what they are, calls and faults once
    each."""
    if (misread := misread_turn(spoken)) is not None:
        return refuted("tool_format", f"in the format {spoken.name} {misread}")
    turn = None if tokenizer.template is None else call_as_templated(tokenizer)
    if turn is None:
        return unproven("tool_format", f"the chat template writes no tool calls, so nothing shows that the model's are read; they are "
                        f"expected in the format {spoken.name}", optional=True)
    if CANARY_CALL in spoken.read(turn, [CANARY_TOOL]).calls:
        return proven("tool_format", f"a call as the chat template writes it is read in the format {spoken.name}")
    return refuted("tool_format", f"the chat template writes a tool call as {turn[:200]!r}, which the format {spoken.name} does not read; "
                   f"there are {', '.join(TOOL_FORMATS)} (--tool-format), or give the model a template that writes one of these")


def misread_turn(spoken: ToolFormat) -> str | None:
    """A known turn, and how it is read, where that is wrong."""
    for count in range(len(KNOWN_CALLS) + 1):
        text = spoken.write("I shall look.", KNOWN_CALLS[:count])
        read = spoken.read(text, [CANARY_TOOL])
        said = "I shall look." if "I shall look." in text else ""  # where a turn has calls, Llama 3 says nothing beside them
        if (read.calls, read.faults, read.content) != (KNOWN_CALLS[:count], (), said):
            return f"{text!r} is read as {read}: calls that were made are lost, or others are made"
    for text, calls, faults in KNOWN_TURNS[spoken.name]:
        read = spoken.read(text, [])
        if (len(read.calls), len(read.faults)) != (calls, faults):
            return f"{text!r} is read as {len(read.calls)} calls and {len(read.faults)} faults; due are {calls} and {faults}"
    return None


def check_inserted_tokens(model: Transformer, objective: Objective, batch: Batch, sampled_BT: torch.Tensor) -> Verdict:
    """Check that there is no gradient at what the policy did not sample, though there be a large advantage at its places: the state that
    predicts an inserted token gets none, and the loss is the same with it, bit for bit."""
    assert batch.documents is not None
    inserted = (~sampled_BT & (batch.documents != PADDING).cpu())[:, 1:]
    if not inserted.any() or not batch.weight.any():
        return unproven("inserted_tokens", "nothing was inserted, or nothing counts", optional=True)
    assert batch.advantage is not None
    loss, _ = _state_gradients(model, objective, batch)
    strange = torch.where(sampled_BT.to(batch.tokens.device), 0.0, 100.0)
    changed, gradient = _state_gradients(model, objective, replace(batch, advantage=batch.advantage + strange))
    total, other = float(loss.total.detach()), float(changed.total.detach())
    wrong = int((gradient[:, :-1].abs().amax(-1).cpu() != 0)[inserted].sum())
    if wrong or total != other:
        return refuted("inserted_tokens", f"{wrong} of {int(inserted.sum())} inserted tokens are learned from, and with an advantage at "
                       f"their places the loss is {other:.6g} instead of {total:.6g}: a tool's result is trained on", tokens=wrong)
    learned = int((gradient[:, :-1].abs().amax(-1).cpu() != 0).sum())
    return proven("inserted_tokens", f"none of {int(inserted.sum())} inserted tokens gets a gradient, {learned} sampled ones do",
                  inserted=int(inserted.sum()), sampled=learned)


def check_inserted_ids(model: Transformer, objective: Objective, batch: Batch, sampled_BT: torch.Tensor, temperature: float) -> Verdict:
    """Check that the same tokens are learned from, whatever a tool or a template says: with other ids in the inserted places the loss has
    the same weight, what does not count gets no gradient, and whatever had one has one still.

    The other ids are the inserted ones, each a place further left, so that turns seem to begin elsewhere. As the text changes, so does what
    the policy thinks of its own words; they are taken for drawn as it thinks now, or the clip would silence some.
    """
    assert batch.documents is not None
    assert batch.advantage is not None
    inserted = ~sampled_BT.to(batch.tokens.device) & (batch.documents != PADDING)
    batch = replace(batch, advantage=torch.where(inserted, 100.0, batch.advantage))  # so that a gradient would show
    other = replace(batch, tokens=_moved_left(batch.tokens, inserted))
    places = int((other.tokens != batch.tokens).sum())
    if not places or not batch.weight.any():
        return unproven("inserted_ids", "nothing was inserted that could be another text, or nothing counts", optional=True)
    with torch.no_grad():
        logprobs = token_logprobs(model, other, temperature)[0]
    other = replace(other, behaviour=logprobs, reference=None if batch.reference is None else logprobs)
    before, after = (_state_gradients(model, objective, each) for each in (batch, other))
    had, has = (torch.nn.functional.pad(gradient.abs().amax(-1) != 0, (1, 0))[:, :-1] for _, gradient in (before, after))
    wrong, lost = int((has & (batch.weight == 0)).sum()), int((had & ~has & (logprobs < LEFT_TO_LEARN)).sum())
    weights = float(before[0].weight), float(after[0].weight)
    words = f"with other ids in {places} inserted places"
    if wrong or lost or weights[0] != weights[1]:
        return refuted("inserted_ids", f"{words} {wrong} tokens get a gradient that do not count, {lost} have lost theirs, and the loss "
                       f"has the weight {weights[1]:.6g} instead of {weights[0]:.6g}: a tool's words decide what is trained on; take what "
                       "counts from the batch's weights, and look for nothing in its ids", gained=wrong, lost=lost)
    return proven("inserted_ids", f"{words} the same {int(has.sum())} tokens get a gradient, none of them inserted", places=places,
                  learned=int(has.sum()))


def _moved_left(tokens_BT: torch.Tensor, places_BT: torch.Tensor) -> torch.Tensor:
    """Token ids of each row with those at these places moved to the place before; the first to the last."""
    moved = tokens_BT.clone()
    for row, places in zip(moved, places_BT, strict=True):
        row[places] = row[places].roll(-1)
    return moved


def _state_gradients(model: Transformer, objective: Objective, batch: Batch) -> tuple[Loss, torch.Tensor]:
    """The loss, and its gradient at the state that predicts each token."""
    held: list[torch.Tensor] = []
    losses: list[Loss] = []

    def keep(_: object, __: object, states: torch.Tensor) -> torch.Tensor:
        held.append(states.detach().requires_grad_())
        return held[-1]

    def measured() -> torch.Tensor:
        losses.append(objective(model, batch))
        return losses[-1].total

    handle = model.norm.register_forward_hook(keep)
    try:
        loss_gradients(model, measured)
    finally:
        handle.remove()
    gradient = held[-1].grad
    return losses[-1], torch.zeros_like(held[-1]) if gradient is None else gradient

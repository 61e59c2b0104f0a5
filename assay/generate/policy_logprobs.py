"""Policy log-probabilities: the distribution that tokens are drawn from, one for sampler and trainer.

Shapes: N tokens, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.errors import UsageError
from assay.generate.generation_request import Sampling
from assay.kernels.draw_tokens import SamplingRule, truncated_logprobs
from assay.kernels.softcap_ce import linear_logprobs
from assay.model.attention import PADDING, document_starts, documents_from_lengths
from assay.model.transformer import Transformer, softcap

_TOKENS = 16384  # of a batch that is scored at once
_ROWS = 512  # of logits alive at once, where they must exist whole

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]  # (prompt, completion) of each


def sampled_distribution(logits_NV: Tensor, sampling: Sampling, seen_NV: Tensor | None = None) -> Tensor:
    """Log-probabilities after penalty, temperature, top-k, top-p and min-p; greedy is the distribution that has one outcome.

    `seen_NV` marks the tokens that stand before each row's in prompt or completion; only a repetition penalty asks for it.
    """
    if sampling.repetition_penalty != 1:
        assert seen_NV is not None, "a repetition penalty needs to know what was said"
        logits_NV = with_repetition_penalty(logits_NV, seen_NV, torch.tensor(sampling.repetition_penalty, device=logits_NV.device))
    return truncated_logprobs(logits_NV, sampling_rule([sampling] * len(logits_NV), logits_NV.device))


def sampling_rule(samplings: Sequence[Sampling], device: torch.device | str) -> SamplingRule:
    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return SamplingRule(column([s.temperature for s in samplings], torch.float32), column([s.top_k for s in samplings], torch.int64),
                column([s.top_p for s in samplings], torch.float32), column([s.min_p for s in samplings], torch.float32))


def with_repetition_penalty(logits_NV: Tensor, seen_NV: Tensor, penalty: Tensor) -> Tensor:
    """A seen token's logit is divided by the penalty where it is positive, else multiplied by it."""
    return torch.where(seen_NV, torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty), logits_NV)


def policy_logits(model: Transformer, states_ND: Tensor) -> Tensor:
    """Logits of the policy in fp32, never rounded on the way, as in the trainer's fused loss, so that a policy ratio of 1 comes out as 1.
    """
    head_VD = model.head_weight()
    if states_ND.is_cuda and states_ND.dtype != torch.float32 and not torch.is_grad_enabled():
        logits_NV = torch.mm(states_ND, head_VD.to(states_ND.dtype).T, out_dtype=torch.float32)
    else:
        logits_NV = F.linear(states_ND.float(), head_VD.to(states_ND.dtype).float())
    return logits_NV if model.config.softcap is None else softcap(logits_NV, model.config.softcap)


def sampled_logprobs(model: Transformer, states_ND: Tensor, targets_N: Tensor, sampling: Sampling, seen_NV: Tensor | None = None) -> Tensor:
    """(N,) log-probability of each target under the sampled distribution, differentiable. Where nothing is cut off and nothing
    penalised, the logits never exist whole; -inf where the target was cut off."""
    if not sampling.truncates and sampling.repetition_penalty == 1:
        return linear_logprobs(states_ND, model.head_weight(), targets_N, softcap=model.config.softcap, temperature=sampling.temperature)
    logprobs_NV = sampled_distribution(policy_logits(model, states_ND), sampling, seen_NV)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)


@torch.no_grad()
def completion_logprobs(model: Transformer, sequences: Sequences, sampling: Sampling) -> list[Tensor]:
    """Log-probability of every completion token for each (prompt, completion), through the training path, without a cache.

    Under the distribution that `sampling` says it was drawn from. fp32, on the CPU.
    """
    refuse_beyond_reach(model.config.max_length, sequences)
    scored: dict[int, Tensor] = {}
    for part in _batches(sequences):
        states_BTD = _states(model, [(*sequences[i][0], *sequences[i][1]) for i in part])
        for row, index in enumerate(part):
            prompt, completion = sequences[index]
            before = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)  # the states that predict the completion
            scored[index] = _score(model, states_BTD[row, before], prompt, completion, sampling)
    return [scored[index].cpu() for index in range(len(sequences))]


def refuse_beyond_reach(context: int, sequences: Sequences) -> None:
    """A text that is longer than the context would get numbers all the same: of positions that mean nothing to the model."""
    longest = max((len(prompt) + len(completion) for prompt, completion in sequences), default=0)
    if longest > context:
        raise UsageError(f"a text to be scored has {longest:,} tokens, prompt and answer together, and the model's context is {context:,}: "
                         "beyond it positions mean nothing to the model; shorten the prompt (fewer examples in it), or leave it out")


def _score(model: Transformer, states_ND: Tensor, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling) -> Tensor:
    targets, found = torch.tensor(completion, device=states_ND.device), []
    for start in range(0, len(completion), _ROWS):
        part = slice(start, start + _ROWS)
        seen = None if sampling.repetition_penalty == 1 else tokens_seen_before(prompt, targets, part, model.config.vocab)
        found.append(sampled_logprobs(model, states_ND[part], targets[part], sampling, seen))
    return torch.cat(found) if found else states_ND.new_empty(0, dtype=torch.float32)


def tokens_seen_before(prompt: Sequence[int], targets_N: Tensor, part: slice, vocab: int) -> Tensor:
    """(n, V): for each target in `part`, which tokens stand before it."""
    first = torch.zeros(vocab, dtype=torch.bool, device=targets_N.device)
    first[torch.tensor(prompt, device=targets_N.device)] = True
    first[targets_N[: part.start]] = True
    targets = targets_N[part]
    said = F.one_hot(targets[:-1], vocab).cumsum(0) > 0
    return torch.cat([first[None], said | first])


def _states(model: Transformer, rows: list[tuple[int, ...]]) -> Tensor:
    device, width = model.embed.weight.device, max(map(len, rows))
    documents = documents_from_lengths([len(row) for row in rows], width)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    tokens[documents != PADDING] = torch.tensor([token for row in rows for token in row])
    starts = document_starts(documents).to(device) if device.type == "cuda" else None
    return model.hidden(tokens.to(device), documents=documents.to(device), starts=starts)


def _batches(sequences: Sequences) -> Iterator[list[int]]:
    """Indices, sequences of like length together, at most TOKENS with their padding."""
    lengths = [len(prompt) + len(completion) for prompt, completion in sequences]
    yield from batched_by_length(lengths, _TOKENS)


def batched_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches whose rows, padded to the longest, hold at most `tokens`; a longer row stands alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

"""The sampler draws from the distribution it reports, and a request does not depend on its neighbours."""

import pytest
import torch

from assay.errors import UsageError
from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.generate.policy_logprobs import sampled_distribution
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]


@pytest.fixture(scope="module")
def model():
    model = initialised(tiny_config("qwen3"), 0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # peaked enough that greedy has no ties
    return model.eval()


def test_greedy_is_the_argmax_of_a_full_pass(model):
    for prompt, completion in zip(PROMPTS, sample(model, PROMPTS, frozenset(), Sampling(max_new=12, temperature=0)), strict=True):
        whole = torch.tensor([[*prompt, *completion.ids]])
        assert model(whole)[0, len(prompt) - 1:-1].argmax(-1).tolist() == list(completion.ids)
        assert completion.ended == "length"
        assert set(completion.logprobs) == {0.0}


def test_logprobs_are_of_the_sampled_distribution(model):
    sampling = Sampling(max_new=10, temperature=0.7, top_k=20, top_p=0.9, seed=3)
    for prompt, completion in zip(PROMPTS, sample(model, PROMPTS, frozenset(), sampling), strict=True):
        whole = torch.tensor([[*prompt, *completion.ids]])
        logits = model(whole)[0, len(prompt) - 1:-1]
        expected = sampled_distribution(logits, sampling).gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_top_p_keeps_the_token_that_crosses_the_line():
    kept = sampled_distribution(torch.tensor([[0.5, 0.3, 0.2]]).log(), Sampling(top_p=0.6)).exp()
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0]]))


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    runs = [sample(model, PROMPTS, frozenset(), Sampling(max_new=8, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_stop_id_ends_its_request_only(model):
    free = sample(model, PROMPTS, frozenset(), Sampling(max_new=8, temperature=0))
    stop = free[0].ids[2]
    stopped = sample(model, PROMPTS, {stop}, Sampling(max_new=8, temperature=0))
    first = free[0].ids.index(stop)
    assert stopped[0].ids == free[0].ids[: first + 1]
    assert stopped[0].ended == "stop"
    assert len(stopped[1].ids) == 8 or stopped[1].ids[-1] == stop


@pytest.mark.parametrize(("prompt", "sentence"), [([], "no tokens"), ([320], "vocabulary ends at 319"), ([1] * 250, "context is 256")])
def test_what_cannot_be_served_is_refused(model, prompt, sentence):
    with pytest.raises(UsageError, match=sentence):
        sample(model, [prompt], frozenset(), Sampling(max_new=8))

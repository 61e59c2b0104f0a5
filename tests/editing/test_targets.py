"""Targets: what a state would make the model say, checked by putting it there in a plain forward pass."""

import pytest
import torch

from assay.editing.block_hooks import block, hooked, padded
from assay.editing.contexts import Contexts, sample_contexts
from assay.editing.facts import Fact, make_fact
from assay.editing.subject_tokens import answer_ids, locate_subject
from assay.editing.targets import Deltas, TargetOptions, find_targets, read_prefix
from assay.errors import DataError
from assay.model.transformer import Transformer, initialised
from assay.store.digests import weights_digest
from assay.testing import tiny_facts
from assay.testing.tiny_models import tiny_config
from tests.editing.lookup_model import lookup_model
from tests.editing.world import surroundings, tokenizer


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen3"])
def test_what_comes_before_may_be_computed_once(family: str):
    """Rows of any length, one of them with nothing before it."""
    model = initialised(tiny_config(family), 0)
    heads, tails = [(5, 6, 7, 8, 9), (), tuple(range(40))], [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    tokens, documents = padded(tails, torch.device("cpu"))
    with torch.no_grad():
        found = model.hidden(tokens, documents=documents, cache=read_prefix(model, heads))
        for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
            due = model.hidden(torch.tensor([head + tail]))[0, len(head) :]
            torch.testing.assert_close(found[row, : len(tail)], due, atol=2e-5, rtol=1e-4)


def test_the_probability_is_what_a_plain_forward_pass_gives_with_the_state_put_there():
    model, facts = lookup_model(), tiny_facts.fact_edits(3)
    targets = find_targets(model, tokenizer(), facts, surroundings(), 1, TargetOptions(steps=12, lr=0.1, clamp=1.0))
    for fact, target in zip(facts, targets, strict=True):
        surprise = 0.0
        for span in surroundings().spans(tokenizer(), fact):
            answer = answer_ids(tokenizer(), fact.target)

            def put(_, __, output, at=span.last, delta=target.delta):
                output = output.clone()
                output[0, at] += delta.float()
                return output

            with hooked([block(model, 1).register_forward_hook(put)]), torch.no_grad():
                logprobs = model(torch.tensor([[*span.ids, *answer]]))[0].log_softmax(-1)
            surprise -= float(logprobs[len(span.ids) - 1 : -1].gather(-1, torch.tensor(answer)[:, None]).mean())
        assert target.probability == pytest.approx(torch.tensor(-surprise / len(surroundings().prefixes)).exp().item(), rel=1e-3)


def test_the_state_is_the_bare_prompts_and_the_clamp_holds():
    model, facts = lookup_model(), tiny_facts.fact_edits(2)
    targets = find_targets(model, tokenizer(), facts, surroundings(), 1, TargetOptions(steps=15, lr=0.5, clamp=0.25))
    for fact, target in zip(facts, targets, strict=True):
        seen: list[torch.Tensor] = []
        span = surroundings().spans(tokenizer(), fact)[0]
        with hooked([block(model, 1).register_forward_hook(lambda _, __, output: seen.append(output[0]))]), torch.no_grad():  # noqa: B023
            model.hidden(torch.tensor([span.ids]))
        state = seen[0][span.last].double()
        torch.testing.assert_close(target.state - target.delta, state, atol=1e-4, rtol=1e-4)
        assert float(target.delta.norm()) <= 0.2501 * float(state.norm())
        assert target.clamped


@pytest.mark.arithmetic
def test_a_fact_does_not_see_its_neighbours_in_the_batch():
    model, facts, aim = lookup_model(), tiny_facts.fact_edits(4), TargetOptions(steps=4, lr=0.05, clamp=1.0)
    together = find_targets(model, tokenizer(), facts, surroundings(), 1, aim)
    for fact, one in zip(facts, together, strict=True):
        alone = find_targets(model, tokenizer(), [fact], surroundings(), 1, aim)[0]
        assert float((alone.delta - one.delta).norm() / alone.delta.norm()) < 5e-3


def test_the_model_is_left_as_it_was_also_after_an_error():
    model = lookup_model()
    before = weights_digest(dict(model.named_parameters()))
    find_targets(model, tokenizer(), tiny_facts.fact_edits(1), surroundings(), 1, TargetOptions(steps=2))
    with pytest.raises(DataError, match="met a loss of nan"):
        find_targets(model, tokenizer(), tiny_facts.fact_edits(1), surroundings(), 1, TargetOptions(steps=4, kl=float("nan")))
    assert weights_digest(dict(model.named_parameters())) == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_prefixes_have_an_address():
    model = lookup_model()
    again = sample_contexts(model, tokenizer(), count=3, length=8, seed=0)
    assert again == surroundings()
    assert sample_contexts(model, tokenizer(), count=3, length=8, seed=1) != again
    assert float(again.weights().sum()) == pytest.approx(1.0)
    assert Contexts(("",)).weights().tolist() == [1.0]


def test_every_delta_moves_as_torchs_adam_moves_it_and_no_further_than_it_may():
    """A fact that is no longer sought stays where it is, bit for bit."""
    chance = torch.Generator().manual_seed(0)
    gradients, longest = torch.randn(6, 3, 5, generator=chance), torch.tensor([0.2, 9.0, 9.0])
    deltas, parameters = Deltas(torch.zeros(3, 5), 0.1, longest), [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, 0.1)
    for step, gradient in enumerate(gradients):
        sought = [0, 1, 2] if step < 3 else [0, 1]
        deltas.step(sought, gradient[sought], step + 1)
        for i, parameter in enumerate(parameters):
            parameter.grad = gradient[i] if i in sought else None
        optimizer.step()
        with torch.no_grad():
            parameters[0].mul_((0.2 / parameters[0].norm()).clamp(max=1))
    for found, due in zip(deltas.value_nD, parameters, strict=True):
        torch.testing.assert_close(found, due.detach(), atol=1e-6, rtol=1e-5)
    assert deltas.value_nD.norm(dim=-1)[0] == pytest.approx(0.2)


def test_targets_come_back_in_the_order_of_their_facts():
    """Lengths decide who stands beside whom, not who gets which target."""
    model, aim, longer = lookup_model(), TargetOptions(steps=2, lr=0.05, clamp=1.0), ("Oran and Lund and Quito", "Perth",
                                                                                                "Lund and Oran")
    facts = [make_fact(name, tiny_facts.HOME, name, target) for name, target in zip(tiny_facts.PEOPLE, longer, strict=False)]
    there = find_targets(model, tokenizer(), facts, surroundings(), 1, aim)
    back = find_targets(model, tokenizer(), facts[::-1], surroundings(), 1, aim)
    for one, other in zip(there, back[::-1], strict=True):
        torch.testing.assert_close(one.state, other.state, atol=1e-4, rtol=1e-4)


@pytest.mark.arithmetic
def test_what_holds_a_delta_back_does():
    """The divergence of the essence is smaller where it is weighed, and δ is shorter where its length is."""
    model, facts = lookup_model(), tiny_facts.fact_edits(2)

    def sought(**terms: float) -> tuple[float, float]:
        aim = TargetOptions(steps=40, lr=0.1, enough=-1.0, **({"kl": 0.0, "decay": 0.0, "clamp": 9.0} | terms))
        found = find_targets(model, tokenizer(), facts, surroundings(), 1, aim)
        moved = sum(essence_moved(model, fact, target.delta) for fact, target in zip(facts, found, strict=True))
        return moved, sum(float(target.delta.norm()) for target in found)

    moved, length = sought()
    assert sought(kl=1000 / moved)[0] < 0.1 * moved
    assert sought(decay=500.0)[1] < 0.2 * length
    assert sought(clamp=0.1)[1] < 0.2 * length


def essence_moved(model: Transformer, fact: Fact, delta: torch.Tensor) -> float:
    """How far the next word after "SUBJECT is a" moves when δ is added at the subject's last token."""
    span = locate_subject(tokenizer(), fact.subject + " is a", 0, fact.subject, fact.name)

    def put(_, __, output):
        output = output.clone()
        output[0, span.last] += delta.float()
        return output

    with torch.no_grad():
        before = model(torch.tensor([span.ids]))[0, -1].log_softmax(-1)
        with hooked([block(model, 1).register_forward_hook(put)]):
            after = model(torch.tensor([span.ids]))[0, -1].log_softmax(-1)
    return float((before.exp() * (before - after)).sum())

"""A patch a row: each row of a batch goes through its own, in every place, and the model's own layers come back."""

import pytest
import torch

from assay.errors import UsageError
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, ttt_sites
from assay.model.families import parameter_shapes
from assay.model.lora import attach, detach, fresh
from assay.model.patch import patched
from assay.seeds import generator
from assay.testing.tiny_models import tiny_config, tiny_model

TOKENS = torch.randint(0, 320, (3, 20), generator=generator(0, "tokens"))


def shaken(model, targets=TTT_TARGETS, slots=3):
    """Adapters whose slots have all learned something else."""
    adapters = BatchedAdapters(fresh(model.config, ttt_sites(model.config, targets), 4, 0.5, 0, None), slots)
    with torch.no_grad():
        adapters.state_BN.add_(torch.randn(adapters.state_BN.shape, generator=generator(0, "shaken")) * 0.05)
    return adapters


def through(model, adapters):
    with adapters.attached(model), torch.no_grad():
        adapters.bind()
        return model(TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral", "assay"])
def test_each_row_is_what_its_own_patch_makes_of_it(family):
    """Against the patch as live layers, and against weights that have it merged. A tied head is no weight of its own to merge into."""
    model = tiny_model(family)
    adapters = shaken(model, TTT_TARGETS if not model.config.tied else TTT_TARGETS[:-1])
    found = through(model, adapters)
    for slot in range(3):
        one = adapters.detached(slot)
        with torch.no_grad(), patched(model, one):
            assert (model(TOKENS[slot : slot + 1])[0] - found[slot]).abs().max() < 1e-5
        attach(model, one)
        with torch.no_grad():
            assert (model(TOKENS[slot : slot + 1])[0] - found[slot]).abs().max() < 1e-5
        detach(model, None)
    assert (found[0] - found[1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "assay"])
def test_the_head_of_a_tied_model_is_adapted_below_the_soft_cap_and_its_embedding_is_not(family):
    model = tiny_model(family)
    adapters = shaken(model, ("head",))
    (part,) = adapters.detached(1).low_rank["embed.weight"]
    with torch.no_grad():
        states = model.hidden(TOKENS[1:2])
        logits = states @ (model.embed.weight + part.delta()).T
        expected = logits if model.config.softcap is None else 15 * torch.tanh(logits / 15)
    assert (through(model, adapters)[1] - expected[0]).abs().max() < 1e-5


def test_an_untouched_adapter_is_no_adapter_bit_for_bit():
    model = tiny_model()
    adapters = BatchedAdapters(fresh(model.config, ttt_sites(model.config, TTT_TARGETS), 4, 1.0, 0, None), 3)
    with torch.no_grad():
        assert torch.equal(through(model, adapters), model(TOKENS))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_all_targets_together_are_every_row_of_every_matrix_once(family):
    config = tiny_config(family)
    rows: dict[str, list[tuple[int, int]]] = {}
    for site in ttt_sites(config, TTT_TARGETS):
        rows.setdefault(site.parameter, []).append((site.start, site.stop))
    matrices = {n: s for n, s in parameter_shapes(config).items() if len(s) == 2 and not n.startswith("position")}
    assert rows.keys() == matrices.keys()
    for name, spans in rows.items():
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), matrices[name][0]]


def test_a_target_that_is_none_is_refused():
    for targets in (("q", "w"), (), ("q", "q")):
        with pytest.raises(UsageError, match="expected some of q, k, v, o, mlp, head, each once"):
            ttt_sites(tiny_config(), targets)


def test_a_fingerprint_is_of_every_bit_and_its_place():
    adapters = BatchedAdapters(fresh(tiny_config(), ttt_sites(tiny_config(), ("q",)), 2, 1.0, 0, None), 2)
    first, same = adapters.fingerprints()
    assert first == same
    with torch.no_grad():
        at = int(adapters.right_N.nonzero()[0])
        adapters.state_BN[1, [at, at + 1]] = adapters.state_BN[1, [at + 1, at]]
        swapped = adapters.fingerprints()[1]
        adapters.state_BN[0, 0] = torch.nextafter(adapters.state_BN[0, 0].detach(), torch.tensor(1.0))
    assert swapped != first
    assert adapters.fingerprints()[0] != first

"""GGUF in and out: one model for us and for transformers, in every type; nothing defaulted, guessed or half-written."""

import weakref
from dataclasses import replace

import gguf as package
import numpy as np
import pytest
import torch

from assay.errors import ArtifactError, AssayError, StoreError, UsageError
from assay.guard.behaviour_checks import check_consumer
from assay.guard.proof_subject import ProofSubject
from assay.model.families import gguf_layout, to_foreign
from assay.model.gguf_tokenizer import tokenizer_from_gguf
from assay.model.transformer import Rope, Transformer
from assay.store import gguf
from assay.store.artifact import open_artifact
from assay.store.gguf_header import GGUF_TYPES
from assay.store.model_formats import shown_geometry
from assay.testing.tiny_models import tiny_config
from assay.verdict import Outcome
from tests.model.trained_tokenizers import TEXT, byte_level
from tests.store.gguf.gguf_files import VOCAB, changed, made, tensors

FAMILIES = ["llama", "llama3", "qwen2", "qwen3", "gpt2"]
TOKENS = torch.randint(0, VOCAB, (2, 96), generator=torch.Generator().manual_seed(1))


def logits(config, weights):
    model = Transformer(config).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.logits(model.hidden(TOKENS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "rounding"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 127 / 2 + 2**-11)])
def test_what_was_written_is_read(family, dtype, rounding, tmp_path):
    path = tmp_path / "model.gguf"
    config = made(path, family, dtype)
    model = gguf.read_gguf(path)
    assert model.config == config
    assert model.tokenizer.encode(TEXT) == byte_level("smollm").encode(TEXT)
    assert (model.stops.eos, model.stops.disagreements) == (2, ())
    for name, tensor in tensors(config).items():
        error = (model.tensors[name] - tensor).abs().max() / tensor.abs().max()
        assert error == 0 if tensor.ndim == 1 or name == "position.weight" else error <= rounding, name
    assert gguf.describe_gguf(path).architecture == shown_geometry(config)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model.gguf"]


def as_llama_cpp_has_it(family):
    """A tiny model of the family with what llama.cpp has in its code, and numbers that float32 holds."""
    config = tiny_config(family, vocab=VOCAB)
    longrope = replace(tiny_config("phi3").rope, attention_factor=1.125)
    changes = {
        "gemma2": {"attention_scale": None}, "gemma3_text": {"windows": (20, 20)}, "granite": {"residual_scale": 0.25},
        "phi3": {"rope": longrope, "windows": (40, 40)}, "smollm3": {"depth": 4, "windows": (None,) * 4, "unrotated": (3,)},
        "qwen3_moe": {"experts": replace(tiny_config("qwen3_moe").experts, balance=0.0)}}
    return replace(config, **changes.get(family, {}))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "phi3", "olmo2", "smollm3", "granite", "qwen3_moe", "yarn"])
def test_later_families_are_read_as_they_were_written(family, tmp_path):
    config = as_llama_cpp_has_it(family)
    weights = tensors(config)
    gguf.write_gguf(tmp_path / "model.gguf", config, weights, byte_level(), "f16")
    model = gguf.read_gguf(tmp_path / "model.gguf")
    assert model.config == config
    for name, tensor in weights.items():
        error = (model.tensors[name] - tensor).abs().max() / tensor.abs().max()
        assert error < (1e-6 if tensor.ndim == 1 else 2**-11), name


@pytest.mark.parametrize(("family", "change", "words"), [
    ("gemma3_text", {"local_rope": Rope(20000.0)}, "rotary base"), ("gemma3_text", {"windows": (20, None)}, "in this order"),
    ("gemma2", {"attention_scale": 0.3}, "scale of scores"), ("smollm3", {"unrotated": (2,)}, "without positions"),
    ("qwen2_moe", {}, "the qwen2_moe family"), ("gpt_oss", {}, "the gpt_oss family"), ("qwen2", {"head_dim": 64}, "width / heads")])
def test_what_llama_cpp_would_compute_otherwise_is_not_written(family, change, words, tmp_path):
    config = replace(as_llama_cpp_has_it(family), **change)
    with pytest.raises(UsageError, match=words):
        gguf.write_gguf(tmp_path / "model.gguf", config, tensors(config), byte_level(), "f16")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gemma3_text", "gemma2", "qwen3_moe"])
def test_transformers_computes_the_same_from_our_file(family, tmp_path):
    """96 positions with grouped heads: a wrong rotary order of q and k would show (llama.cpp PR 3364)."""
    from transformers import AutoModelForCausalLM

    config = as_llama_cpp_has_it(family)
    if family.startswith("gemma"):  # transformers reads neither scales, caps nor scalings, and takes those of the released ones
        caps = {"softcap": 30.0, "attention_softcap": 50.0} if family == "gemma2" else {}
        config = replace(config, head_dim=256, rope=Rope(config.rope.base), **caps)
    if family == "qwen3":  # transformers reads no head size for Qwen3 and takes the 128 of the released ones
        config = replace(config, head_dim=128)
    if family == "gpt2":  # nor, since 5.23, how many positions a GPT-2 has, or how wide a Qwen3-MoE's experts are
        config = replace(config, max_length=1024)
    if family == "qwen3_moe":
        config = replace(config, experts=replace(config.experts, hidden=768))
    gguf.write_gguf(tmp_path / "model.gguf", config, tensors(config), byte_level(), "f16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ours = logits(config, gguf.read_gguf(tmp_path / "model.gguf").tensors)
    with torch.no_grad():
        assert (ours - theirs(TOKENS).logits).abs().max() < 1e-4
    assert ours.abs().max() > 0.5


@pytest.mark.parametrize(("family", "words"), [
    ("llama", None), ("qwen3", "takes head_dim for 128 where it is"), ("gpt2", "n_positions for 1024 where it is"),
    ("gemma3_text", "query_pre_attn_scalar for 256 where it is"), ("phi3", "rope_parameters for"),
    ("qwen3_moe", "takes moe_intermediate_size for 768 where it is"), ("olmo2", "architecture olmo2 is not supported yet"),
    ("granite", "llama.cpp does")])
def test_what_transformers_does_not_read_in_a_header_is_no_fault_of_the_file(family, words, tmp_path):
    """And a file that holds other weights than it should is refuted all the same, wherever transformers can read it."""
    config = as_llama_cpp_has_it(family)
    gguf.write_gguf(tmp_path / "model.gguf", config, tensors(config), byte_level(), "f16")
    opened = open_artifact(tmp_path / "model.gguf")
    found = check_consumer(ProofSubject(opened.raw, opened))
    assert found.outcome is (Outcome.PROVEN if words is None else Outcome.UNPROVEN), found
    assert words is None or (words in found.reason and found.evidence["optional"]), found
    other = replace(opened, tensors=opened.tensors | {"blocks.0.attn.qkv.weight": opened.tensors["blocks.0.attn.qkv.weight"].flip(0)})
    readable = family not in ("olmo2", "granite")
    assert check_consumer(ProofSubject(opened.raw, other)).outcome is (Outcome.REFUTED if readable else Outcome.UNPROVEN)


def raw_blocks(type, shape, seed=0):
    """Random bytes with small finite scales: every bit pattern of the quants occurs."""
    block, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[type]]
    bits = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    places = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for place in places[type]:
        bits[..., place:place + 2] = scale
    return bits.reshape(*shape[:-1], -1)


def plain_q5_0(rows):
    """Plain q5_0 by the format's definition: half scale, 32 fifth bits, then 16 bytes of low and high nibbles."""
    values = []
    for block in rows.reshape(-1, 22):
        scale, high = block[:2].view(np.float16)[0].astype(np.float32), int.from_bytes(block[2:6].tobytes(), "little")
        low = [*(block[6:] & 15), *(block[6:] >> 4)]
        values += [scale * np.float32((int(nibble) | (high >> at & 1) << 4) - 16) for at, nibble in enumerate(low)]
    return torch.tensor(np.array(values))


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_dequantises_as_the_format_says(type, tmp_path):
    """Against transformers' own dequantisers, which share no code with the gguf package's."""
    from transformers.integrations.gguf.dequant import dequantize

    made(tmp_path / "plain.gguf")
    shape = (96, 256)  # not part of the model: taken straight from the file
    rows = raw_blocks(type, shape)
    path = changed(tmp_path / "plain.gguf", tmp_path / "quantised.gguf", replaced={"extra": (rows, type)})
    found = gguf._dequantised(path, gguf.read_gguf_header(path), {"extra"})["extra"]
    number = package.GGMLQuantizationType[type].value
    expected = plain_q5_0(rows) if type == "Q5_0" else dequantize(torch.from_numpy(rows), number)
    assert GGUF_TYPES[number][0] == type
    assert found.shape == shape
    torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-6, atol=0)
    assert found.unique().numel() > 10


def test_halves_are_read_exactly(tmp_path):
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    made(tmp_path / "plain.gguf")
    for type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        rows = values.to(dtype).view(torch.uint8).numpy()
        path = changed(tmp_path / "plain.gguf", tmp_path / f"{type}.gguf", replaced={"extra": (rows, type)})
        found = gguf._dequantised(path, gguf.read_gguf_header(path), {"extra"})["extra"]
        assert torch.equal(found, values.to(dtype).float())


GEOMETRY = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base"]


@pytest.mark.parametrize("key", GEOMETRY)
def test_missing_geometry_is_named(key, tmp_path):
    made(tmp_path / "good.gguf")
    path = changed(tmp_path / "good.gguf", tmp_path / "bad.gguf", without=(f"llama.{key}",))
    with pytest.raises(UsageError, match=f"{key} is missing"):
        gguf.read_gguf(path)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"llama.attention.sliding_window": 64}, UsageError, "llama.attention.sliding_window = 64"),
    ({"llama.expert_count": 8}, UsageError, "llama.expert_count = 8"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, UsageError, "original_context_length"),
    ({"llama.rope.dimension_count": 8}, UsageError, "rope.dimension_count"),
    ({"llama.embedding_length": "64"}, UsageError, "embedding_length is '64'"),
    ({"llama.vocab_size": 500}, ArtifactError, "vocab_size is 500"),
    ({"llama.block_count": 3}, ArtifactError, "missing: blk.2"),
    ({"llama.block_count": 2**31}, ArtifactError, "damaged"),
    ({"llama.attention.head_count_kv": 3}, ArtifactError, "4 heads cannot share 3"),
    ({"llama.feed_forward_length": 128}, ArtifactError, "shape"),
    ({"general.type": "adapter"}, UsageError, "adapter"),
    ({"split.count": 3}, UsageError, "one of 3 parts"),
    ({"tokenizer.ggml.pre": "viking"}, UsageError, "'viking'"),
])
def test_geometry_that_does_not_fit_is_named(changes, error, words, tmp_path):
    made(tmp_path / "good.gguf")
    path = changed(tmp_path / "good.gguf", tmp_path / "bad.gguf", metadata=changes)
    with pytest.raises(error) as caught:
        gguf.read_gguf(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_no_metadata_whatsoever_break_the_reader(family, tmp_path):
    """Every key with every kind of value: understood, or refused in a sentence."""
    made(tmp_path / "good.gguf", family)
    header = gguf.read_gguf_header(tmp_path / "good.gguf")
    refused = 0
    for key in [*header.metadata, "llama.rope.scaling.type", "tokenizer.chat_template.x", "split.count"]:
        for value in ("x", "", 7, -1, 2**31, 2.5, float("nan"), True, [], [1], ["x"], [["x"]]):
            metadata = header.metadata | {key: value}
            try:
                gguf._config(gguf.GgufHeader(metadata, header.tensors), tmp_path / "good.gguf")
                tokenizer_from_gguf(metadata, "made")
            except AssayError:
                refused += 1
    assert refused > 100


def test_keys_that_say_where_a_file_comes_from_change_nothing(tmp_path):
    config = made(tmp_path / "good.gguf")
    more = {"general.name": "x", "quantize.imatrix.file": "y", "publisher.note": "z", "llama.expert_count": 0}
    assert gguf.read_gguf(changed(tmp_path / "good.gguf", tmp_path / "named.gguf", metadata=more)).config == config


def test_unknown_architecture_and_type_are_named(tmp_path):
    made(tmp_path / "good.gguf")
    path = changed(tmp_path / "good.gguf", tmp_path / "mamba.gguf", metadata={"general.architecture": "mamba"})
    with pytest.raises(UsageError, match="'mamba' is not supported"):
        gguf.read_gguf(path)
    rows = np.zeros((8, 84), np.uint8)
    path = changed(tmp_path / "good.gguf", tmp_path / "q2.gguf", replaced={"extra": (rows, "Q2_K")})
    with pytest.raises(UsageError, match="extra is of type Q2_K"):
        gguf.read_gguf(path)


def test_missing_unknown_and_broken_tensors_are_named(tmp_path):
    made(tmp_path / "good.gguf", dtype="q8_0")
    name = "blk.1.attn_k.weight"
    bad = np.frombuffer((tmp_path / "good.gguf").read_bytes(), np.uint8)
    info = gguf.read_gguf_header(tmp_path / "good.gguf").tensors[name]
    rows = bad[info.offset:info.offset + info.bytes].reshape(info.shape[0], -1)
    broken = rows.copy()
    broken[3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)  # the scale of one block
    for changes, words in [({"without": (name,)}, f"missing: {name}"),
                           ({"replaced": {"blk.7.attn_k.weight": (rows, "Q8_0")}}, "not part of this architecture"),
                           ({"replaced": {name: (broken, "Q8_0")}}, f"{name} holds values that are not finite")]:
        (tmp_path / "bad.gguf").unlink(missing_ok=True)
        with pytest.raises(ArtifactError, match=words):
            gguf.read_gguf(changed(tmp_path / "good.gguf", tmp_path / "bad.gguf", **changes))


def test_a_tied_head_is_known_by_its_absence(tmp_path):
    config = made(tmp_path / "tied.gguf")
    embed = to_foreign(gguf_layout(config), tensors(config))["token_embd.weight"].half().view(torch.uint8).numpy()
    path = changed(tmp_path / "tied.gguf", tmp_path / "untied.gguf", replaced={"output.weight": (embed, "F16")})
    assert (gguf.read_gguf(tmp_path / "tied.gguf").config.tied, gguf.read_gguf(path).config.tied) == (True, False)


def test_llama3_scaling_must_follow_its_rule(tmp_path):
    """llama.cpp stores the divisors of the frequencies; from a foreign file they must be what Meta's rule gives."""
    config = made(tmp_path / "ours.gguf", "llama3")
    assert config.rope.original_length == 32
    rule = tuple(f"assay.rope.{name}" for name in ("factor", "low_freq_factor", "high_freq_factor", "original_length"))
    foreign = changed(tmp_path / "ours.gguf", tmp_path / "foreign.gguf", without=rule)
    with pytest.raises(UsageError, match=r"rope_freqs\.weight does not follow"):
        gguf.read_gguf(foreign)


def test_what_gguf_cannot_express_is_not_written(tmp_path):
    llama, path = tiny_config("llama", vocab=VOCAB), tmp_path / "model.gguf"
    huge = tensors(llama) | {"norm.weight": torch.full((64,), 1e30)}
    gguf.write_gguf(tmp_path / "norms-stay-exact.gguf", llama, huge, byte_level(), "f16")
    huge["blocks.0.attn.qkv.weight"] = torch.full((128, 64), 70_000.0)
    for config, weights, dtype, words in [
        (tiny_config("mistral", vocab=VOCAB), None, "f16", "sliding window"),
        (tiny_config("assay", vocab=VOCAB), None, "f16", "assay family"),
        (llama, huge, "f16", "cannot .*use bf16"),
        (llama, None, "q4_0", "one of: f16, bf16, q8_0"),
        (tiny_config("llama", vocab=64), None, "f16", "only 64 embeddings"),
    ]:
        with pytest.raises(UsageError, match=words):
            gguf.write_gguf(path, config, weights or tensors(config), byte_level(), dtype)
        assert [child.name for child in tmp_path.iterdir()] == ["norms-stay-exact.gguf"]


def test_a_file_is_never_overwritten_and_a_failing_disk_leaves_nothing(tmp_path, monkeypatch):
    config, path = tiny_config("llama", vocab=VOCAB), tmp_path / "model.gguf"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(package.GGUFWriter, "write_tensor_data", full)
        with pytest.raises(StoreError, match="disk is full"):
            gguf.write_gguf(path, config, tensors(config), byte_level(), "f16")
    assert list(tmp_path.iterdir()) == []
    made(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        made(path)
    assert path.read_bytes() == before


def test_a_file_is_read_tensor_by_tensor(tmp_path, monkeypatch):
    """Parts that are joined into one matrix are let go of before the next is read: the file is never held beside the model."""
    made(path := tmp_path / "model.gguf")
    usual, alive, most = gguf._tensor, [], []

    def counted(*given):
        most.append(sum(part() is not None for part in alive))
        tensor = usual(*given)
        if given[1].rpartition(".")[0].endswith(("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")):
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(gguf, "_tensor", counted)
    gguf.read_gguf(path)
    assert len(alive) == 10
    assert max(most) <= 2

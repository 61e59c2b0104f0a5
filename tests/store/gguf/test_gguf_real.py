"""The real SmolLM2-135M, and llama.cpp itself where it is installed, as judges of what we read and write."""

import pytest
import torch

from assay.model.gguf_tokenizer import HARD
from assay.model.transformer import Transformer
from assay.store import gguf
from assay.store.model_cache import cached_model
from tests.model.trained_tokenizers import TEXT
from tests.store.gguf.gguf_files import VOCAB, made

pytestmark = pytest.mark.slow
# As llama.cpp gives them too.
KNOWN = {"Hello world! 123": [19556, 905, 17, 216, 33, 34, 35], "  multiple   spaces": [216, 2701, 256, 5600],
         "The capital of France is": [504, 3575, 282, 4649, 314], "\n": [198],
         "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]}


@pytest.fixture(scope="module")
def path():
    found = cached_model("smollm2-135m")
    if found is None:
        pytest.skip("SmolLM2-135M is not in the cache; run: assay fetch smollm2-135m")
    return found


def test_smollm2_is_the_model_that_transformers_reads(path):
    from transformers import AutoModelForCausalLM

    model = gguf.read_gguf(path)
    assert (model.stops.eos, model.stops.bos, model.stops.turn_end) == (2, 1, 2)
    assert model.stops.disagreements == ()
    for text, ids in KNOWN.items():
        assert model.tokenizer.encode(text) == ids
    ours = Transformer(model.config).eval()
    ours.load_state_dict(model.tensors)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours.logits(ours.hidden(tokens)) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_smollm2_written_again_is_the_same_model(path, tmp_path):
    model = gguf.read_gguf(path)
    gguf.write_gguf(tmp_path / "again.gguf", model.config, model.tensors, model.tokenizer, "q8_0", model.stops)
    again = gguf.read_gguf(tmp_path / "again.gguf")
    assert (again.config, again.stops) == (model.config, model.stops)
    assert (again.tokenizer.digest, again.tokenizer.template_digest) == \
           (model.tokenizer.digest, model.tokenizer.template_digest)


def test_llama_cpp_splits_smollm2s_text_as_we_do(path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python")
    tokenizer = gguf.read_gguf(path).tokenizer
    judge = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in (*HARD, TEXT):
        assert judge.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text), text


@pytest.mark.parametrize(("family", "scheme"), [("llama", "smollm"), ("llama3", "llama-bpe"), ("qwen2", "qwen2"),
                                                ("qwen3", "qwen2"), ("gpt2", "gpt-2")])
def test_llama_cpp_computes_what_we_compute(family, scheme, tmp_path):
    """It rounds activations to half, hence the tolerance; a wrong layout or rope is off by the size of the logits."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python")
    made(tmp_path / "model.gguf", family, scheme=scheme)
    model = gguf.read_gguf(tmp_path / "model.gguf")
    tokens = torch.randint(0, VOCAB, (1, 96), generator=torch.Generator().manual_seed(1))
    ours = Transformer(model.config).eval()
    ours.load_state_dict(model.tensors)
    judge = llama_cpp.Llama(str(tmp_path / "model.gguf"), logits_all=True, n_ctx=256, n_threads=1, verbose=False)
    judge.eval(tokens[0].tolist())
    with torch.no_grad():
        logits = ours.logits(ours.hidden(tokens))[0]
    assert (torch.tensor(judge.scores[:96]) - logits).abs().max() < 3e-3 * logits.abs().max()
    for text in HARD:
        if text != "e\u0301":  # llama.cpp leaves out Qwen's NFC
            assert judge.tokenize(text.encode(), add_bos=False, special=True) == model.tokenizer.encode(text), text

"""What an evaluation costs: `assay eval`'s whole path on GSM8K, beside transformers' generate on the same prompts.

    python bench/eval.py smollm2-135m --data gsm8k_test.jsonl               # all 1,319 problems × 16 samples of ≤ 256 tokens
    python bench/eval.py MODEL --data test.jsonl --limit 8 -k 2 --max-new 16 --device cpu

Ours is everything that a user waits for after the model is open: oracles, sampling, grading, the files. The peer has the same
weights, prompts and sampling; it only generates and decodes, in batches, for at most --peer-seconds, and its rate is taken from those.
Goal: SmolLM2-135M, all of GSM8K test × 16, on one H200 in at most 5 minutes.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.evaluation.evaluate import evaluate
from assay.evaluation.loaded_model import LoadedModel
from assay.evaluation.tasks import TaskRequest, open_task
from assay.generate.generation_request import Sampling
from assay.model.placement import default_device
from assay.store.artifact import Artifact, open_artifact
from assay.store.export_artifact import export_artifact


@dataclass(frozen=True)
class Rate:
    name: str
    seconds: float
    samples: int
    tokens: int

    def line(self, all_samples: int) -> str:
        whole = self.seconds * all_samples / self.samples
        return (f"{self.name:26} {self.samples:8} {self.tokens:10} {self.seconds:9.1f} {self.samples / self.seconds:10.1f} "
                f"{self.tokens / self.seconds / 1e3:10.2f} {whole:12.1f}")


def main() -> None:
    flags = parsed()
    device = flags.device or default_device()
    artifact, task = open_artifact(flags.path), open_task(TaskRequest("gsm8k", flags.data, flags.limit))
    sampling = Sampling(flags.max_new, flags.temperature)
    opened = LoadedModel(artifact, device=device)
    where = Path(tempfile.mkdtemp(prefix="assay-bench-eval-")) if flags.out is None else flags.out
    rates = []
    start = time.perf_counter()
    found = evaluate(opened, task, where / "eval", k=flags.k, sampling=sampling)
    seconds = time.perf_counter() - start
    samples = [sample for row in found.rows for sample in row["samples"]]
    rates.append(Rate("assay eval, all of it", seconds, len(samples), sum(len(sample["ids"]) for sample in samples)))
    print(rates[-1].line(len(samples)), flush=True)
    if not flags.no_peer:
        export_for_peer(artifact, where / "hf")
        prompts = [opened.ids_of(row["prompt"], raw=False) for row in found.rows]
        opened.engine = None  # its cache is the peer's room
        del opened.model
        rates.append(theirs(where / "hf", prompts, sorted(artifact.stops.stop_ids), flags, device))
    print(f"\n{flags.path}, gsm8k × {flags.k}, ≤ {flags.max_new} tokens, T {flags.temperature}, on "
          f"{torch.cuda.get_device_name() if device.startswith('cuda') else device}, torch {torch.__version__}")
    print(f"pass@1 {found.estimates['pass@1']}, tokens {found.estimates['tokens']}; scores in {where / 'eval'}\n")
    print(f"{'':26} {'samples':>8} {'tokens':>10} {'seconds':>9} {'samples/s':>10} {'k tokens/s':>10} {'all of it, s':>12}")
    print("\n".join(rate.line(len(samples)) for rate in rates))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-k", type=int, default=16)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=None, help="keep the evaluation here")
    parser.add_argument("--peer-batch", type=int, default=256, help="sequences that the peer generates at once")
    parser.add_argument("--peer-seconds", type=float, default=45.0)
    parser.add_argument("--no-peer", action="store_true")
    return parser.parse_args()


def export_for_peer(artifact: Artifact, where: Path) -> None:
    """The same weights as a Hugging Face folder; an adapter is merged."""
    export_artifact(artifact, "merged" if artifact.patch is not None else "hf", where, "bfloat16")


def theirs(folder: Path, prompts: list[tuple[int, ...]], stop_ids: list[int], flags: argparse.Namespace, device: str) -> Rate:
    """transformers as its users run it: bf16 on a GPU, SDPA, prompts of a batch padded on the left, its default cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [prompt for prompt in prompts for _ in range(flags.k)]
    batches = [asked[i : i + flags.peer_batch] for i in range(0, len(asked), flags.peer_batch)]
    generated(model, tokenizer, batches[0], stop_ids, flags, device, new=4)
    seconds, samples, tokens = 0.0, 0, 0
    for batch in batches:
        start = time.perf_counter()
        tokens += generated(model, tokenizer, batch, stop_ids, flags, device, new=flags.max_new)
        seconds += time.perf_counter() - start
        samples += len(batch)
        if seconds + seconds / samples * len(batch) > flags.peer_seconds:
            break
    return Rate("transformers generate", seconds, samples, tokens)


def generated(model: Any, tokenizer: Any, batch: list[tuple[int, ...]], stop_ids: list[int], flags: argparse.Namespace, device: str, *,
              new: int) -> int:
    """Tokens up to and with each stop token, of one batch; texts are decoded too."""
    width, pad = max(map(len, batch)), stop_ids[0] if stop_ids else 0
    tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in batch], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device)
    with torch.no_grad():
        made = model.generate(tokens, attention_mask=mask, do_sample=flags.temperature > 0, temperature=flags.temperature or None, top_k=0,
                              top_p=1.0, max_new_tokens=new, eos_token_id=stop_ids or None, pad_token_id=pad)[:, width:].tolist()
    tokenizer.batch_decode(made, skip_special_tokens=True)
    ends = [next((place + 1 for place, id in enumerate(row) if id in stop_ids), len(row)) for row in made]
    return sum(ends)


if __name__ == "__main__":
    main()

"""assay serve: an OpenAI-compatible server for a model and its adapters, on loopback unless a token guards it."""

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.recipes.grpo_options import POLICY_RATES
from assay.recipes.options import DEVICE, Trained

if TYPE_CHECKING:
    from assay.serving.engine_thread import ServerSize
    from assay.serving.hosted_model import HostedModel


@dataclass(frozen=True)
class FLAGS:
    """Serve a model: /v1/models, /v1/chat/completions (tools, JSON schemas), /v1/completions, /v1/adapters, /health, /metrics.

    The model's name is --name, or the last part of its path; the digest of its weights is the system_fingerprint of every answer.
    Adapters must have a hallmark, and are served, from the start or added later, once their answers through the server equal those
    recorded. Before the server listens, known requests are asked and every answer is worked out again from the model alone; a wrong
    one ends the start (exit 4). With --train the model is a policy: clients open trajectories, talk, close them with a reward, and
    ask for an update of the whole model, of a new adapter (--lora-r), or of the served adapter.
    """

    path: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    host: str = option("address to listen on; one that other machines can reach requires a token", group="run", default="127.0.0.1")
    port: int = option("port to listen on; 0: any free port", group="run", least=0, most=65535, default=8000)
    name: str | None = option("model name that clients use", group="model", default=None, default_text="the last part of its path")
    adapter: tuple[str, ...] = option("proven adapters to serve beside the model", group="model", metavar="NAME=PATH", default=())
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    train: bool = option("train the model on trajectories of its clients (/v1/trajectories, /v1/train)", group="method",
                         default=False)
    rollouts: bool = option("accept new weights from a trainer (/v1/weights), for assay grpo --vllm-server-base-url", group="method",
                            default=False)
    learning_rate: float | None = option("learning rate of AdamW", needs="--train", group="method", above=0, default=None,
                                         default_text=str(POLICY_RATES))
    lora_r: int = option("rank of a new LoRA adapter; 0: train the whole model", needs="--train", group="method", least=0, default=0)
    lora_alpha: float | None = option("LoRA alpha; the update is scaled by alpha/r", group="method", above=0, default=None,
                                      default_text="2·r")
    use_rslora: bool = option("scale the update by alpha/√r instead (rsLoRA)", group="method", default=False)
    lora_target_modules: tuple[str, ...] = option("layers to adapt, by their names in PEFT", group="method", metavar="NAME",
                                                  default=(), default_text="all linear layers of the blocks")
    save_steps: int = option("updates between checkpoints; 0: only at the end", needs="--train", group="checkpoints", least=0, default=20)
    reward_errors: float = option("share of the trajectories of one kind (with tools, without) that may be closed with an "
                                  "error before updates are refused", needs="--train", group="rewards", least=0, most=1, default=0.5)
    out: str | None = option("with --train, required there: folder for updates, trajectories and the final checkpoint",
                             group="run", default=None)
    slots: int = option("completions per model that are generated at the same time", group="generation", least=1, default=16)
    max_length: int | None = option("the most tokens of a prompt with its completion", group="generation", least=1, default=None,
                                    default_text="2048, or the model's context if less")
    queue: int = option("completions per model that may wait; beyond it clients get 429", group="generation", least=0, default=256)
    token: str | None = option("bearer token that clients must send, beyond loopback of at least 16 characters; better set as "
                               "ASSAY_TOKEN, which no process list shows", group="run", default=None)
    device: str | None = option("where to compute: cpu, cuda or cuda:N", group="run", default=None,
                                default_text=DEVICE)
    dtype: Literal["auto", "float32", "bfloat16"] = option("number format to compute in; auto: bfloat16 on a GPU, float32 elsewhere",
                                                           group="model", default="auto")
    grace: float = option("seconds that running answers have to finish when the server is told to stop", group="run", least=0,
                          default=10.0)


EXAMPLES = """  assay serve smollm2-135m
  assay serve runs/a/checkpoints/step-000500 --name a --adapter a@600=runs/b/checkpoints/step-000100 --port 8001
  assay serve smollm2-135m --rollouts --port 8001
  assay serve smollm2-135m --train --out runs/agent --learning-rate 1e-6
  assay serve smollm2-135m --train --out runs/agent --lora-r 16
  ASSAY_TOKEN=… assay serve smollm2-135m --host 0.0.0.0
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "A colour?"}], "response_format": {"type": "json_object"}}'"""


def run(flags: FLAGS) -> int:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UsageError(f"assay serve needs {' and '.join(missing)}; pip install 'assay[serve]'")
    token = flags.token or os.environ.get("ASSAY_TOKEN") or None
    adapters = [_named(text) for text in flags.adapter]
    if flags.train != (flags.out is not None):
        raise UsageError("--train needs --out FOLDER, where what was learned goes" if flags.train else "--out is for --train alone")
    if flags.train and flags.rollouts:
        raise UsageError("--train and --rollouts: a policy learns here, or a trainer elsewhere hands its weights over; give one of them")
    if not flags.train and (flags.lora_r or flags.lora_alpha or flags.use_rslora or flags.lora_target_modules):
        raise UsageError("--lora-r, --lora-alpha, --use-rslora and --lora-target-modules say what is trained; give --train too")
    if flags.out is not None and Path(flags.out).exists():
        raise UsageError(f"--out {flags.out} is there already; give a folder of its own to every run")

    from assay.generate.access import bind_listener
    from assay.recipes.starting_model import AdapterModel
    from assay.serving.engine_thread import EngineThread
    from assay.serving.policy_training import ServedPolicy
    from assay.serving.rehearsal import rehearse
    from assay.serving.server import serve

    listener = bind_listener(flags.host, flags.port, token)  # refused before a model is read
    serving = EngineThread(_size(flags))
    try:
        policy = None
        _told(model := serving.open(flags.name or Path(flags.path).name, flags.path, base=flags.base, learns=flags.train,
                                    lora=_trained(flags)))
        if flags.out is not None and model.trained is not None:
            print(model.trained.words)
            rate = flags.learning_rate or (POLICY_RATES.adapter if isinstance(model.trained, AdapterModel) else POLICY_RATES.whole)
            made = functools.partial(ServedPolicy, model, Path(flags.out), rate, errors=flags.reward_errors, save_steps=flags.save_steps)
            policy = serving.ask(made).result()
        for name, path in adapters:
            _told(serving.open_adapter(name, path))
        print(f"  {rehearse(serving, token, policy=policy)}")
        ended = serve(serving, listener, token=token, ready=lambda address: print(f"serving at {address}/v1", flush=True),
                      grace=flags.grace, policy=policy)
        if policy is not None and policy.updates:
            print(f"updates: {policy.updates}; UNPROVEN until you prove it: assay prove {policy.save().folder}")
        return ended
    finally:
        listener.close()
        serving.stop()


def _size(flags: FLAGS) -> "ServerSize":
    import torch

    from assay.model.placement import default_device, require_device
    from assay.serving.engine_thread import ServerSize

    device = require_device(flags.device or default_device())
    chosen = flags.dtype if flags.dtype != "auto" else "bfloat16" if device.startswith("cuda") else "float32"
    return ServerSize(flags.slots, flags.queue, flags.max_length, device, getattr(torch, chosen), takes_weights=flags.rollouts)


def _trained(flags: FLAGS) -> Trained | None:
    return None if flags.out is None else Trained(
        out=flags.out, model=flags.path, lora_r=flags.lora_r, lora_alpha=flags.lora_alpha, use_rslora=flags.use_rslora,
        lora_target_modules=flags.lora_target_modules)


def _named(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if not name or not found or not path:
        raise UsageError(f"--adapter {text!r}; expected NAME=PATH")
    return name, path


def _told(model: "HostedModel") -> None:
    from assay.store.artifact import quarantines

    against = quarantines(model.artifact)
    hallmark = f"REFUTED: {against[0]}" if against else "proven" if model.proven else "UNPROVEN: it has no hallmark"
    print(f"{model.name}  {model.digest[:12]}  {hallmark}  {model.memory / 2**20:,.0f} MiB with keys and values")
    for line in (*model.artifact.notes, *map(str, model.verdicts)):
        print(f"  {line}")

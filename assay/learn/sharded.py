"""Sharded training (FSDP2): parameters, gradients and moments lie in parts with all processes, and every step is computed by all.

Process 0 runs the recipe. What it does with the weights, every process does with it: a method marked `in_all_processes` is announced with
its arguments, and the others run it too (`ShardedModel.answer_calls`). Between such calls nothing moves, and nobody but process 0 decides.

A model may lie in parts from the beginning (`open_in_parts`): every process is sent its rows of each tensor as process 0 reads it from the
file or makes it, and what process 0 does alone before step 1 it does with a streamed model (learn/streamed.py). Nobody ever holds it
whole; of an adapter on a frozen base process 0 keeps a copy of what is trained, which is small.

Rows r, r + W, r + 2W, … of a batch are process r's. The optimizer and the average work on each process's own rows of every tensor, as plain
tensors; what is a property of a whole tensor (Muon's direction, the norm, a fingerprint) is gathered, one tensor at a time. The sums over
processes are rounded in another order than one process would: the distance is measured before step 1 (`world_parity`).
"""

import contextlib
import copy
import dataclasses
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.errors import GuardStop
from assay.learn.ema import EMA_PREFIX, Ema
from assay.learn.loop import Accumulated, accumulated
from assay.learn.objectives import Objective, combined
from assay.learn.optim import Muon, orthogonalised, state_tensors
from assay.learn.parallel import count_read, described, empty_batch, require_all_read, rows_of, send_batch
from assay.learn.streamed import Fetch, LazyTensors, Streaming, replace_parameters
from assay.model.families import hf_layout, to_foreign
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.model.world import World
from assay.store.safetensors_files import tensor_sha256
from assay.store.shared_save import SharedSave

Checksums = Callable[[Mapping[str, Tensor]], Mapping[str, int]]  # of every bit of each tensor, made where it lies
LOOKED_AT = 2048  # elements of a process's rows of a tensor that tell whether it moves


def in_all_processes(act: Callable[..., Any]) -> Callable[..., Any]:
    """A method that all processes run: process 0 announces it with its arguments, which are plain JSON."""

    @functools.wraps(act)
    def announced(self: "ShardedModel", **given: Any) -> Any:
        if self.world.rank == 0:
            self.world.announce({"do": act.__name__, "given": given})
        with self.world.lost_in_words():
            return act(self, **given)

    return announced


class ShardedModel:
    """The model, optimizer and average of one run in one process; whole until `shard` is called.

    It is an Accumulate: called with the run's own model and objective it computes with all processes, with others here alone.
    """

    def __init__(self, world: World, model: Transformer, optimizer: torch.optim.Optimizer, objective: Objective, checksums: Checksums,
                 ema: Ema | None = None):
        self.world, self.model, self.optimizer, self.objective, self.ema = world, model, optimizer, objective, ema
        self.checksums = checksums
        self.whole: Transformer | None = None  # in process 0: the same model in host memory, as of the last `refresh`
        self.gathered: Transformer | None = None  # the same tensors as `whole`, in a model that computes with them itself, alone
        self.parts: dict[str, nn.Parameter] = {}  # this process's rows of every parameter, over the memory that FSDP gathers from
        self.shapes: dict[str, torch.Size] = {name: p.shape for name, p in model.named_parameters()}
        self._held_parameters = list(model.parameters())  # whose moments the optimizer holds
        self.applied: dict[str, Any] = {}  # of the last step, as this process had it
        self._state_before: dict[str, str] = {}  # in process 0: digests of moments and average when they were whole
        self.stored: StoredTensors | None = None  # in process 0, where the model is opened in parts
        self.never_whole = False  # opened in parts: process 0 keeps no copy of the whole
        self.adapts = not all(p.requires_grad for p in model.parameters())  # what is trained is a small part of it
        self.rows: dict[str, Tensor] = {}  # this process's rows of every parameter, until FSDP has them
        self.moments: dict[str, dict[str, Tensor]] = {}  # and of its moments
        self.average: dict[str, Tensor] = {}  # and of the average, under the names it has in a checkpoint
        self.gradient_sets: dict[int, dict[str, Tensor]] = {}  # this process's rows of gradients that process 0 compares, by number
        self._streaming: Streaming | None = None
        self._set, self._dropped = 0, list[int]()
        self._batch: Batch | None = None
        self._computing = False
        self._bad = torch.zeros((), device=world.device)
        self._writer = ThreadPoolExecutor(1, "share")
        self._writing: Future[None] | None = None

    def answer_calls(self) -> None:
        """Answer the calls of process 0 until the run ends, in every process but the first."""
        for call in self.world.calls():
            getattr(self, call["do"])(**call["given"])
        self._written()
        self._writer.shutdown()

    # ---------------------------------------------------------------- from whole to parts

    @in_all_processes
    def shard(self) -> None:
        """Process 0's weights, moments and average, cut into rows and sent a tensor at a time: the others never hold more than their own,
        and from here on nor does process 0's device."""
        if self.world.rank == 0 and self._streaming is None:
            self.whole = whole_copy(self.model)
            self.gathered = around_same_tensors(self.whole)
            self._state_before = {name: tensor_sha256(tensor) for name, tensor in self._whole_state().items()}
        elif self._streaming is not None:
            self._end_streaming()
            self.whole = copy.deepcopy(self.model)
            if self.adapts:
                replace_parameters(self.whole, with_own_memory)
        rows = self.rows or {name: self._own_rows(p.detach()) for name, p in self.model.named_parameters()}
        moments = self.moments or self._own_moments()
        whole_average = {} if self.ema is None or self.average else self.ema.tensors()
        average = self.average or {name: self._own_rows(tensor) for name, tensor in whole_average.items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        shard_parameters(self.model, self.world)
        fill_parts(self.model, rows, self.world.device)
        self.parts = {name: nn.Parameter(own_part(p), requires_grad=p.requires_grad) for name, p in self.model.named_parameters()}
        self.optimizer.state = defaultdict(dict)
        for group, held in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [self.parts[name] for name in held]
            group["fused"] = self.world.device != "cpu"  # also where the model had no memory when its optimizer was made
            for name in held:
                self.optimizer.state[self.parts[name]] = moments[name]
        self.moments, self.average = {}, {}
        if self.ema is not None:
            self.ema = Ema(_Parts(self.parts), self.ema.decay)
            self.ema.load(average)
        if self.never_whole:
            self._copy_trained()
        self._lend_to_forward_passes()

    # ---------------------------------------------------------------- in parts from the beginning

    def open_in_parts(self, stored: "StoredTensors") -> None:
        """Send what was stored, or other values of the same tensors, from process 0 to all processes, a tensor at a time."""
        if self._streaming is not None:
            self._end_streaming()
        self.stored = stored
        self.take_rows(moments=bool(stored.moments), average=bool(stored.average))
        self._streaming = Streaming(self.model, self.world.device, self.fetch_rows, self._give_gradient)
        self._follow_parameters()
        self.model.gradients = self._given_gradients  # type: ignore[method-assign]

    def _end_streaming(self) -> None:
        assert self._streaming is not None
        self._streaming.end()
        self._streaming = None
        del self.model.gradients
        self._follow_parameters()

    def _follow_parameters(self) -> None:
        """The optimizer holds the model's parameters, whichever they are now; their state lies elsewhere."""
        now = dict(self.model.named_parameters())
        held = {id(p): name for name, p in zip(now, self._held_parameters, strict=True)}
        for group in self.optimizer.param_groups:
            names = [held[id(p)] for p in group["params"]]
            state = [self.optimizer.state.pop(p) for p in group["params"]]
            group["params"] = [now[name] for name in names]
            self.optimizer.state.update(zip(group["params"], state, strict=True))
        self._held_parameters = list(now.values())

    @in_all_processes
    def take_rows(self, *, moments: bool, average: bool) -> None:
        self.never_whole = True
        for name, p in self.model.named_parameters():
            whole = None if self.stored is None else self.stored.weight(name).to(p.dtype)
            self.rows[name] = self._own_rows(p.detach() if whole is None else whole)
        self.moments = {}
        for name, tensor in state_tensors(self.optimizer, dict(self.model.named_parameters())).items():
            parameter, _, key = name.rpartition("/")
            before = self.stored.moments[name] if moments and self.stored is not None else None
            if not tensor.dim():
                held = (tensor if before is None else before).to(self.world.device, copy=True)
                self.world.broadcast(held)
            elif moments:
                held = self._own_rows(tensor if before is None else before)
            else:
                held = torch.zeros_like(self.world.rows_held(tensor), device=self.world.device)
            self.moments.setdefault(parameter, {})[key] = held
        for name, tensor in {} if self.ema is None else self.ema.tensors().items():  # which begins with the weights themselves
            before = self.stored.average[name] if average and self.stored is not None else tensor
            self.average[name] = self._own_rows(before) if average else self.rows[name.removeprefix(EMA_PREFIX)].clone()

    def fetch_rows(self, name: str) -> Tensor:
        """A parameter, whole in process 0 alone."""
        return self.gather_of(kind="weights", name=name)

    @in_all_processes
    def gather_of(self, *, kind: str, name: str, number: int = 0) -> Any:
        if kind == "state" and name in self.average:
            part = self.average[name]
        elif kind == "state":
            parameter, _, key = name.rpartition("/")
            part = self.moments[parameter][key]
        else:
            part = self.rows[name] if kind == "weights" else self.gradient_sets[number][name]
        return self.gather_tensor(name, part, 0)

    def live(self) -> "tuple[Mapping[str, Tensor], Mapping[str, Tensor]]":
        """Weights and optimizer state of a model in parts, under their own names, each gathered in process 0 when it is asked for."""
        state = [*(f"{name}/{key}" for name, held in self.moments.items() for key in held), *self.average]
        return (LazyTensors(list(self.shapes), self.fetch_rows),
                LazyTensors(state, lambda name: self.gather_of(kind="state", name=name)))

    def _give_gradient(self, name: str, gradient: Tensor) -> None:
        """Process 0's gradient of one tensor leaves it as soon as it is made."""
        self._leaving = gradient
        self.add_gradient(name=name, number=self._set)

    @in_all_processes
    def add_gradient(self, *, name: str, number: int) -> None:
        like = self.rows[name]
        leaving = self.__dict__.pop("_leaving", None)
        rows = self.world.scatter_rows(leaving, like, self.shapes[name][0], 0)
        found = self.gradient_sets.setdefault(number, {})
        found[name] = found[name] + rows if name in found else rows

    def _given_gradients(self) -> Mapping[str, Tensor]:
        """Gradients of the model while it is streamed (`model.gradients`): those that left, and those that stayed."""
        stayed = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        left = list(self.gradient_sets.get(self._set, {}))
        return self._set_of([name for name in self.shapes if name in stayed or name in left], stayed)

    def keep_gradients(self) -> Mapping[str, Tensor]:
        """Keep the gradients of the step that all processes computed last, which forget them otherwise."""
        self.set_gradients_aside(number=self._set)
        return self._set_of(list(self.gradient_sets[self._set]), {})

    @in_all_processes
    def set_gradients_aside(self, *, number: int) -> None:
        self.gradient_sets[number] = {name: own_part(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None

    def _set_of(self, names: list[str], stayed: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        number, self._set = self._set, self._set + 1
        if self._dropped:
            dropped = list(self._dropped)
            self._dropped.clear()  # the same list: those that are still in use will name themselves in it
            self.drop_gradients(numbers=dropped)
        found = LazyTensors(names, lambda name: stayed[name].cpu() if name in stayed else
                            self.gather_of(kind="gradients", name=name, number=number))
        weakref.finalize(found, self._dropped.append, number)
        return found

    @in_all_processes
    def forget_gradients(self) -> None:
        """Forget the gradients that were set aside: nobody compares any more."""
        self.gradient_sets.clear()

    @in_all_processes
    def drop_gradients(self, *, numbers: list[int]) -> None:
        for number in numbers:
            self.gradient_sets.pop(number, None)

    def _own_moments(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer moments by parameter: those of its shape in rows, counters as they are."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state_tensors(self.optimizer, dict(self.model.named_parameters())).items():
            parameter, _, key = name.rpartition("/")
            if tensor.dim():
                held = self._own_rows(tensor)
            else:
                held = tensor.clone() if self.world.device == "cpu" else tensor.to(self.world.device)
                self.world.broadcast(held)
            found.setdefault(parameter, {})[key] = held
        return found

    def _whole_state(self) -> dict[str, Tensor]:
        moments = state_tensors(self.optimizer, dict(self.model.named_parameters()))
        return moments if self.ema is None else moments | self.ema.tensors()

    def _own_rows(self, tensor: Tensor) -> Tensor:
        """This process's part of process 0's tensor; here the tensor may have a shape alone."""
        like = torch.empty_like(self.world.rows_held(tensor), device=self.world.device)
        return self.world.scatter_rows(tensor if self.world.rank == 0 else None, like, len(tensor), 0)

    def _lend_to_forward_passes(self) -> None:
        """Process 0's forward passes gather what the others hold: they make one of a single token beside each."""
        inner = self.model.hidden

        def hidden(*given: Any, **named: Any) -> Tensor:
            if self._computing:
                return inner(*given, **named)
            self.lend()
            with self.world.lost_in_words():
                return inner(*given, **named)

        if self.world.rank == 0:
            self.model.hidden = hidden  # type: ignore[method-assign]
            assert self.whole is not None
            _compute_as(self.whole, self.model, self.world.device)

    @in_all_processes
    def lend(self) -> None:
        # What the root gathered for the last pass would be used again, though it may have changed since.
        reshard(self.model)
        if self.world.rank > 0:
            with torch.no_grad(), uncompiled():
                self.model.hidden(torch.zeros((1, 1), dtype=torch.int64, device=self.world.device))
            reshard(self.model)

    @in_all_processes
    def unlike_before(self) -> list[str]:
        """Tensors whose parts, put together, are not bit for bit what was cut; found in process 0."""
        wrong = []
        for name, part in {**self.parts, **self.own_state()}.items():
            whole = self.gather_tensor(name, part, 0)
            if whole is not None and tensor_sha256(whole) != self._digest_before(name, whole):
                wrong.append(name)
        return wrong

    def _digest_before(self, name: str, found: Tensor) -> str:
        """Digest of a tensor as it was before it was cut; where nobody held it whole, of what is stored: moments begin at 0, an average
        with the weights."""
        if self.stored is None:
            assert self.whole is not None, "process 0 keeps a copy"
            return self._state_before[name] if name in self._state_before else tensor_sha256(self.whole.get_parameter(name))
        if name in self.stored.average:
            return tensor_sha256(self.stored.average[name])
        if (parameter := name.removeprefix(EMA_PREFIX)) in self.shapes:
            return tensor_sha256(self.stored.weight(parameter).to(found.dtype))
        return tensor_sha256(self.stored.moments[name] if self.stored.moments else torch.zeros_like(found))

    # ---------------------------------------------------------------- a step

    def __call__(self, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> Accumulated:
        if model is not self.model or objective is not self.objective or not self.parts:
            return accumulated(model, objective, batch, micro, weight)
        self._batch = batch
        found, read = self.accumulate_share(call=described(batch, micro, weight, self.world.size, model))
        require_all_read(batch, read)
        return found

    @in_all_processes
    def accumulate_share(self, *, call: dict[str, Any]) -> tuple[Accumulated, Tensor]:
        """Forward and backward of this process's rows. The gradients are summed as they are made, and each process keeps its own rows of
        them; loss and metrics are the sums over all processes, the same in each."""
        self.model.compute_dtype = getattr(torch, call["compute"]) if call["compute"] else None
        self.model.train(call["training"])
        batch = send_batch(self.world, self._batch if self._batch is not None else empty_batch(call["streams"]))
        self._batch = None
        reshard(self.model)
        loss, metrics = torch.zeros((), device=self.world.device, dtype=torch.float64), dict[str, Tensor]()
        read = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        self._computing = True
        try:
            for part in self._micro_batches(batch, call["micro"]):
                found = self.objective(self.model, part.to(self.world.device, non_blocking=True))
                (found.total / call["weight"]).backward()
                loss += found.total.detach().double() / call["weight"]
                counts = bool(part.ids or part.weight.any())
                metrics = combined(metrics, (found.metrics or {}) if counts else measured_nothing(found.metrics or {}))
        finally:
            self._computing = False
        mine = rows_of(batch, self.world.rank, self.world.size) if self.world.rank < len(batch) else None
        read += 0 if mine is None else count_read(mine).to(read.device)
        total = self.world.sum(torch.cat([loss.reshape(1), read]))
        self.applied = {"loss": total[0]}
        return Accumulated(total[0].float(), self._over_processes(metrics)), total[1:]

    def _micro_batches(self, batch: Batch, micro: int) -> Iterator[Batch]:
        """Micro-batches of this process, as many in every process, since each gathers and sums with all others: one that has no rows left
        takes one that counts nothing."""
        rank, size = self.world.rank, self.world.size
        parts = list(rows_of(batch, rank, size).split(micro)) if rank < len(batch) else []
        yield from parts
        most = math.ceil(math.ceil(len(batch) / size) / micro)
        for _ in range(most - len(parts)):
            row = next(batch.split(1))
            yield dataclasses.replace(row, weight=torch.zeros_like(row.weight), ids=())

    def _over_processes(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums of sums, and the largest of maxima. Only process 0's names count: an objective measures the same everywhere."""
        sums = {name: value for name, value in metrics.items() if not name.endswith("/max")}
        maxima = {name: value for name, value in metrics.items() if name.endswith("/max")}
        found: dict[str, Tensor] = {}
        for values, over in ((sums, self.world.sum), (maxima, self.world.largest)):
            if values:
                found |= dict(zip(values, over(torch.stack([v.float() for v in values.values()])), strict=True))
        return found

    @in_all_processes
    def clip_gradients(self, *, clip: float) -> Tensor:
        """The norm of the whole gradient, which counts as at most `clip`."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            self.parts[name].grad = None if gradient is None else own_part(gradient)
        own = [part.grad for part in self.parts.values() if part.grad is not None]
        squares = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in own]).sum()
        norm = self.world.sum(squares.reshape(1))[0].sqrt().float()
        torch._foreach_mul_(own, (clip / (norm + 1e-6)).clamp(max=1.0))
        self._bad = torch.maximum(self._bad, (~torch.isfinite(norm)).to(self._bad.dtype))
        self.applied |= {"gradient norm": norm, "clip": clip}
        return norm

    @in_all_processes
    def take_step(self, *, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.world.device != "cpu":
            self.optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        if isinstance(self.optimizer, Muon):
            self._muon_step(self.optimizer)
        else:
            self.optimizer.step()
        self.applied["learning rates"] = rates
        for parameter in (*self.model.parameters(), *self.parts.values()):
            parameter.grad = None

    @torch.no_grad()
    def _muon_step(self, optimizer: Muon) -> None:
        """Momentum moves element by element, in rows; the direction is of the whole matrix, which its owner orthogonalises."""
        names = {id(part): name for name, part in self.parts.items()}
        for group in optimizer.param_groups:
            if not group["orthogonal"]:
                optimizer._adamw_step(group)
                continue
            owners = balanced_owners({names[id(p)]: self.shapes[names[id(p)]].numel() for p in group["params"]}, self.world.size)
            for p, rows in zip(group["params"], group["rows"], strict=True):
                self._move_matrix(optimizer, group, p, rows, names[id(p)], owners[names[id(p)]])

    def _move_matrix(self, optimizer: Muon, group: dict[str, Any], p: nn.Parameter, rows: tuple[int, ...], name: str, owner: int) -> None:
        keep: float | Tensor = 1.0 if optimizer.found_inf is None else 1.0 - optimizer.found_inf
        if p.grad is None:
            raise GuardStop(f"{name}: process {self.world.rank} has no gradient of it, others may have: the step would part them")
        gradient = p.grad if optimizer.found_inf is None else torch.where(optimizer.found_inf > 0, 0.0, p.grad)
        momentum = optimizer.state[p]["momentum"].lerp_(gradient, (1 - group["momentum"]) * keep)
        moved = self._direction(torch.lerp(gradient, momentum, group["momentum"]), rows, name, owner)
        p.mul_(1 - group["lr"] * group["weight_decay"] * keep)
        p.add_(moved * (-group["lr"] * keep))

    def _direction(self, part: Tensor, rows: tuple[int, ...], name: str, owner: int) -> Tensor:
        """This process's rows of Muon's direction for a matrix (or several, one below the other) of which each has a part."""
        height = self.shapes[name][0]
        whole = self.world.gather_rows(part, height, owner)
        update = None if whole is None else matrix_direction(whole.to(part.device), rows)
        return self.world.scatter_rows(update, part, height, owner)

    @in_all_processes
    def directions_apart(self) -> tuple[str, float] | None:
        """Distance between two directions of Muon's last matrix of several, or of its last: as all processes make it of their rows, and
        that of the whole matrix; found in process 0, with the weights in the gradient's place. None where no matrix moves so."""
        reshard(self.model)
        names = {id(part): name for name, part in self.parts.items()}
        muon = [group for group in self.optimizer.param_groups if group.get("orthogonal")]
        if not muon:
            return None
        p, rows = max(zip(muon[0]["params"], muon[0]["rows"], strict=True), key=lambda each: len(each[1]))
        name, height = names[id(p)], self.shapes[names[id(p)]][0]
        found = self.world.gather_rows(self._direction(p.detach(), rows, name, self.world.size - 1), height, 0)
        whole = self.world.gather_rows(p, height, 0)
        if found is None or whole is None:
            return None
        due = matrix_direction(whole.to(p.device), rows).cpu()
        return name, float((found.cpu() - due).norm() / due.norm())

    # ---------------------------------------------------------------- the average

    @in_all_processes
    def update_average(self, *, step: int) -> None:
        assert self.ema is not None
        self.ema.update(step)

    @in_all_processes
    def swap_average(self) -> None:
        """Swap the moving average into the model, or out of it again."""
        assert self.ema is not None
        reshard(self.model)
        if (held := self.__dict__.pop("_swap", None)) is None:
            held = self._swap = self.ema.swapped()
            held.__enter__()
        else:
            held.__exit__(None, None, None)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        self.swap_average()
        try:
            yield
        finally:
            self.swap_average()

    # ---------------------------------------------------------------- what process 0 sees of the whole

    @in_all_processes
    def refresh(self) -> None:
        """The trained weights of this moment into process 0's copy of them, a tensor at a time; nothing where it keeps none."""
        reshard(self.model)
        self._copy_trained()

    def _copy_trained(self) -> None:
        there = {} if self.whole is None else dict(self.whole.named_parameters())
        for name, part in self.parts.items() if self.adapts or not self.never_whole else ():
            if part.requires_grad and (found := self.world.gather_rows(part, self.shapes[name][0], 0)) is not None:
                there[name].data.copy_(found)

    @in_all_processes
    def unlike_gathered(self) -> list[str]:
        """Trained tensors of process 0's whole model that are not, bit for bit, what all processes hold now."""
        reshard(self.model)
        mine = dict(self.checksums({name: part for name, part in self.parts.items() if part.requires_grad and part.numel()}))
        if self.world.rank > 0:
            self.world.reply(mine)
            return []
        assert self.gathered is not None, "process 0 keeps a copy"
        wrong: dict[str, None] = {}
        for rank, held in enumerate([mine, *self.world.replies()]):
            rows = {name: self.world.rows_held_by(rank, p.detach()) for name, p in self.gathered.named_parameters() if name in held}
            found = self.checksums(rows)
            wrong |= dict.fromkeys(name for name, due in held.items() if found[name] != due)
        return list(wrong)

    @in_all_processes
    def gather_weights(self) -> dict[str, Tensor]:
        """Gather the trained weights, whole, on the CPU; in process 0 alone."""
        reshard(self.model)
        found = {name: self.gather_tensor(name, part, 0) for name, part in self.parts.items() if part.requires_grad}
        return {name: whole for name, whole in found.items() if whole is not None}

    @in_all_processes
    def gather_state(self) -> dict[str, Tensor]:
        """Moments and average, whole, on the CPU; in process 0 alone."""
        found = {}
        for name, tensor in self.own_state().items():
            whole = self.gather_tensor(name, tensor, 0)
            if whole is not None:
                found[name] = whole
        return found

    def own_state(self) -> dict[str, Tensor]:
        """This process's part of a checkpoint's optimizer file, under the names that it has there."""
        moments = state_tensors(self.optimizer, self.parts)
        return moments if self.ema is None else moments | self.ema.tensors()

    def gather_tensor(self, name: str, part: Tensor, to: int) -> Tensor | None:
        """A weight, moment or average by its name, whole on the CPU of process `to`, in memory of its own; counters are everywhere."""
        if part.dim() == 0:
            return part.detach().cpu().clone() if self.world.rank == to else None
        found = self.world.gather_rows(part, self.shapes[self.parameter_of(name)][0], to)
        return None if found is None else found.cpu()

    def own_parameters(self) -> nn.Module:
        """This process's rows, as the parameters of a module."""
        return _Parts(self.parts)

    def parameter_of(self, name: str) -> str:
        """The parameter that a tensor of the state belongs to."""
        name = name.removeprefix(EMA_PREFIX)
        return name if name in self.shapes else name.rpartition("/")[0]

    @in_all_processes
    def gather_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients, whole, on the CPU of process 0; they are gone afterwards."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (
                    whole := self.world.gather_rows(own_part(parameter.grad), self.shapes[name][0], 0)) is not None:
                found[name] = whole.cpu()
            parameter.grad = None
        return found

    # ---------------------------------------------------------------- saves

    @in_all_processes
    def hold_shares(self, *, number: int) -> tuple[SharedSave, dict[str, Tensor], dict[str, Tensor]]:
        """Every tensor whole in the process that owns it, in memory of its own. The others write theirs beside the loop; process 0 gets
        its own: weights under the names of a checkpoint, and state."""
        reshard(self.model)
        owners = balanced_owners({name: shape.numel() for name, shape in self.shapes.items()}, self.world.size)
        weights, state = dict[str, Tensor](), dict[str, Tensor]()
        for name, part in self.parts.items():
            if (whole := self.gather_tensor(name, part, owners[name])) is not None:
                weights[name] = whole.float()
        for name, held in self.own_state().items():
            if (whole := self.gather_tensor(name, held, owners[self.parameter_of(name)])) is not None:
                state[name] = whole
        layout = {name: pieces for name, pieces in hf_layout(self.model.config).items() if name in weights}
        foreign = {name: tensor.contiguous() for name, tensor in to_foreign(layout, weights).items()}
        save = SharedSave(self.world, number, tuple(sorted(set(owners.values()))))
        if self.world.rank in save.writers[1:]:
            self._written()
            self._writing = self._writer.submit(save.write_share, {"model": foreign, "optimizer": state})
        return save, foreign, state

    def _written(self) -> None:
        """Wait until this process's share of the last save is whole; raises what its write raised."""
        if self._writing is not None:
            self._writing.result()

    # ---------------------------------------------------------------- guards

    @in_all_processes
    def look_at_parts(self, *, names: list[str]) -> None:
        """Remember some elements of each process's rows, which `moved_counts` compares with."""
        self._looked_at = {name: some_elements(self.parts[name]).clone() for name in names}

    @in_all_processes
    def moved_counts(self) -> dict[str, tuple[int, int]]:
        """Number of elements that have moved, and that were watched, of every watched tensor; over all processes."""
        mine = {name: (int((some_elements(self.parts[name]) != before).sum()), before.numel()) for name, before in self._looked_at.items()}
        if self.world.rank > 0:
            self.world.reply(mine)
            return {}
        said = [mine, *self.world.replies()]
        return {name: (sum(each[name][0] for each in said), sum(each[name][1] for each in said)) for name in mine}

    @in_all_processes
    def without_numbers(self) -> list[str]:
        """Tensors with a value that is not finite, in any process."""
        reshard(self.model)
        mine = [name for name, part in self.parts.items() if part.numel() and not bool(torch.isfinite(part).all())]
        if self.world.rank > 0:
            self.world.reply(mine)
            return []
        return sorted({name for names in (mine, *self.world.replies()) for name in names})

    @in_all_processes
    def said_by_all(self) -> list[dict[str, Any]]:
        """State of each process, by rank: checksums of its rows of frozen tensors, steps that its optimizer counts, and its last step."""
        reshard(self.model)
        frozen = {name: part for name, part in self.parts.items() if not part.requires_grad and part.numel()}
        mine = {"frozen": dict(self.checksums(frozen)),
                "steps": sorted({int(state["step"]) for state in self.optimizer.state.values() if "step" in state}),
                "applied": {what: value.tolist() if isinstance(value, Tensor) else value for what, value in self.applied.items()}}
        if self.world.rank > 0:
            self.world.reply(mine)
            return []
        return [mine, *self.world.replies()]


class StoredTensors:
    """Tensors that a model in parts begins with, read or made one by one: weights under our names; moments and average where a run
    resumes."""

    def __init__(self, weight: Fetch, moments: Mapping[str, Tensor], average: Mapping[str, Tensor] | None = None):
        self.weight, self.moments, self.average = weight, moments, average or {}


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer as process 0's loop sees it: its steps are taken by all processes."""

    def __init__(self, sharded: ShardedModel):
        self.sharded = sharded
        self.param_groups, self.state = sharded.optimizer.param_groups, sharded.optimizer.state

    def clip_gradients(self, clip: float) -> Tensor:
        return self.sharded.clip_gradients(clip=clip)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the gradients"
        self.sharded.take_step(rates=[float(group["lr"]) for group in self.param_groups])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A step has left none."""


class ShardedEma:
    """The average as process 0's recipe sees it: all processes hold their rows of it."""

    def __init__(self, sharded: ShardedModel):
        self.sharded = sharded

    def update(self, step: int) -> None:
        self.sharded.update_average(step=step)

    def swapped(self) -> contextlib.AbstractContextManager[None]:
        return self.sharded.swapped()

    @property
    def own_rows(self) -> Ema:
        """What this process holds of it."""
        assert self.sharded.ema is not None
        return self.sharded.ema


class _Parts(nn.Module):
    """Parameters under names with dots in them, as `Ema` asks for them."""

    def __init__(self, parts: Mapping[str, nn.Parameter]):
        super().__init__()
        self._named = parts

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()

# ---------------------------------------------------------------- FSDP2, which takes a second to import: where it is used, it is


def shard_parameters(model: Transformer, world: World) -> None:
    """Shard the parameters: each block is gathered for its own pass, the rest for the whole of it. Gradients are summed: the loop divides,
    once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def fill_parts(model: Transformer, rows: dict[str, Tensor], device: str) -> None:
    """Give each parameter its rows, and release these. Those of a model that had shapes alone until here get their memory one by one, so
    that a process never holds its rows twice."""
    names = {id(p): name for name, p in model.named_parameters()}

    def filled(tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        if id(tensor) in names:
            own_part(found).copy_(rows.pop(names[id(tensor)]))
        return found

    if any(parameter.is_meta for parameter in model.parameters()):
        model._apply(filled)
    else:
        for parameter in model.parameters():
            filled(parameter)


def with_own_memory(_: str, parameter: nn.Parameter) -> nn.Parameter:
    """Parameter with memory of its own where it is trained; what is frozen keeps its shape alone."""
    return nn.Parameter(torch.empty_like(parameter, device="cpu")) if parameter.requires_grad else parameter


def reshard(model: nn.Module) -> None:
    """Reshard the parameters: every one is its rows again: what the last forward pass gathered is dropped."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def lies_in_parts(tensor: Tensor) -> bool:
    """A DTensor: one process's part, which computes as if it were the whole."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    assert lies_in_parts(tensor), "FSDP did not shard this tensor"
    return tensor.detach().to_local()  # type: ignore[attr-defined]


def whole_copy(model: Transformer) -> Transformer:
    """Copy of the whole model in host memory, tensor by tensor."""
    held: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=p.requires_grad) for p in model.parameters()}
    held |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
    return copy.deepcopy(model, held)


def around_same_tensors(model: Transformer) -> Transformer:
    """Copy of the module tree around the same tensors: what is put in the place of one's methods is not the other's."""
    held: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, held)


def matrix_direction(whole: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Muon's, of matrices of so many rows, one below the other."""
    return torch.cat([orthogonalised(matrix[None])[0] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5 for matrix in whole.split(rows)])


def some_elements(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT]


def measured_nothing(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Neutral metrics under the same names, which change neither a sum nor a maximum: every process sums the same values, whoever has
    rows."""
    return {name: torch.full_like(value, -math.inf) if name.endswith("/max") else torch.zeros_like(value)
            for name, value in metrics.items()}


def _compute_as(whole: Transformer, sharded: Transformer, device: str) -> None:
    """Forward passes of the copy are the sharded model's: what a checkpoint says of its answers is what the run computes."""

    def hidden(tokens: Tensor, **named: Any) -> Tensor:
        kept, sharded.compute_dtype = sharded.compute_dtype, whole.compute_dtype
        try:
            return sharded.hidden(tokens.to(device), **named)
        finally:
            sharded.compute_dtype = kept

    whole.hidden, whole.logits = hidden, sharded.logits  # type: ignore[method-assign,assignment]


def balanced_owners(bytes_of: Mapping[str, int], size: int) -> dict[str, int]:
    """Owner of each tensor: the largest first, each to the process with the least so far; the same in every process."""
    load, owners = [0] * size, dict[str, int]()
    for name in sorted(bytes_of, key=lambda name: (-bytes_of[name], name)):
        owners[name] = min(range(size), key=lambda rank: load[rank])
        load[owners[name]] += bytes_of[name]
    return owners


def gradient_distance(found: Mapping[str, Tensor], due: Mapping[str, Tensor]) -> float:
    """Distance of two gradients, relative to the due gradient's norm; infinite where one has a tensor that the other lacks."""
    if found.keys() != due.keys():
        return math.inf
    scale = math.sqrt(sum(float(gradient.float().square().sum()) for gradient in due.values()))
    apart = math.sqrt(sum(float((found[name].float() - gradient.float()).square().sum()) for name, gradient in due.items()))
    return apart / max(1e-30, scale)

"""Sampler weights: the trainer's own parameters, cast at most once a version, and a fingerprint of them."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from assay.errors import GuardStop, UsageError
from assay.model.quantised import is_code
from assay.model.transformer import Linear, Transformer

_CHUNK = 1 << 22  # entries that are summed at once
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """sha256 over every parameter's name, dtype and shape, and an exact checksum of all their bits and places, made on their device.

    Integer sums wrap and have no order, so it is the same on every device, and nothing but a sum leaves it. It tells versions
    apart; it is no defence against someone who wants a collision: checkpoints have a sha256 of every byte.
    """
    named = dict(sorted(model.named_parameters()))
    lines = [f"{name} {parameter.dtype} {list(parameter.shape)}" for name, parameter in named.items()]
    alike: dict[tuple[int, torch.device], list[Tensor]] = {}
    for parameter in named.values():
        alike.setdefault((parameter.element_size(), parameter.device), []).append(parameter)
    sums = [_checksum(tensors).tolist() for tensors in alike.values()]
    return hashlib.sha256("\n".join([*lines, *map(str, sums)]).encode()).hexdigest()


@torch.no_grad()
def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksum of each tensor, made where it lies; one wait for all of them."""
    sums = [_checksum([tensor]) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack([total.cpu() for total in sums]).tolist(), strict=True)) if sums else {}


def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Each entry's bits times an odd number that belongs to its place, as if all tensors, of one size and device, were one."""
    device, bits_of = tensors[0].device, BITS[tensors[0].element_size()]
    pieces = [piece for tensor in tensors for piece in tensor.detach().contiguous().flatten().view(bits_of).split(_CHUNK)]
    odd = (2 * torch.arange(min(_CHUNK, sum(map(len, pieces))), device=device) + 1) * ODD
    total, start = torch.zeros((), dtype=torch.int64, device=device), 0
    for together in _up_to(_CHUNK, pieces):
        bits = torch.cat(together)
        total += (bits * odd[: len(bits)]).sum() + bits.sum() * (2 * start) * ODD  # at place p, 2p + 1 times ODD
        start += len(bits)
    return total + start


def _up_to(most: int, pieces: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, so many entries at most: a model has hundreds of tensors, and a GPU launches for each alone."""
    together: list[Tensor] = []
    for piece in pieces:
        if together and sum(map(len, together)) + len(piece) > most:
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


class SamplerWeights:
    """A second module tree around the same parameters. Those that are not in the compute dtype are copied once a version instead of at
    every token; the cast is the one that each layer makes in training, so the numbers are the same.

    With a `device`, all are copied there, even where it is the trainer's own, and handed over by digest: what the sampler is about
    to run has the trainer's checksums, tensor by tensor, or nothing is sampled. So one device shows all of it but what lies between
    two: that a copy from one GPU to another is complete before the other's streams read it is PyTorch's to keep, and the digests,
    which are read on the other device after the copy, are what would tell.

    A sampler that `lags` goes on with its own copies while the trainer writes to its weights; what is never trained is shared.

    `load` takes up the trainer's weights; `written` and `replaced` say whether they (its own, where it lags) have changed since.
    """

    def __init__(self, model: Transformer, device: torch.device | str | None = None, *, lags: bool = False):
        self.source, self.lags = model, lags
        self.dtype = model.compute_dtype or model.embed.weight.dtype
        self.device = model.embed.weight.device if device is None else torch.empty(0, device=device).device  # "cuda" gets its number
        self.separate = device is not None or lags
        self.copies: list[tuple[str, Tensor]] = []  # name in the source, and a tensor that follows it
        self.model = self._twin().eval()
        self._record_loaded()

    def load(self) -> bool:
        """Load the weights as they are now; True where some have new addresses, so that captured graphs are void."""
        before = self._addresses
        parameters = dict(self.source.named_parameters())
        if parameters.keys() != self._loaded.keys():
            raise UsageError("the model has gained or lost parameters since its engine was made (an adapter attached or detached?); "
                             "make a new engine")
        copied = {name for name, _ in self.copies}
        if any(parameters[name] is not held for name, held in self._loaded.items() if name not in copied):
            raise UsageError("parameters of the model were replaced by others since its engine was made; make a new engine")
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in self.copies], [parameters[name] for name, _ in self.copies])
        if self.separate:
            self._refuse_stale()
        self._record_loaded()
        return before != self._addresses

    def written(self) -> bool:
        """Whether a parameter was written to since `load`: torch counts every write in place."""
        return any(held._version != count for held, count in self._counts)

    def replaced(self) -> bool:
        """Whether the model has other parameters than at `load`; slower than `written`."""
        now = dict(self.source.named_parameters())
        return now.keys() != self._loaded.keys() or any(now[name] is not held for name, held in self._loaded.items())

    @torch.no_grad()
    def stale(self) -> list[str]:
        """Tensors of the sampler that are not the trainer's, cast as they must be; each checksum is made where its tensor lies."""
        source, held = dict(self.source.named_parameters()), dict(self.model.named_parameters())
        due = [_checksum([source.get(name, self.source.embed.weight).to(tensor.dtype)]) for name, tensor in held.items()]
        found = [_checksum([tensor]) for tensor in held.values()]
        pairs = zip(held, torch.stack(due).tolist(), torch.stack(found).tolist(), strict=True)
        return [name for name, one, other in pairs if one != other]

    def _refuse_stale(self) -> None:
        if stale := self.stale():
            raise GuardStop(f"{len(stale)} tensors on {self.device} are not the trainer's after they were handed over, such as {stale[0]}: "
                            "what would be sampled is another policy's; sample where the trainer is, without --sampler-device")

    def _record_loaded(self) -> None:
        self._loaded = dict(self.source.named_parameters())
        watched = [held for _, held in self.copies] if self.lags else self._loaded.values()
        self._counts = [(parameter, parameter._version) for parameter in watched]
        self._addresses = [parameter.data_ptr() for parameter in self.model.parameters()]

    def _twin(self) -> Transformer:
        learned = self.source.position is not None
        exact = {"embed.weight", "position.weight"} if learned else set()  # added up before they are cast
        memo: dict[int, nn.Parameter] = {}
        for name, parameter in self.source.named_parameters():
            memo[id(parameter)] = self._shared_or_copied(name, parameter, parameter.dtype if name in exact or is_code(name) else self.dtype)
        twin = copy.deepcopy(self.source, memo).to(self.device)  # what is left to move are tables that no training changes
        if learned and twin.head is None:
            twin.head = Linear(self.source.config.width, self.source.config.vocab, bias=False, device="meta")
            twin.head.weight = self._shared_or_copied("embed.weight", self.source.embed.weight, self.dtype)
        return twin

    def _shared_or_copied(self, name: str, parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """The parameter itself where it can be used as it is, else a copy that `load` renews."""
        shared = not self.separate or (self.lags and not parameter.requires_grad and parameter.device == self.device)
        if isinstance(parameter, nn.Parameter) and parameter.dtype == dtype and shared:
            return parameter
        copied = nn.Parameter(parameter.detach().to(self.device, dtype, copy=True), requires_grad=False)
        self.copies.append((name, copied.detach()))
        return copied

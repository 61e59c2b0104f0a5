"""Shared save: one checkpoint that several processes write, each the whole tensors that it owns; process 0 alone commits it.

Process 0 makes the temporary folder and says where it is. Every process writes its files there and says what they hold; process 0 puts
the indices and the manifest beside them and renames the folder. Until then there is no checkpoint: a process that dies before it
costs this save, and none that was made before.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from assay.errors import StoreError
from assay.model.world import World
from assay.store.safetensors_files import FileFacts, shard_file_name, write_index, write_tensors

Stems = Mapping[str, Mapping[str, Tensor]]  # "model" and "optimizer" → the tensors of it that a process owns
WRITING_TIMES = 10.0  # another process may take so many times as long to write as process 0 did, beside the usual patience


@dataclasses.dataclass(frozen=True)
class SharedSave:
    """The save of this number, which `writers` (ranks, in order) write together."""

    world: World
    number: int
    writers: tuple[int, ...]

    def write(self, folder: Path, own: Stems) -> dict[str, FileFacts]:
        """Write all files, in process 0: its own and the others', and the indices over them."""
        self.world.post(f"save {self.number}", str(folder))
        began = time.monotonic()
        facts = self._write_own(folder, own)
        patience = self.world.patience + WRITING_TIMES * (time.monotonic() - began)
        for rank in self.writers:
            if rank != self.world.rank:
                facts |= self._fetch(rank, patience)
        for stem in own:
            facts |= write_index(folder, {name: fact for name, fact in facts.items() if name.startswith(f"{stem}-")}, stem)
        return facts

    def write_share(self, own: Stems) -> None:
        """Write this process's share, in every other process that owns anything. What goes wrong is process 0's to say."""
        folder = self.world.fetch(f"save {self.number}", self.world.patience)
        if folder is None:
            return  # process 0 has not come so far, and will say why
        try:
            facts = self._write_own(Path(folder), own)
        except (StoreError, OSError) as error:
            self.world.post(self._reply(self.world.rank), {"error": str(error)})
            return
        self.world.post(self._reply(self.world.rank), {name: dataclasses.asdict(fact) for name, fact in facts.items()})

    def _write_own(self, folder: Path, own: Stems) -> dict[str, FileFacts]:
        part = self.writers.index(self.world.rank) + 1
        names = {stem: shard_file_name(stem, part, len(self.writers)) for stem in own}
        return {names[stem]: write_tensors(folder / names[stem], tensors) for stem, tensors in own.items()}

    def _fetch(self, rank: int, patience: float) -> dict[str, FileFacts]:
        said = self.world.fetch(self._reply(rank), patience)
        if said is None:
            raise StoreError(f"process {rank} has not written its part of the checkpoint within {patience:.0f} s: nothing was saved; the "
                             "checkpoints before it are whole")
        if "error" in said:
            raise StoreError(f"process {rank} could not write its part of the checkpoint: {said['error']}")
        return {name: FileFacts(**fact) for name, fact in said.items()}

    def _reply(self, rank: int) -> str:
        return f"share {self.number} {rank}"

"""Mapped pages: tensors over a mapped file are hashed and carried to a device part by part, and the memory of each part is given back.

A mapped file counts as this process's memory page by page, as it is read. Read through once, an 8B model would count whole; given
back behind the reader, its pages stay in the system's cache and cost this process nothing.
"""

import ctypes
import hashlib
import mmap

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 64 << 20  # that are looked at together
_DONTNEED = 4  # madvise: of a private mapping of a file, pages that were only read are read again when next asked for
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)  # bits of an entry of /proc/self/pagemap


def hashed_in_passing(tensor: Tensor) -> str:
    """sha256 of the elements in order, as `tensor_sha256`, with a mapped file's pages given back behind it."""
    flat, digest = _bytes_of(tensor), hashlib.sha256()
    for start in range(0, len(flat), PART_BYTES):
        part = flat[start : start + PART_BYTES]
        digest.update(part.numpy().data)
        release_pages(part)
    return digest.hexdigest()


def carried_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device; on the way at most a part of it is in this process's memory, where a mapped file holds it."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    source, target = _bytes_of(tensor), made.reshape(-1).view(torch.uint8)
    for start in range(0, len(source), PART_BYTES):
        part = source[start : start + PART_BYTES]
        target[start : start + len(part)].copy_(part)
        release_pages(part)
    return made


def release_pages(part: Tensor) -> int:
    """Give back the pages under these bytes where all of them are a file's, only read; returns how many bytes that were.

    A page that was written to is no longer the file's, and neither is a heap's: then nothing is given back, so that no value can change.
    """
    page = mmap.PAGESIZE
    first, last = -(-part.data_ptr() // page), (part.data_ptr() + part.numel() * part.element_size()) // page
    if part.device.type != "cpu" or first >= last:
        return 0
    entries = _pagemap(first, last)
    present = entries & _PRESENT != 0
    if not present.any() or not (entries[present] & _OF_A_FILE).all():
        return 0
    _libc().madvise(ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page), _DONTNEED)
    return (last - first) * page


def _pagemap(first: int, last: int) -> np.ndarray:
    """The system's entry of each page; empty where it does not tell."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            data = file.read(8 * (last - first))
    except OSError:
        return np.empty(0, np.uint64)
    return np.frombuffer(data, np.uint64) if len(data) == 8 * (last - first) else np.empty(0, np.uint64)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)

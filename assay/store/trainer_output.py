"""Trainer output: the folders `checkpoint-N` that transformers' and TRL's trainers write beside each other. Found without torch."""

import re
from pathlib import Path

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{1,18})")
MODEL_FILES = ("manifest.json", "config.json", "adapter_config.json")  # a folder with one of them is a model itself


def trainer_checkpoints(path: Path) -> list[Path]:
    """Folders checkpoint-N of transformers' or TRL's output folder that is no model itself, newest first."""
    if not path.is_dir() or any((path / name).exists() for name in MODEL_FILES):
        return []
    numbered = {int(found[1]): child for child in path.iterdir() if child.is_dir() and (found := CHECKPOINT_NAME.fullmatch(child.name))}
    return [numbered[step] for step in sorted(numbered, reverse=True)]

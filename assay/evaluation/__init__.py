"""Evaluation of a model: tasks, scoring, the results on disk, held-out loss, agreement with a teacher, and edits."""

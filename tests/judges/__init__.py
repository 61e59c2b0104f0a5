"""Judges: other people's tests of what we do, run at pinned versions in an environment of their own.

    make judges JUDGES=FOLDER                          every judge; docs/scorecard.md
    build/judges/bin/python -m tests.judges FOLDER --only json_schema chat_templates

FOLDER holds the user's checkouts: llama.cpp, JSON-Schema-Test-Suite, safetensors, trl, openai-openapi, human-eval, and in evalplus/ the
files HumanEvalPlus and MbppPlus of EvalPlus; score.py has the commits that docs/scorecard.md was made with. What is not there is said
and skipped; nothing of it is copied into this repository.
Each judge is one module with ASKS, a sentence, and `judge(folder) -> Score`.
"""

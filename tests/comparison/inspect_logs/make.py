"""Logs in this folder, made by inspect-ai 0.3.285 itself with its mock model: `python make.py eval 3`, `… eval 8`.

Eight sums asked twice (epochs) and judged by two scorers; the mock is told how many tokens it used, else it would fetch an encoding.
"""

import sys

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate

kind, right = sys.argv[1], int(sys.argv[2])
samples = [Sample(input=f"{a} + {a + 3} =", target=str(2 * a + 3), id=f"sum-{a}") for a in range(8)]
outputs = [ModelOutput.from_content("mockllm/model", str(2 * a + 3) if a < right else "no idea") for _ in range(2) for a in range(8)]
for output in outputs:
    output.usage = ModelUsage(input_tokens=8, output_tokens=2, total_tokens=10)
task = Task(name="sums", dataset=MemoryDataset(samples), solver=[generate()], scorer=[match(), includes()])
logs = evaluate(task, model=get_model("mockllm/model", custom_outputs=outputs), epochs=2, log_dir=f"{kind}-{right}", log_format=kind,
                display="plain", max_connections=1, max_samples=1)
print(logs[0].status, logs[0].results.scores[0].metrics["accuracy"].value)

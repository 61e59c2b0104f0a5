"""The first incident (OpenPipe/ART#672) replayed: a policy forked from a LoRA checkpoint, served, and taught by an external agent.

    python -m tests.incident [--only WORDS] > results/incident.txt        # make incident; minutes

Every cause that was suspected or is known of such systems is planted in the process where it would strike: the server, the trainer, or the
agent. Nothing is mocked: `assay sft`, `assay serve --train`, `assay serve --rollouts`, `assay grpo` and `assay prove` are run as commands.
"""

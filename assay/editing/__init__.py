"""Model editing: facts written into weights in closed form; every edit is a Patch, and the model is left as it was."""

"""Facts written into weights in closed form; every edit is a Patch, and the model that was asked is left as it was."""

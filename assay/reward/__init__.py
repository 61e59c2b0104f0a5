"""What a completion is worth: rule rewards in worker processes, a relative judge, code in a sandbox."""

"""One file per command-line verb: its flags, what it calls, what it prints."""

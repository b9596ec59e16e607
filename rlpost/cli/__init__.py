"""The command line: one module a verb, nothing heavy imported at the top of any."""

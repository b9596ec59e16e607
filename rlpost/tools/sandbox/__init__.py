"""The one place where code that a model wrote is run, apart from this machine and under limits.

`Sandbox` (in sandbox.py, public as `rlpost.sandbox.Sandbox`) is the door; everything else here is how
it keeps its word. Linux only.
"""

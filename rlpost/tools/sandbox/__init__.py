"""The only place that runs code that a model wrote, isolated from this machine and under limits.

`Sandbox` (in sandbox.py, public as `rlpost.sandbox.Sandbox`) is the door; the other files implement it. Linux only.
"""

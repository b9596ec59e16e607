"""Trackers: where a run's figures go beside its own metrics.jsonl, one tracker a file.

A tracker runs in a process of its own that follows metrics.jsonl, so it logs what is written there
and nothing else, cannot slow a step, and is ended from outside where it hangs.
"""

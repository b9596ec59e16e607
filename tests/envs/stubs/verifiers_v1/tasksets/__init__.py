"""Stands in for verifiers.v1.tasksets: verifiers brings no taskset."""

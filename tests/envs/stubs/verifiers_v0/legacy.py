"""Stands in for verifiers.legacy, which a verifiers with v0 has."""

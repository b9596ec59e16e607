"""Rewards: pure functions (reply, task) -> Score, free of torch and tokenizers."""

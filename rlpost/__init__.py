"""rlpost: post-train language models with GRPO and SFT from the command line."""

__version__ = "0.1.0"

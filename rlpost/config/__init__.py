"""Hydra and the settings classes: compose, check and explain a configuration, without torch."""

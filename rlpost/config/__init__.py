"""Where Hydra meets the settings: compose, check and explain a configuration, without torch."""

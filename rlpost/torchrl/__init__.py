"""TorchRL's manner of the parts: policies, environments and losses on TensorDicts, and what its documents name."""

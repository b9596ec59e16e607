"""A trained model handed on: as a Hugging Face folder, a peft adapter or a GGUF file, each with a model card."""

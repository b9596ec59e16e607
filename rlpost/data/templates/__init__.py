"""Chat formats of model families: how each writes a conversation, and how its text is read back."""

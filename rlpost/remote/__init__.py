"""The one way to have an object in another process: a local child or a Ray actor, with deadlines."""

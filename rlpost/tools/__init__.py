"""The tools that a model may call, and the sandbox that runs the code it writes."""

"""Memory, disk and time of a training, estimated before anything is loaded: no file here imports torch."""

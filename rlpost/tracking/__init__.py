"""Trackers: send a run's metrics to TensorBoard, Weights & Biases, trackio or MLflow, besides its own metrics.jsonl."""

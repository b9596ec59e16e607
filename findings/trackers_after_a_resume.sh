#!/usr/bin/env bash
# mlflow 3.17.2, trackio 0.43.0: what a tracker shows of a training that went back to a checkpoint.
#
# A run logs steps 1 to 8 and dies; it is resumed from its checkpoint of step 3, under the same id, and logs steps 4 to 6
# again with other values.
#
# Guess: a tracker keeps one value for a key and a step, so a value logged again replaces the one before, and a run's
# latest value is the one that was logged last.
# Seen: both keep both values of steps 4 to 6 in the run's history, without a word. MLflow's latest value of a metric,
# which its tables, searches and comparisons use, is the one of the highest step: that of step 8, which was undone, until
# the resumed training has gone past it. Steps 7 and 8 of the first attempt stay in the curve in either.
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install mlflow==3.17.2 trackio==0.43.0
cat > "$folder/see.py" <<'P'
import trackio
from mlflow.tracking import MlflowClient
from trackio.sqlite_storage import SQLiteStorage

FIRST = [(step, step / 10) for step in range(1, 9)]
AGAIN = [(step, step / 100) for step in range(4, 7)]

client = MlflowClient("sqlite:///runs.db")
run = client.create_run(client.create_experiment("sums")).info.run_id
for step, value in FIRST + AGAIN:
    client.log_metric(run, "reward", value, step=step)
latest = client.get_run(run).data.metrics["reward"]
history = [(each.step, each.value) for each in client.get_metric_history(run, "reward")]
print("mlflow   latest", latest, "history", history)

for resume, values in (("never", FIRST), ("must", AGAIN)):
    attempt = trackio.init(project="sums", name="run", resume=resume, embed=False)
    for step, value in values:
        attempt.log({"reward": value}, step=step)
    attempt.finish()
rows = [(row["step"], row["reward"]) for row in SQLiteStorage.get_logs("sums", "run")]
print("trackio  rows", rows)
assert (latest, sorted(history), sorted(rows)) == (0.8, sorted(FIRST + AGAIN), sorted(FIRST + AGAIN)), "it has changed"
P
cd "$folder"
TRACKIO_DIR="$folder/trackio" "$folder/venv/bin/python" see.py 2> /dev/null

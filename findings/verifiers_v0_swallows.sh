#!/usr/bin/env bash
# verifiers 0.3.1: a reward function of an environment written for v0 that raises counts 0, with a line in the log alone.
#
# Guess: a reward that raises fails the rollout, or its score is missing.
# Seen: Rubric calls each function in a try, logs "Error calling reward function", and goes on with 0.0. score_rollout
# raises nothing, state["error"] stays None and state["reward"] is the sum of the others: a trainer cannot tell a broken
# reward from a wrong answer. (In v1 the same mistake raises a TaskError and leaves every reward of the task None.)
#
# Exits with 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet verifiers==0.3.1
cat > "$folder/see.py" <<'P'
import asyncio
import sys

import verifiers as vf


def broken(completion):
    raise KeyError("a mistake in the reward")


def fine(completion):
    return 1.0


rubric = vf.Rubric(funcs=[broken, fine], weights=[1.0, 0.5])
reply = [{"role": "assistant", "content": "7"}]
state = vf.State(input={"prompt": [], "example_id": 0, "answer": "7"}, completion=reply, error=None, trajectory=[])
asyncio.run(rubric.score_rollout(state))
seen = (state["reward"], state["metrics"], state["error"])
print("reward {}, metrics {}, error {}".format(*seen))
if seen != (0.5, {"broken": 0.0, "fine": 1.0}, None):
    sys.exit("it is otherwise now")
P
"$folder/venv/bin/python" "$folder/see.py"

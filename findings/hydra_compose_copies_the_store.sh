#!/usr/bin/env bash
# hydra-core 1.3.2, omegaconf 2.3.0: what hydra.compose does before it composes.
#
# Structured configs are stored once, with ConfigStore.store; compose then names a few of them.
#
# Guess: what compose costs depends on what is composed, since nodes that nobody names are only entries of a dictionary;
# and ConfigStore.load copies the node that it gives away, so the others need not be touched.
# Seen: every call makes a deep copy of the whole store, once, to protect it from a search path that may change. With 400
# classes of 20 fields that nothing names, composing a config of one field takes many times as long as without them.
# An application with many options per group pays for all of them in every call, also in each job of a sweep.
#
# Exits with 1 if this changes: the ratio is below 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install hydra-core==1.3.2 omegaconf==2.3.0
cat > "$folder/see.py" <<'P'
import sys
import time
from dataclasses import dataclass, make_dataclass

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore


@dataclass
class Small:
    steps: int = 3


def best() -> float:
    """Milliseconds of a call, the least of ten."""
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        assert compose("small").steps == 3
        taken.append(1e3 * (time.perf_counter() - began))
    return min(taken)


store = ConfigStore.instance()
store.store(name="small", node=Small)
with initialize(config_path=None, version_base="1.3"):
    alone = best()
    for number in range(400):
        store.store(group="unused", name=f"n{number}", node=make_dataclass(f"N{number}", [(f"f{i}", int, i) for i in range(20)]))
    beside = best()
print(f"alone: {alone:.1f} ms; beside 400 nodes that are not named: {beside:.1f} ms, {beside / alone:.1f} times")
sys.exit(0 if beside > 3 * alone else 1)
P
"$folder/venv/bin/python" "$folder/see.py"

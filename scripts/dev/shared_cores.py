"""A step's seconds while the machine is quiet, and while other programs are busy on every core.

    python scripts/dev/shared_cores.py [steps]

Run it on a machine that does nothing else; it takes about five minutes on two cores. A default GRPO step beside as many
busy programs as there are cores may take three times as long as a quiet one: the programs have half of the cores then.
`GOMP_SPINCOUNT=20000` in front measures threads that spin ten times as long while they wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

MOST = 3.0  # times the seconds of a quiet step


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    cores = len(os.sched_getaffinity(0))
    quiet, shared = (median(step_seconds(steps, busy)[1:]) for busy in (0, cores))
    print(
        f"a step: quiet {quiet:.1f} s, beside {cores} busy programs {shared:.1f} s: {shared / quiet:.1f} times as long"
    )
    return int(shared > MOST * quiet)


def step_seconds(steps: int, busy: int) -> list[float]:
    """The seconds of each step of a default training, beside `busy` programs that never wait."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "grpo", f"steps={steps}", "eval.enabled=false", "--out", f"{folder}/run"]
            subprocess.run([sys.executable, "-m", "rlpost", *words], check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    finally:
        for program in programs:
            program.kill()
    return [row["time/step"] for row in rows]


if __name__ == "__main__":
    sys.exit(main())

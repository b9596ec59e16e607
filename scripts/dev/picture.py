"""Draw the screen of a recorded training as an SVG: `python scripts/dev/picture.py runs/NAME 30 docs/training.svg`.

The screen is the one that `rlpost train` shows on a terminal, at the end of the given step.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from rlpost.record import read_metrics
from rlpost.runs.reader import read_run
from rlpost.runs.rollouts import read_rollouts
from rlpost.screen.picture import frame
from rlpost.screen.state import Shown, State

WIDTH, HEIGHT = 100, 22  # cells
PHASES = {  # of a step, in their order
    "sampling": "time/rollout",
    "training": "time/train",
    "pushing weights": "time/sync",
    "evaluating": "time/eval",
}
NO_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # they are on another server


def main() -> None:
    run, step, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rows = [row for row in read_metrics(run / "metrics.jsonl")[0] if row["step"] <= step]
    record = read_run(run)
    seconds = 0.0
    state = State(now=lambda: seconds, title=run.name, about=f"{record.choice('model')} · {record.choice('env')}")
    state.started, state.total = 0.0, record.total_steps or step
    for row in rows:
        for phase, key in PHASES.items():
            state.begin_phase(phase)
            seconds += row.get(key) or 0.0
        state.end_step(row["step"], row)
    state.begin_phase("sampling")
    first = read_rollouts(run, step)[0]
    asked = str(first["prompt"]).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]  # SmolLM2's template
    parts = dict(first["reward_parts"])
    state.samples = [Shown(step, asked, first["completion"], first["reward"], parts, first["finish_reason"])]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in frame(state, WIDTH, HEIGHT):
        console.print(line)
    target.write_text(console.export_svg(title="rlpost train grpo", code_format=NO_FONTS, unique_id="rlpost"))


if __name__ == "__main__":
    main()

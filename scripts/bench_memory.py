"""Runs a command of rlpost and prints the most memory that it and all its processes held, when, and of what kind.

Memory is the sum of PSS (/proc/PID/smaps_rollup) over the process tree, read every 0.2 s: pages that
several processes share are counted once. Files that processes outside of the tree have mapped too,
such as torch's libraries, count in part only, so run it on a machine that does nothing else. Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlpost.model.memory import LOOK_EVERY, process_tree, smaps_rollup

KINDS = {"Pss_Anon": "memory of its own", "Pss_File": "files mapped", "Pss_Shmem": "shared memory"}


def main(arguments: Sequence[str]) -> int:
    """Returns the command's exit code; 1 where that is 0 and the peak is above --at-most."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every sample there, a JSON object a line")
    parser.add_argument(
        "--at-most", type=float, metavar="GB", help="exit code 1 where the peak is above, in 10^9 bytes"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="as after `rlpost`: train grpo steps=4 ...")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name what to run, as in: scripts/bench_memory train grpo steps=4")
    command = [sys.executable, "-P", "-m", "rlpost", *options.command]
    said = ["the start"]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        threading.Thread(target=repeat, args=(running, said), daemon=True).start()
        samples = []
        while running.poll() is None:
            samples.append({"seconds": time.monotonic() - began, "after": said[-1], **held_by(running.pid)})
            time.sleep(LOOK_EVERY)
    if options.samples is not None:
        options.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    print("\n".join(lines(samples)))
    above = too_much(samples, options.at_most)
    if above is not None:
        print(above, file=sys.stderr)
    return running.returncode or int(above is not None)


def repeat(running: subprocess.Popen[str], said: list[str]) -> None:
    """Print what the command prints, and keep the last line of it in `said`."""
    assert running.stdout is not None
    for line in running.stdout:
        print(line, end="", flush=True)
        said.append(line.strip() or said[-1])


def held_by(pid: int) -> dict[str, float]:
    """What the process tree of `pid` holds: PSS in bytes, in all and of each kind, and the number of processes."""
    processes = process_tree(pid)
    held: Counter[str] = Counter(processes=len(processes))
    for process in processes:
        held.update(smaps_rollup(process))
    return {name: held[name] for name in ("processes", "Pss", *KINDS)}


def lines(samples: Sequence[dict]) -> list[str]:
    """The result for people."""
    most = max(samples, key=lambda sample: sample["Pss"])
    kinds = ", ".join(f"{most[name] / 1e9:.2f} GB {what}" for name, what in KINDS.items())
    return [
        "",
        f"peak     {most['Pss'] / 1e9:.2f} GB after {most['seconds']:.0f} s of {samples[-1]['seconds']:.0f}, "
        f"in {most['processes']:.0f} processes: {kinds}",
        f"it was   after: {most['after']}",
    ]


def too_much(samples: Sequence[dict], at_most: float | None) -> str | None:
    """What to say where the peak is above `at_most` GB; None where it is not, or where nothing was asked."""
    peak = max(sample["Pss"] for sample in samples) / 1e9
    if at_most is None or peak <= at_most:
        return None
    return f"error: the peak of {peak:.3f} GB is above the {at_most:g} GB of --at-most"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

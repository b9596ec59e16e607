"""Puts every loss of GRPO to the test that a sound algorithm passes: `.venv/bin/python scripts/sanity.py`.

The packaged model answers each of 300 sums 40 times. Those with 20 to 80% right answers can be learned, so a sound
algorithm reaches 95% on them: the protocol of arXiv:2510.26788, on a laptop. Each loss trains on these sums with the
recipe sanity-smollm2-cpu, then the model answers each of them 8 times. What is already in runs/sanity is kept, and an
interrupted training goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlpost.objectives.functional import VARIANTS
from rlpost.record import read_metrics

FOLDER = Path("runs/sanity")  # as the recipe says
SUMS, ATTEMPTS, AGAIN, PASSED = 300, 40, 8, 0.95
RECENT = 4  # steps whose mean accuracy counts as reaching a level


def rlpost(*words: str) -> None:
    """Run a command."""
    print("rlpost " + " ".join(words), flush=True)
    subprocess.run([sys.executable, "-m", "rlpost", *words], check=True)


def measure(sums: Path, rates: Path) -> None:
    """Write sums of numbers up to 40, each once, and how often the model answers each of them right."""
    pairs = [(a, b) for a in range(1, 41) for b in range(1, 41)]
    chosen = random.Random(0).sample(pairs, SUMS)
    rows = [{"prompt": f"What is {a} + {b}? Be brief.", "answer": str(a + b)} for a, b in chosen]
    sums.parent.mkdir(parents=True, exist_ok=True)
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ["env=dataset", f"env.path={sums}", "env.held_out=0", "env.reward=number", "env.max_completion_tokens=20"]
    rlpost("data", "measure", "model=smollm2", *env, f"eval.samples={ATTEMPTS}", "--out", str(rates))


def steps_to_pass(metrics: list[dict[str, Any]]) -> int | None:
    """The first step that ends `RECENT` steps with a mean accuracy of `PASSED`."""
    accuracy = [row["accuracy/lenient"] for row in metrics if "accuracy/lenient" in row]
    ends = range(RECENT, len(accuracy) + 1)
    return next((end for end in ends if sum(accuracy[end - RECENT : end]) / RECENT >= PASSED), None)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", action="append", choices=[*VARIANTS], help="only this one; may be repeated")
    parser.add_argument("words", nargs="*", help="settings for all, as steps=120")
    asked = parser.parse_args()
    rates = FOLDER / "rates.jsonl"
    if not rates.exists():
        measure(FOLDER / "sums.jsonl", rates)
    table = ["| loss | steps to 95% | accuracy after | 95% interval | prompts |", "|---|---|---|---|---|"]
    for loss in asked.loss or VARIANTS:
        run, result = FOLDER / loss, FOLDER / f"{loss}-eval"
        if not (result / "result.json").exists():
            given = ["recipe=sanity-smollm2-cpu", f"loss={loss}", *asked.words, "--out", str(run), "--resume", "auto"]
            rlpost("train", "grpo", *given)
            those = [f"env.pass_rates={rates}", "env.min_pass_rate=0.2", "env.max_pass_rate=0.8", "env.split=train"]
            rlpost("eval", f"model={run}", *those, f"eval.samples={AGAIN}", "--out", str(result))
        metrics, _ = read_metrics(run / "metrics.jsonl")
        found = json.loads((result / "result.json").read_text())["result"]
        accuracy, passed = found["accuracy_lenient"], steps_to_pass(metrics)
        table.append(
            f"| `{loss}` | {passed or 'not in ' + str(len(metrics))} | {accuracy['value']:.1%} | "
            f"[{accuracy['low']:.1%}, {accuracy['high']:.1%}] | {found['num_prompts']} |"
        )
    print("\n".join(table))


if __name__ == "__main__":
    main()

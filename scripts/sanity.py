"""Puts every loss of GRPO to the test that a sound algorithm passes: `.venv/bin/python scripts/sanity.py`.

The packaged model answers each sum 40 times. Sums with 20 to 80% right answers can be learned, so a sound algorithm
reaches 95% on them: the protocol of arXiv:2510.26788, on a laptop. Each loss trains on these sums, then the model
answers each of them 8 times. A run that is there already is kept.
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

SUMS, ATTEMPTS, AGAIN, PASSED = 300, 40, 8, 0.95
BETWEEN = ["env.min_pass_rate=0.2", "env.max_pass_rate=0.8"]
TRAINING = ["eval.enabled=false", "optim.schedule=constant"]
RECENT = 4  # steps whose mean accuracy counts as reaching a level


def rlpost(*words: str) -> dict[str, Any]:
    """Run a command; the JSON that it prints."""
    command = [sys.executable, "-m", "rlpost", *words]
    print("rlpost " + " ".join(words), flush=True)
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(said) if "--json" in words else {}


def write_sums(file: Path) -> None:
    """Sums of numbers up to 40, each once, with their answers."""
    pairs = [(a, b) for a in range(1, 41) for b in range(1, 41)]
    chosen = random.Random(0).sample(pairs, SUMS)
    rows = [{"prompt": f"What is {a} + {b}? Be brief.", "answer": str(a + b)} for a, b in chosen]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps_to_pass(metrics: list[dict[str, Any]]) -> int | None:
    """The first step that ends `RECENT` steps with a mean accuracy of `PASSED`."""
    accuracy = [row["accuracy/lenient"] for row in metrics if "accuracy/lenient" in row]
    ends = range(RECENT, len(accuracy) + 1)
    return next((end for end in ends if sum(accuracy[end - RECENT : end]) / RECENT >= PASSED), None)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/sanity"), help="for rows, runs and results")
    parser.add_argument("--loss", action="append", choices=[*VARIANTS], help="only this one; may be repeated")
    parser.add_argument("words", nargs="*", help="settings for all, as steps=120")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    sums, rates = asked.folder / "sums.jsonl", asked.folder / "rates.jsonl"
    # all rows are trained on: the split test is taken out of a file without one, unless it has its own
    rows = ["env=dataset", f"env.path={sums}", f"env.test_path={asked.folder}/held-out.jsonl", "env.reward=number"]
    if not sums.exists():
        write_sums(sums)
        (asked.folder / "held-out.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}) + "\n")
    length = "env.max_completion_tokens=20"
    if not rates.exists():
        rlpost("data", "measure", "model=smollm2", *rows, length, f"eval.samples={ATTEMPTS}", "--out", str(rates))
    chosen = [*rows, length, f"env.pass_rates={rates}", *BETWEEN]
    table = ["| loss | steps to 95% | accuracy after | 95% interval | prompts | seconds |", "|---|---|---|---|---|---|"]
    for loss in asked.loss or VARIANTS:
        run, result = asked.folder / loss, asked.folder / f"{loss}-eval"
        if not (run / "checkpoints" / "latest").exists():
            rlpost("train", "grpo", *chosen, f"loss={loss}", *TRAINING, *asked.words, "--out", str(run))
        if not (result / "result.json").exists():
            asks = ["env.split=train", f"eval.samples={AGAIN}"]
            rlpost("eval", f"model={run}", *chosen, *asks, "--out", str(result))
        metrics, _ = read_metrics(run / "metrics.jsonl")
        found = json.loads((result / "result.json").read_text())["result"]
        accuracy, passed = found["accuracy_lenient"], steps_to_pass(metrics)
        seconds = sum(row.get("time/step", 0.0) for row in metrics)
        table.append(
            f"| `{loss}` | {passed or 'not in ' + str(len(metrics))} | {accuracy['value']:.1%} | "
            f"[{accuracy['low']:.1%}, {accuracy['high']:.1%}] | {found['num_prompts']} | {seconds:.0f} |"
        )
    print("\n".join(table))


if __name__ == "__main__":
    main()

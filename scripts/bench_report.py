"""Times reports: writing them, and opening them in headless Chromium: `.venv/bin/python scripts/bench_report.py`.

The runs are made up: 60 steps; 2,000 steps with 128,000 completions of 200 tokens; five runs of 200 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.model.locate import locate_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.report.report import write_report
from rlpost.runs.rollout_table import SCHEMA

COMPLETIONS, TOKENS = 64, 200  # of a step; of a completion
METRICS = 45  # of a step
WORDS = [f"word{n} " for n in range(200)]


def make_run(folder: Path, steps: int, tokenizer: Any) -> Path:
    """A run folder with figures, texts and tokens that look like those of a training."""
    draw = random.Random(steps)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "command.txt").write_text("rlpost train grpo\n")
    (folder / "config.yaml").write_text(f"model:\n  path: builtin:tiny\nsteps: {steps}\nseed: 0\n")
    model = folder / "checkpoints" / f"step-{steps:06d}" / "model"
    tokenizer.save_pretrained(model)
    (model.parent / "manifest.json").write_text("{}")
    rows = [
        {
            "step": step,
            "reward/mean": 1 - math.exp(-step / steps) + draw.gauss(0, 0.05),
            "time/step": 3.0,
            "time/rollout": 2.0,
            **{f"made/{n}": draw.gauss(n, 1) for n in range(METRICS)},
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in range(1, steps + 1):
        completions = [_completion(step, n, draw) for n in range(COMPLETIONS)]
        table = pa.Table.from_pylist(completions, schema=SCHEMA)
        pq.write_table(table, folder / "rollouts" / f"step-{step:06d}.parquet", compression="zstd")
    return folder


def _completion(step: int, number: int, draw: random.Random) -> dict[str, Any]:
    text = "".join(draw.choices(WORDS, k=TOKENS // 3))
    log_probs = [-draw.expovariate(2.0) for _ in range(TOKENS)]
    return {
        "step": step,
        "group": number // 8,
        "sample": number % 8,
        "prompt": f"Question {number // 8} of step {step}: " + text[:200],
        "completion": text,
        "reward": draw.random(),
        "reward_parts": [("answer", draw.random())],
        "advantage": draw.gauss(0, 1),
        "valid": True,
        "finish_reason": "stop",
        "policy_version_min": str(step),
        "policy_version_max": str(step),
        "token_ids": draw.choices(range(3, 250), k=TOKENS),
        "log_probs": log_probs,
        "mask": [True] * TOKENS,
        "trainer_log_probs": [lp + draw.gauss(0, 0.02) for lp in log_probs],
        "token_versions": [step] * TOKENS,
    }


def main() -> None:
    """Print a line of JSON for each report."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from playwright.sync_api import sync_playwright

    tokenizer = load_tokenizer(locate_model("builtin:tiny"))
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as started:
        folder = Path(scratch)
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        browser.new_page().close()  # the first page of a browser is slower
        for name, sizes in {"60 steps": [60], "2,000 steps": [2000], "5 runs of 200 steps": [200] * 5}.items():
            runs = [make_run(folder / f"{name} {n}", steps, tokenizer) for n, steps in enumerate(sizes)]
            began = time.perf_counter()
            told = write_report(runs, folder / "page.html")
            written = time.perf_counter() - began
            page = browser.new_page()
            requests: list[str] = []
            page.on("request", lambda request, requests=requests: requests.append(request.url))
            began = time.perf_counter()
            page.goto(f"file://{folder}/page.html")
            page.wait_for_selector("html[data-ready]")
            loaded = time.perf_counter() - began
            page.close()
            told |= {"report": name, "write_seconds": round(written, 2), "load_seconds": round(loaded, 2)}
            print(json.dumps({**told, "other_requests": len(requests) - 1}), flush=True)
            for run in runs:
                shutil.rmtree(run)
        browser.close()


if __name__ == "__main__":
    main()

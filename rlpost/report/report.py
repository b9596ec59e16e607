"""A report: one HTML file about one run or several, which makes no request and needs no server.

`content` gathers the figures, the settings and a sample of the completions; `write_report` puts them, compressed, into
page.html. The page's script builds everything from text nodes, so model text stays text, and its policy forbids every
other script and every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlpost import __version__
from rlpost.config.paths import newest_checkpoint
from rlpost.config.schema import as_text, flat
from rlpost.errors import ConfigError, DataError
from rlpost.evaluation.saved import compare, held_out_steps, held_out_table, read_completions, read_evaluation
from rlpost.files import replaced
from rlpost.record import (
    ACCURACY,
    CHOSEN,
    HELD_OUT_FIGURES,
    LOSS,
    OF_ROWS,
    PAIR_ACCURACY,
    REWARD,
    STRICT,
    interval,
    main_figures,
    number,
    one_of_each_first,
    worth_showing,
)
from rlpost.runs.diagnosis import symptoms_of
from rlpost.runs.reader import RunRecord, read_run, verb_of, words_of
from rlpost.runs.rollouts import count_completions, read_chosen, rollout_steps

MOST_STEPS = 60  # steps of a report whose completions are sampled, all runs together
OF_A_KIND = 3  # completions of a step by each reason
MOST_TOKENS = 1000  # tokens of a completion that are shown one by one
MOST_TEXT = 8000  # characters of a prompt or a reply
MOST_PAIRS = 500  # held-out prompts shown before and after
MOST_WARNINGS = 100
HERE = Path(__file__).parent
Row = Mapping[str, Any]


def write_report(runs: Sequence[Path], file: Path) -> dict[str, Any]:
    """Write the report of `runs` to `file`, whole or not at all; returns counts of what it holds.

    Raises ConfigError if the disk refuses the file.
    """
    found = content(runs)
    page = rendered(found)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as making:
            making.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; give another place with --out") from error
    sampled = [run["completions"] for run in found["runs"]]
    return {
        "file": str(file),
        "bytes": len(page.encode()),
        "runs": len(runs),
        "completions": sum(each["total"] for each in sampled),
        "completions_shown": sum(len(step["rows"]) for each in sampled for step in each["steps"]),
    }


def rendered(found: Mapping[str, Any]) -> str:
    """The page that shows `found`, the result of `content`."""
    script, style = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    packed = gzip.compress(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode(), mtime=0)
    names = " and ".join(run["name"] for run in found["runs"])
    parts = {
        "title": html.escape(f"{names}: a training of rlpost"),
        "allowed": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "summary": "".join(f"<p>{html.escape(line)}</p>" for run in found["runs"] for line in run["summary"]),
        "style": style,
        "script": script,
        "data": base64.b64encode(packed).decode(),
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    return page


def content(runs: Sequence[Path]) -> dict[str, Any]:
    """The page's content as JSON: each run with its curves, settings and sampled completions."""
    steps = max(1, MOST_STEPS // len(runs))
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"made": made, "rlpost": __version__, "runs": [_run(read_run(run), steps) for run in runs]}


def _run(record: RunRecord, most_steps: int) -> dict[str, Any]:
    unread: list[str] = []  # files that cannot be read, and what is missing from the page
    held_out, paired = _held_out(record, unread)
    completions = _completions(record.folder, most_steps, unread)
    headline = _headline(record, paired)
    verb = verb_of(record.folder) or "train"
    symptoms, _, _ = symptoms_of(record.folder)
    last = record.metrics[-1]["step"] if record.metrics else 0
    facts = {
        "training": verb.removeprefix("train "),
        "model": str(record.part("model").get("path", "unknown")),
        "data": record.choice("env") or "unknown",
        "state": record.state.value + (f": {record.error}" if record.error else ""),
        "steps": f"{last} of {record.total_steps or '?'}",
        "time in steps": f"{record.seconds / 60:.1f} minutes",
        "seed": str(record.config.get("seed", "unknown")),
        **_machine(record.environment),
    }
    line = f"{record.folder.name}: {facts['training']} of {facts['model']} on {facts['data']}, {facts['state']}"
    return {
        "name": record.folder.name,
        "facts": facts,
        "summary": [line, *(figure["sentence"] for figure in headline)],
        "headline": headline,
        "curves": _curves(record.metrics),
        "symptoms": [{"name": s.name, "steps": list(s.steps), "evidence": s.evidence, "fix": s.fix} for s in symptoms],
        "warnings": [*unread, *_warnings(record.folder / "log.txt")],
        "held_out": held_out,
        "completions": completions,
        "settings": _settings(record),
        "commands": record.commands,
        "reproduce": shlex.join(["rlpost", "runs", "reproduce", str(record.folder)]),
    }


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages") or {}
    versions = {"rlpost": environment.get("rlpost"), "python": environment.get("python"), **packages}
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "machine": f"{environment.get('cpu_count', '?')} cores, {environment.get('cuda') or 'no GPU'}",
    }


def _headline(record: RunRecord, paired: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The main held-out figure first: before and after, each with its interval, and the paired difference."""
    evaluations = [record.evaluation(before=before) or {} for before in (True, False)]
    shown = worth_showing({key: [number(row, key) for row in evaluations] for _, key in HELD_OUT_FIGURES})
    figures: list[dict[str, Any]] = []
    for name, key in HELD_OUT_FIGURES:
        if key not in shown:
            continue
        before, after = (interval(row, key) for row in evaluations)
        told = [
            figure.told("row" if key in OF_ROWS else "prompt") if figure else "not measured"
            for figure in (before, after)
        ]
        figures.append(
            {
                "name": name,
                "key": key,
                "sentence": f"held-out {name}: {told[0]} before, {told[1]} after training",
                "is_share": key in (ACCURACY, STRICT, PAIR_ACCURACY),
                "before": before.as_dict() if before else None,
                "after": after.as_dict() if after else None,
                "paired": paired.get(key),
            }
        )
    if any(main_figures(evaluations)) and main_figures(evaluations) == [interval(row, REWARD) for row in evaluations]:
        figures.sort(key=lambda figure: figure["key"] != REWARD)
    return figures


# Figures


def _curves(metrics: Sequence[Row]) -> dict[str, list[list[float]]]:
    """The points [step, value] of every metric; an evaluation's also have the ends of its interval."""
    ends = ("_low", "_high")
    curves: dict[str, list[list[float]]] = {}
    for row in metrics:
        for key in row:
            value = number(row, key)
            if key == "step" or value is None or (key.startswith("eval/") and key.endswith((*ends, "_prompts"))):
                continue
            bounds = [number(row, key + end) for end in ends]
            point = [row["step"], value, *bounds] if None not in bounds else [row["step"], value]
            curves.setdefault(key, []).append([point[0], *(_short(v) for v in point[1:] if v is not None)])
    return curves


def _short(value: float) -> float:
    """Six digits of a number: more cannot be seen."""
    return float(f"{value:.6g}")


def _warnings(log: Path) -> list[str]:
    """The first warnings and errors of log.txt, without repetitions."""
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.partition(level)[2].strip() for line in lines for level in (" WARNING ", " ERROR ") if level in line]
    return list(dict.fromkeys(found))[:MOST_WARNINGS]


# Settings


def _settings(record: RunRecord) -> list[list[str]]:
    """[key, value, who set it] of each setting."""
    typed = {word.partition("=")[0] for line in record.commands for word in words_of(line)}
    if "model" in typed:
        typed.add("model.path")  # model=runs/NAME sets it
    given = {word.partition("=")[0] for word in record.overrides}
    chosen = record.environment.get(CHOSEN) or {}

    def source(key: str) -> str:
        if key in typed:
            return "command line"
        if key in given:
            return "recipe"
        return f"chosen: {chosen[key]}" if key in chosen else "default"

    return [[key, as_text(value), source(key)] for key, value in flat(record.config).items()]


# Held-out prompts, before and after


def _held_out(record: RunRecord, unread: list[str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Held-out prompts before and after training, and the paired differences by the name of their metric."""
    known = held_out_steps(record.folder)
    if len(known) < 2:
        return None, {}
    steps = [known[0], known[-1]]
    first, last = (held_out_table(record.folder, step) for step in steps)
    try:
        before, after = read_evaluation(first), read_evaluation(last)
        compared = compare(before, after)
        texts = [{(r["prompt_id"], r["sample"]): r for r in read_completions(table)} for table in (first, last)]
    except DataError as error:
        unread.append(f"held-out prompts are not compared: {error}")
        return None, {}
    names = {"accuracy_lenient": ACCURACY, "accuracy_strict": STRICT, "reward": REWARD, "loss": LOSS}
    paired = {
        names[name]: {
            "value": measured.difference.value,
            "low": measured.difference.low,
            "high": measured.difference.high,
            "prompts": measured.difference.prompts,
            "verdict": measured.verdict.replace("B is", "the trained model is"),
        }
        for name, measured in compared.measures.items()
    }
    both = [
        (texts[0][key], row)
        for key, row in texts[1].items()
        if key in texts[0] and key[1] == 0 and row.get("loss") is None
    ]
    pairs = [
        {
            "prompt": row["prompt"][:MOST_TEXT],
            "before": _reply(earlier),
            "after": _reply(row),
        }
        for earlier, row in both[:MOST_PAIRS]
    ]
    return {"steps": steps, "total": len(both), "pairs": pairs}, paired


def _reply(row: Row) -> dict[str, Any]:
    measure = row["accuracy_lenient"] if row["accuracy_lenient"] is not None else row["reward"]
    return {
        "text": row["completion"][:MOST_TEXT],
        "score": None if measure is None or not math.isfinite(measure) else _short(measure),
        "reward": None if row["reward"] is None or not math.isfinite(row["reward"]) else _short(row["reward"]),
        "answer": row["answer"] or "",  # that was read from the reply
        "finish": row["finish_reason"],
        "error": row["error"],
    }


# Completions


def _completions(run: Path, most_steps: int, unread: list[str]) -> dict[str, Any]:
    """Sample at most `most_steps` steps, evenly spread: worst, best, most surprising and random completions."""
    known = rollout_steps(run)
    count = min(most_steps, len(known))
    places = sorted({round(i * (len(known) - 1) / max(1, count - 1)) for i in range(count)})
    pieces = _pieces_of(run)
    steps = []
    for step in (known[place] for place in places):
        reasons: dict[int, list[str]] = {}
        choose = partial(_choice, step=step, reasons=reasons)
        try:
            rows, total = read_chosen(run, step, choose)
        except DataError as error:  # the other steps are shown
            unread.append(str(error))
            continue
        shown = [_shown(row, why, pieces) for row, why in zip(rows, reasons.values(), strict=True)]
        steps.append({"step": step, "total": total, "rows": shown})
    total = count_completions(run, known)
    return {"steps": steps, "total": total, "of_steps": len(known), "has_pieces": pieces is not None}


def _choice(rows: list[dict[str, Any]], *, step: int, reasons: dict[int, list[str]]) -> list[int]:
    """The places of a step's completions that are shown; `reasons` gets those of each."""
    places = {id(row): place for place, row in enumerate(rows)}
    scored = [row for row in rows if row["reward"] is not None]
    scored.sort(key=lambda row: (row["reward"], row["advantage"] or 0.0))
    chosen = {
        "best": scored[::-1],
        "worst": scored,
        "most surprising": sorted(rows, key=lambda row: -row["surprise"]),
        "random": random.Random(step).sample(rows, len(rows)),
    }
    for reason, order in chosen.items():
        for row in one_of_each_first(order, "group")[:OF_A_KIND]:
            reasons.setdefault(places[id(row)], []).append(reason)
    return list(reasons)


def _shown(row: Row, reasons: list[str], pieces: Callable[[Sequence[int]], list[str]] | None) -> dict[str, Any]:
    ids = row["token_ids"][:MOST_TOKENS]
    count = len(ids)
    shown = {
        "group": row["group"],
        "sample": row["sample"],
        "prompt": row["prompt"][-MOST_TEXT:],
        "text": row["completion"][:MOST_TEXT],
        "reward": row["reward"],
        "parts": row["reward_parts"],
        "advantage": row["advantage"],
        "finish": row["finish_reason"],
        "versions": [row["policy_version_min"], row["policy_version_max"]],
        "tokens": sum(row["mask"]),
        "surprise": round(row["surprise"], 3),
        "why": reasons,
    }
    if pieces is not None and count:
        trainer, versions = row["trainer_log_probs"], row["token_versions"]
        shown |= {
            "pieces": pieces(ids),
            "sampler": [round(v, 3) for v in row["log_probs"][:count]],
            "trainer": None if trainer is None else [round(v, 3) for v in trainer[:count]],
            "mask": "".join("01"[m] for m in row["mask"][:count]),
            "version": None if versions is None else list(_spans(versions[:count])),
            "left_out": len(row["token_ids"]) - count,
        }
    return shown


def _spans(versions: Sequence[int]) -> Iterator[list[int]]:
    """[first token, version] of each stretch of one version."""
    for place, version in enumerate(versions):
        if place == 0 or version != versions[place - 1]:
            yield [place, version]


def _pieces_of(run: Path) -> Callable[[Sequence[int]], list[str]] | None:
    """A function that gives the text of each token; None without a checkpoint, whose tokenizer it needs."""
    from tokenizers import Tokenizer

    checkpoint = newest_checkpoint(run)
    file = None if checkpoint is None else checkpoint / "model" / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    known: dict[tuple[int, int], str] = {}

    def text_of(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(ids: Sequence[int]) -> list[str]:
        """Each token's text: what it adds behind the token before it."""
        texts = []
        for place, token in enumerate(ids):
            before = ids[place - 1] if place else -1
            if (before, token) not in known:
                ahead = "" if before < 0 else text_of([before])
                together = text_of([token] if before < 0 else [before, token])
                own = together[len(ahead) :] if together.startswith(ahead) else text_of([token])
                known[before, token] = own
            texts.append(known[before, token])
        return texts

    return pieces

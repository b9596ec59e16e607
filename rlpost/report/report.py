"""A report: one HTML file about one run or several, which makes no request and needs no server.

`content` gathers the figures, the settings and a sample of the completions; `write_report` puts them into page.html,
the completions compressed. The page's script builds everything from text nodes, so model text stays text, and its
policy forbids every other script and every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlpost import __version__
from rlpost.config.paths import as_model
from rlpost.config.schema import as_text, flat
from rlpost.errors import ConfigError, DataError
from rlpost.evaluation.comparison import Comparison, compare
from rlpost.evaluation.saved import held_out_steps, held_out_table, read_evaluation
from rlpost.files import replaced
from rlpost.record import CHOSEN, REWARD, one_of_each_first
from rlpost.report.curves import curves_of, short, story_keys, time_of
from rlpost.report.result import Figure, figures_of, head_of_sweep, table_of, verdict
from rlpost.runs.diagnosis import AT_LEAST
from rlpost.runs.reader import RunRecord, code_of, evaluation_words, newest_checkpoint, read_run
from rlpost.runs.rollouts import count_completions, read_chosen
from rlpost.text import counted

MOST_STEPS = 60  # steps of a report whose completions are sampled, all runs together
OF_A_KIND = 3  # completions of a step by each reason
MOST_TOKENS = 1000  # tokens of a completion that are shown one by one
MOST_TEXT = 8000  # characters of a prompt or a reply
MOST_PAIRS = 500  # held-out prompts shown before and after
MOST_WARNINGS = 100
ACCURATE = "accuracy_lenient"  # column of the held-out tables
KINDS = {  # measure -> how a reply has changed: better, worse, and the same with something earned or nothing
    "reward": ("reward rose", "reward fell", "the same reward", "the same reward"),
    ACCURATE: ("became right", "became wrong", "still right", "still wrong"),
}
HERE = Path(__file__).parent
Row = Mapping[str, Any]


def write_report(runs: Sequence[Path], file: Path, sweep: Path | None = None) -> dict[str, Any]:
    """Write the report of `runs`, or of a `sweep` of them, whole or not at all; returns counts of what it holds.

    Raises ConfigError if the disk refuses the file.
    """
    found = content(runs, sweep)
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
    of_runs = [run["completions"] for run in found["runs"]]
    sampled = [{"sampled": len(each["steps"]), "of_steps": each["of_steps"]} for each in of_runs]
    runs = [{**run, "completions": each} for run, each in zip(found["runs"], sampled, strict=True)]
    packed = gzip.compress(_as_json(of_runs).encode(), mtime=0)
    parts = {
        "title": html.escape(f"{found['name']}: a training of rlpost"),
        "allowed": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "summary": found["table"] or _summary(found["runs"][0]),
        "style": style,
        "script": script,
        "data": _as_json({**found, "runs": runs}).replace("<", "\\u003c"),  # no text of a model ends the element
        "packed": base64.b64encode(packed).decode(),
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    return page


def _as_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def content(runs: Sequence[Path], sweep: Path | None = None) -> dict[str, Any]:
    """The page's content as JSON: each run with its result, settings and sampled completions, and all curves."""
    steps = max(1, MOST_STEPS // len(runs))
    records = [read_run(run) for run in runs]
    gathered = [_run(record, steps) for record in records]
    figures = [each for _, each in gathered]
    curves, left_out = curves_of(records, story_keys(records, [its[0].key for its in figures if its]))
    table = ""
    if len(runs) > 1:
        head = f"<h1>{len(runs)} runs compared</h1>" if sweep is None else head_of_sweep(sweep)
        table = head + table_of(records, figures)
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "rlpost": __version__,
        "name": sweep.name if sweep else " and ".join(record.folder.name for record in records),
        "table": table,  # the head of a page of several runs, as HTML
        "curves": curves,
        "left_out": left_out,
        "runs": [run for run, _ in gathered],
    }


def _summary(run: Mapping[str, Any]) -> str:
    """The head of the page of one run, as HTML: its name, its verdict, and a line about model and data."""
    verdict, *others = (html.escape(line) for line in run["verdict"])
    more = "".join(f"<p>{line}</p>" for line in others)
    first = f'<h1>{html.escape(run["name"])}</h1><p class="verdict">{verdict}</p>'
    return f'{first}{more}<p class="dim">{html.escape(run["line"])}</p>'


def _run(record: RunRecord, most_steps: int) -> tuple[dict[str, Any], list[Figure]]:
    """The part of the page about one run, and its held-out figures."""
    unread: list[str] = []  # files that cannot be read, and what is missing from the page
    tables, compared = _held_out_tables(record, unread)
    figures = figures_of(record, compared)
    symptoms, steps, _ = record.diagnosis
    log = record.folder / "log.txt"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    run = {
        "name": record.folder.name,
        "line": _line(record),
        "facts": _facts(record),
        "verdict": verdict(record, figures),
        "symptoms": [asdict(symptom) for symptom in symptoms],
        "quiet": f"Nothing stands out in the figures of {counted(steps, 'step')}."
        + (f" Most problems take {AT_LEAST} steps to show." if steps < AT_LEAST else ""),
        "warnings": [*unread, *_warnings(text, [symptom.name for symptom in symptoms])],
        "held_out": replies_of(tables, by_reward=not figures or figures[0].key == REWARD),
        "completions": _completions(record, most_steps, unread),
        "time": time_of(record, text),
        "memory": max(record.series("memory/peak_gb"), default=0.0),
        "settings": _settings(record),
        "typed": record.commands,
        "commands": commands_of(record),
    }
    return run, figures


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """(name, value) of what the run is: how far it came, and the facts of its plan."""
    return [
        ("training", (record.verb or "train").removeprefix("train ")),
        ("state", record.state.value + (f": {record.error}" if record.error else "")),
        ("steps", f"{record.steps_done} of {record.total_steps or '?'}"),
        *((fact.name, fact.text) for fact in record.facts),
        ("versions", record.versions),
        ("machine", record.machine),
    ]


def _line(record: RunRecord) -> str:
    """One line about a run, for the head of its page."""
    its = dict(_facts(record))
    model = record.part("model").get("path", "unknown")
    return f"{its['training']} of {model} on {record.data}; {its['steps']} steps, {its['state']}; {record.machine}"


def _warnings(log: str, symptoms: Sequence[str]) -> list[str]:
    """The first warnings and errors of `log`, without repetitions and without those of `symptoms`."""
    found = [line.strip() for line in re.findall(r" (?:WARNING|ERROR) (.*)", log)]
    beginnings = tuple(f"{name} (steps " for name in symptoms)
    return [line for line in dict.fromkeys(found) if not line.startswith(beginnings)][:MOST_WARNINGS]


def commands_of(record: RunRecord) -> list[list[str]]:
    """[what it does, command] of what can be done with the run. Code is named again: only a command line gives it."""
    model = as_model(record.folder)
    code = code_of(record.overrides)
    repeat = ["repeat it and compare", shlex.join(["rlpost", "runs", "reproduce", model, *code])]
    if newest_checkpoint(record.folder) is None:  # there is no model yet
        return [repeat]
    played = evaluation_words(record)
    evaluate = ["evaluate it", shlex.join(["rlpost", "eval", f"model={model}", *(played or [])])]
    talk = ["talk to it", shlex.join(["rlpost", "chat", model])]
    export = ["export it, with a model card", shlex.join(["rlpost", "export", model])]
    return [talk if played is None else evaluate, export, repeat]


def _settings(record: RunRecord) -> list[list[str]]:
    """[key, value, who set it] of each setting."""
    typed = {word.partition("=")[0] for line in record.commands for word in shlex.split(line)}
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


def _held_out_tables(record: RunRecord, unread: list[str]) -> tuple[Sequence[Sequence[Row]], Comparison | None]:
    """The held-out completions before and after training, and their comparison; nothing without both."""
    known = held_out_steps(record.folder)
    if len(known) < 2:
        return [], None
    try:
        evaluations = [read_evaluation(held_out_table(record.folder, step)) for step in (known[0], known[-1])]
        tables, compared = [each.samples for each in evaluations], compare(*evaluations)
        return [] if "loss" in compared.measures else tables, compared  # demonstrated replies never change
    except DataError as error:
        unread.append(f"held-out prompts are not compared: {error}")
        return [], None


def replies_of(tables: Sequence[Sequence[Row]], *, by_reward: bool) -> dict[str, Any] | None:
    """The replies to each held-out prompt before and after training; the largest improvements come first.

    They are grouped by whether the reward or, unless `by_reward`, the accuracy has changed. Accuracy is given where it
    says more than the reward.
    """
    if not tables:
        return None
    first, last = ({(r["prompt_id"], r["prompt_number"], r["sample"]): r for r in table} for table in tables)
    both = [(first[key], row) for key, row in last.items() if key in first and key[-1] == 0]
    measure = "reward" if by_reward or any(row[ACCURATE] is None for row in last.values()) else ACCURATE
    kinds = KINDS[measure]
    has_accuracy = any(row[ACCURATE] not in (None, row["reward"]) for pair in both for row in pair)
    found = []
    for before, after in both:
        change = _change(before, after, measure)
        kind = kinds[0] if change > 0 else kinds[1] if change < 0 else kinds[2] if after[measure] else kinds[3]
        replies = [_reply(row, with_accuracy=has_accuracy) for row in (before, after)]
        rank = (change, _change(before, after, "reward"), before["completion"] != after["completion"])
        found.append((rank, {"prompt": _prompt(before)[:MOST_TEXT], "kind": kind, "replies": replies}))
    pairs = [pair for _, pair in sorted(found, key=lambda each: each[0], reverse=True)]
    half = MOST_PAIRS // 2
    return {
        "total": len(pairs),
        "counts": {kind: sum(pair["kind"] == kind for pair in pairs) for kind in dict.fromkeys(kinds)},
        "pairs": pairs if len(pairs) <= MOST_PAIRS else [*pairs[:half], *pairs[-half:]],
    }


def _prompt(row: Row) -> str:
    """The prompt without the words of a chat template; as it was rendered in a table without messages."""
    messages = row.get("prompt_messages") or []
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages) or row["prompt"]


def _change(before: Row, after: Row, measure: str) -> float:
    """By how much a measure has risen; 0 where one of both is unknown."""
    first, last = before[measure], after[measure]
    return 0.0 if first is None or last is None else last - first


def _reply(row: Row, *, with_accuracy: bool) -> dict[str, Any]:
    return {
        "text": row["completion"][:MOST_TEXT],
        "reward": None if row["reward"] is None else short(row["reward"]),
        "accuracy": row[ACCURATE] if with_accuracy else None,
        "answer": row["answer"] or "",  # that was read from the reply
        "finish": row["finish_reason"],
        "error": row["error"],
    }


# Completions


def _completions(record: RunRecord, most_steps: int, unread: list[str]) -> dict[str, Any]:
    """Sample at most `most_steps` steps, evenly spread: worst, best, most surprising and random completions."""
    run, known = record.folder, record.rollout_steps
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
            "version": None if versions is None else _spans(versions[:count]),
            "left_out": len(row["token_ids"]) - count,
        }
    return shown


def _spans(versions: Sequence[int]) -> list[list[int]]:
    """[first token, version] of each stretch of one version."""
    return [[i, version] for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]


def _pieces_of(run: Path) -> Callable[[Sequence[int]], list[str]] | None:
    """A function that gives the text of each token; None without a checkpoint, whose tokenizer it needs."""
    from tokenizers import Tokenizer

    checkpoint = newest_checkpoint(run)
    file = None if checkpoint is None else checkpoint / "model" / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    decode = partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=False)

    @cache
    def piece(before: tuple[int, ...], token: int) -> str:
        """A token's text: the characters that it adds behind `before`."""
        ahead, together = decode(before), decode([*before, token])
        return together[len(ahead) :] if together.startswith(ahead) else decode([token])

    return lambda ids: [piece(tuple(ids[max(0, i - 1) : i]), token) for i, token in enumerate(ids)]

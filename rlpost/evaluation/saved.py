"""Saved evaluations: a folder with `result.json` and `samples.parquet`, one row a completion; and their comparison.

`compare` pairs two evaluations prompt by prompt: which model is better, or how many prompts it would take to know.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlpost.config import paths
from rlpost.config.schema import flat
from rlpost.data.conversation import Conversation
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.evaluation.statistics import CONFIDENCE, FEWEST_DIFFERING, POWER, Difference, difference, most_differing
from rlpost.files import expanded, json_in, replaced
from rlpost.text import counted, did_you_mean, first_line, nearest

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),  # of the task alone: independent of the model and of the prompt's wording
        ("prompt_number", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("accuracy_strict", pa.float64()),
        ("accuracy_lenient", pa.float64()),
        ("answer", pa.string()),  # the answer read from the completion
        ("task", pa.string()),  # JSON
        ("valid", pa.bool_()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("tokens", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
        ("loss", pa.float64()),  # nats per token of a demonstrated completion; null for a sampled one
        ("prompt_messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)
LATER = ("task", "prompt_messages", "loss")  # columns that older tables lack
Row = dict[str, Any]
MOST_NAMED = 8  # most evaluations that a hint lists
COMPARED = ("prompt_id", "prompt_number", "reward", "accuracy_strict", "accuracy_lenient", "valid", "tokens")


@dataclass(frozen=True)
class SavedEvaluation:
    """An evaluation read back: `result.json`, and the columns of `samples.parquet` that a comparison needs.

    `record` is empty for a table without a `result.json` beside it.
    """

    name: str
    record: dict[str, Any]
    samples: list[dict[str, Any]]


def write_evaluation(
    folder: Path, record: Mapping[str, Any], played: Sequence[Conversation], demonstrated: Sequence[Row] = ()
) -> None:
    """Write both files, each whole or not at all, `result.json` last.

    `demonstrated` are the rows of an evaluation that measured the loss of demonstrations: see `demonstration_row`.
    Raises CheckpointError if the disk refuses them.
    """
    try:
        write_rows(folder / paths.SAMPLES, [*sample_rows(played), *demonstrated])
        with replaced(folder / paths.RESULT) as making:
            making.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error


def write_samples(file: Path, played: Sequence[Conversation]) -> None:
    """Write the table of samples of finished conversations: see `write_rows`."""
    write_rows(file, sample_rows(played))


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write a table of `SCHEMA`; the file appears only when complete. Raises OSError if the disk refuses it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as making:
        pq.write_table(pa.Table.from_pylist([*rows], schema=SCHEMA), making, compression="zstd")


def sample_rows(played: Sequence[Conversation]) -> list[dict[str, Any]]:
    """One dict a completion, under the names of `SCHEMA`.

    `prompt` is the rendered first prompt, `completion` the text of the model's last turn; `tokens` counts the sampled
    tokens, `token_ids` are all ids after the first prompt, which is made of `prompt_messages`.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(c.group_id for c in played), start=1)}
    return [
        {
            "prompt_id": prompt_id(c.task),
            "prompt_number": numbers[c.group_id],
            "sample": c.sample,
            "prompt": c.prompt_text,
            "completion": c.response_text,
            "reward": c.reward,
            "reward_parts": list(c.reward_parts.items()),
            "accuracy_strict": c.accuracy_strict,
            "accuracy_lenient": c.accuracy_lenient,
            "answer": c.answer,
            "task": _as_json(c.task),
            "valid": c.valid,
            "error": c.error,
            "finish_reason": c.finish_reason,
            "tokens": sum(c.mask),
            "token_ids": c.response_ids,
            "prompt_messages": [{"role": m["role"], "content": str(m["content"])} for m in c.messages[: c.opening]],
        }
        for c in played
    ]


def demonstration_row(number: int, task: Mapping[str, Any], text: tuple[str, str], loss: float, tokens: int) -> Row:
    """The demonstration `task` under the names of `SCHEMA`, with the `text` of prompt and reply and its `loss`."""
    prompt, completion = text
    found = {"prompt_id": prompt_id(task), "prompt_number": number, "sample": 0, "task": _as_json(task)}
    return found | {"prompt": prompt, "completion": completion, "valid": True, "tokens": tokens, "loss": loss}


def prompt_id(task: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that are equal for equal tasks, on every machine."""
    return hashlib.blake2b(_as_json(task).encode(), digest_size=8).hexdigest()


def _as_json(task: Mapping[str, Any]) -> str:
    return json.dumps(dict(task), sort_keys=True, default=str)


def find_evaluation(name: str) -> Path:
    """The table of samples of an evaluation, or of a run's last held-out evaluation, else of the last of its model.

    `name` is a name, the path of a folder, or of the table itself.
    Raises ConfigError, with the nearest name, if there is no such evaluation.
    """
    path = expanded(name)
    if path.is_file() and path.suffix == ".parquet":
        return path
    is_path = "/" in name or name.startswith((".", "~"))
    for folder in (path, paths.EVALS / name) if is_path else (paths.EVALS / name, path):
        if paths.is_evaluation_folder(folder):
            return folder / paths.SAMPLES
    runs = (path,) if is_path else (path, paths.RUNS / name)
    if run := next((folder for folder in runs if paths.is_run_folder(folder)), None):
        if steps := held_out_steps(run):
            return held_out_table(run, steps[-1])
        if (table := evaluation_of(run)) is not None:
            return table
        raise ConfigError(
            f"{run} holds no held-out completions: make some with rlpost eval model={paths.as_model(run)}"
        )
    if path.exists():
        jobs = ", ".join(str(path / job) for job in paths.evaluation_names(path))
        advice = f"name two of {jobs}" if jobs else "rlpost eval makes one"
        raise ConfigError(f"{name} is not an evaluation, with {paths.RESULT} and {paths.SAMPLES}: {advice}")
    names = paths.evaluation_names(path.parent if is_path else paths.EVALS)
    near = nearest(path.name, names)
    meant = None if near is None else str(path.parent / near) if is_path else near
    known = f"there are {', '.join(names[:MOST_NAMED])}" if names else "rlpost eval makes one"
    raise ConfigError(f"there is no evaluation {name}{did_you_mean(meant, known)}")


def read_evaluation(samples: Path) -> SavedEvaluation:
    """Read a table of samples and the `result.json` beside it.

    Raises DataError for files that cannot be read or lack a column.
    """
    result = samples.with_name(paths.RESULT)
    its_own = samples.name == paths.SAMPLES and result.is_file()
    try:
        record = json_in(result) if its_own else {}
        there = pq.read_schema(samples).names
        missing = [name for name in COMPARED if name not in there]
        columns = [*COMPARED, "loss"] if "loss" in there else list(COMPARED)
        rows = [] if missing else pq.read_table(samples, columns=columns).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{samples} cannot be read ({first_line(error)}): evaluate again") from error
    if missing:
        raise DataError(f"{samples} has no column {', '.join(missing)}: it is not a table that rlpost eval wrote")
    return SavedEvaluation(samples.parent.name if its_own else str(samples), record, rows)


def read_completions(samples: Path) -> list[dict[str, Any]]:
    """Every completion of a table of samples without its ids, under the names of `SCHEMA`.

    `reward_parts` is a dict and `task` the task itself, empty in a table without tasks. Raises DataError for a file
    that cannot be read or lacks another column.
    """
    try:
        there = pq.read_schema(samples).names
        names = [name for name in SCHEMA.names if name != "token_ids" and (name in there or name not in LATER)]
        rows = pq.read_table(samples, columns=names).to_pylist()
        for row in rows:
            row["reward_parts"] = dict(row["reward_parts"] or ())
            row["task"] = json.loads(row.get("task") or "{}")
            if row["reward"] is not None and not math.isfinite(row["reward"]):
                row["reward"] = None
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{samples} cannot be read ({first_line(error)}): evaluate again") from error
    return rows


def is_evaluation(file: Path) -> bool:
    """Whether a Parquet file is a table of samples. Raises DataError if it cannot be read."""
    try:
        return "prompt_number" in pq.read_schema(file).names
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read ({first_line(error)}): give a Parquet file") from error


def read_sampled(samples: Path) -> list[dict[str, Any]]:
    """Every completion of a table of samples with its ids, under the names of `rlpost.runs.rollouts.SCHEMA`.

    A prompt is a group of step 0, and all ids are sampled; `mask` is None for a conversation of several turns, whose
    sampled ids are not recorded. Raises DataError for a file that cannot be read or lacks a column.
    """
    rows = read_completions(samples)
    for row, ids in zip(rows, pq.read_table(samples, columns=["token_ids"])["token_ids"].to_pylist(), strict=True):
        row |= {"step": 0, "group": row["prompt_number"], "token_ids": ids}
        row["turns"] = [{"role": "assistant", "content": row["completion"]}]
        row["mask"] = [True] * len(ids) if row["tokens"] == len(ids) else None
        row["restarts"] = []  # which only a conversation of several turns has
        row.setdefault("prompt_messages", None)
    return rows


# Held-out evaluations of a run: RUN/held-out/step-000000.parquet and further ones, tables of samples too


def held_out_steps(run: Path) -> list[int]:
    """The steps after which a run kept its held-out completions, in order; 0 is before training."""
    names = [path.stem.removeprefix("step-") for path in (run / paths.HELD_OUT).glob("step-*.parquet")]
    return sorted(int(name) for name in names if name.isdecimal())


def held_out_table(run: Path, step: int) -> Path:
    """The table of samples of a run's held-out evaluation after `step`."""
    return run / paths.HELD_OUT / f"step-{step:06d}.parquet"


def latest_held_out(run: Path) -> SavedEvaluation:
    """A run's last held-out evaluation after training, else the newest one of its model in evals/.

    Raises DataError if there is neither.
    """
    if steps := [step for step in held_out_steps(run) if step > 0]:
        return read_evaluation(held_out_table(run, steps[-1]))
    if (table := evaluation_of(run)) is not None:
        return read_evaluation(table)
    raise DataError(f"{run} holds no held-out completions after training")


def evaluation_of(run: Path) -> Path | None:
    """The table of the newest evaluation in evals/ of a model of `run`; None if there is none."""
    results = (each / paths.RESULT for each in paths.EVALS.glob("*/") if paths.is_evaluation_folder(each))
    newest = sorted(results, key=lambda file: file.stat().st_mtime, reverse=True)
    found = (f for f in newest if Path(str(json_in(f).get("model", ""))).is_relative_to(run.resolve()))
    return next((file.with_name(paths.SAMPLES) for file in found), None)


# Comparing two evaluations

MEASURES = {
    "accuracy_lenient": "accuracy, lenient",
    "accuracy_strict": "accuracy, strict",
    "reward": "reward",
    "loss": "loss",
}
LOWER_IS_BETTER = ("loss",)
# settings under comparison, and settings that change neither prompts nor sampling
MAY_DIFFER = ("model.", "policy.", "env.limit", "eval.", "plugin", "seed")
Key = tuple[str, int]  # a prompt's id, and which of its occurrences in the dataset


def compare(a: SavedEvaluation, b: SavedEvaluation) -> Comparison:
    """Compare B with A, prompt by prompt. Raises DataError unless they share environment, a prompt and a measure."""
    environments = [evaluation.record.get("choices", {}).get("env") for evaluation in (a, b)]
    if None not in environments and environments[0] != environments[1]:
        raise DataError(
            f"A was asked env={environments[0]} and B env={environments[1]}: evaluate both on the same environment"
        )
    of_a, of_b = _by_prompt(a.samples), _by_prompt(b.samples)
    both = [key for key in of_a if key in of_b]
    if not both:
        raise DataError(
            f"{a.name} and {b.name} have no prompt in common ({len(of_a)} and {len(of_b)} scored): evaluate both with "
            "the same env settings"
        )
    measures = {}
    for name in MEASURES:
        pairs = [(_mean(of_a[key], name), _mean(of_b[key], name)) for key in both]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if name == "loss" and known:  # of a token, so that a row weighs as many as it has
            known = _by_token(known, [(of_a[key][0]["tokens"], of_b[key][0]["tokens"]) for key in both])
        if known:
            found = difference([y - x for x, y in known])
            conclusion = verdict(found, name)
            measures[name] = Measured(fmean(x for x, _ in known), fmean(y for _, y in known), found, conclusion)
    if not measures:
        raise DataError(
            f"{a.name} and {b.name} have no measure in common, as losses of demonstrations and scores of replies: "
            "evaluate both with the same env settings"
        )
    return Comparison(
        a.name,
        b.name,
        len(both),
        len(of_a) - len(both),
        len(of_b) - len(both),
        _differing(a.record, b.record),
        measures,
    )


@dataclass(frozen=True)
class Comparison:
    """The result of comparing B with A.

    `only_a` and `only_b` count the prompts without a scored completion in the other evaluation;
    `differing_settings` maps each setting that differs and may explain a difference to both values.
    """

    name_a: str
    name_b: str
    prompts: int
    only_a: int
    only_b: int
    differing_settings: dict[str, tuple[Any, Any]]
    measures: dict[str, Measured]

    @property
    def verdict(self) -> str:
        """The verdict of lenient accuracy, or of the reward where there is no accuracy."""
        return next(iter(self.measures.values())).verdict

    def sentence(self, a: str, b: str) -> str:
        """The verdict in one sentence: `B is better than A: +4.2% [+1.0%, +7.4%], 500 prompts`.

        It is about accuracy, or about the reward if there is no accuracy or no answer is right.
        """
        known = list(self.measures.items())
        name, measured = next(((n, m) for n, m in known if m.a or m.b), known[0])
        found = measured.difference
        unit = "row" if name in LOWER_IS_BETTER else "prompt"
        size = f"{_figure(found.value, name, '+')}{_spread(found, name)}, {counted(found.prompts, unit)}"
        what = f" in {name}" if name in ("reward", "loss") else ""
        if found.is_significant:
            return f"{measured.verdict.replace('B', b, 1)} than {a}{what}: {size}"
        return f"{b} against {a}{what}: {size}; {measured.verdict}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        for name, measured in self.measures.items():
            plain["measures"][name]["difference"] = measured.difference.as_dict()
        return {**plain, "verdict": self.verdict, "confidence": CONFIDENCE, "power": POWER}

    def lines(self) -> list[str]:
        """A table for people, at most 80 columns wide except for long names and settings; the verdicts come last."""
        lines = [f"A  {self.name_a}", f"B  {self.name_b}"]
        unit, done = ("row", "read") if "loss" in self.measures else ("prompt", "answered")
        lines.append(f"{counted(self.prompts, unit)} that both {done}, paired; 95% intervals")
        left_out = [f"{count} only in {side}" for side, count in (("A", self.only_a), ("B", self.only_b)) if count]
        if left_out:
            lines.append(f"left out: {', '.join(left_out)}")
        for key, (a, b) in self.differing_settings.items():
            lines.append(f"beware: {key} differs, {_shown(a)} in A and {_shown(b)} in B")
        lines.append(f"  {'':<18}{'A':>8}{'B':>8}    B - A")
        lines += [_row(MEASURES[name], name, measured) for name, measured in self.measures.items()]
        lines += [f"{name.removeprefix('accuracy_'):<9}{measured.verdict}" for name, measured in self.measures.items()]
        first = next(iter(self.measures.values())).difference
        if not first.is_significant and not first.within_noise and first.detectable is not None:
            power = f"{POWER:.0%} power, {1 - CONFIDENCE:.0%} significance"
            unit = "rows" if "loss" in self.measures else "prompts"
            lines.append(f"{first.needed:,} {unit} would show a difference of this size ({power})")
        return lines


@dataclass(frozen=True)
class Measured:
    """One measure of A and of B on the prompts that both have, and the difference B - A; `verdict` in words."""

    a: float
    b: float
    difference: Difference
    verdict: str


def verdict(found: Difference, measure: str) -> str:
    """The verdict in words: B is better, B is worse, or no difference found, with the size that would be found."""
    if found.is_significant:
        return "B is better" if (found.value > 0) is (measure not in LOWER_IS_BETTER) else "B is worse"
    if found.prompts < 2:
        return "no difference found: one prompt says nothing of others"
    if not found.differing:
        most = most_differing(found.prompts)
        return f"no difference found: equal on every prompt, so at most {most:.1%} of all may differ"
    unit = "row" if measure in LOWER_IS_BETTER else "prompt"
    if found.differing < FEWEST_DIFFERING or found.detectable is None:  # or all differ alike
        differ = f"{found.differing} of {counted(found.prompts, unit)} differ{'s' if found.differing == 1 else ''}"
        return f"no difference found: {differ}, and it takes {FEWEST_DIFFERING} to show one"
    return (
        f"no difference found: {found.prompts} {unit}s cannot show one below about {_figure(found.detectable, measure)}"
    )


def prompt_means(evaluation: SavedEvaluation, measure: str) -> dict[Key, float]:
    """The mean of a measure, such as `reward`, over the scored completions of each prompt that has any."""
    means = {key: _mean(samples, measure) for key, samples in _by_prompt(evaluation.samples).items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def _by_prompt(samples: Sequence[Mapping[str, Any]]) -> dict[Key, list[Mapping[str, Any]]]:
    """The scored completions of each prompt; one that the dataset holds twice is two prompts."""
    numbers: dict[str, list[int]] = defaultdict(list)
    found: dict[Key, list[Mapping[str, Any]]] = {}
    for sample in samples:
        seen = numbers[sample["prompt_id"]]
        if sample["prompt_number"] not in seen:
            seen.append(sample["prompt_number"])
        if sample["valid"]:
            found.setdefault((sample["prompt_id"], seen.index(sample["prompt_number"])), []).append(sample)
    return found


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for sample in samples if (value := sample.get(name)) is not None and math.isfinite(value)]
    return fmean(values) if values else None


def _by_token(losses: Sequence[tuple[float, float]], tokens: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Losses per token of each row, weighted so that their mean is that of all tokens.

    Raises DataError for rows that A and B read as different numbers of tokens.
    """
    if any(a != b for a, b in tokens):
        raise DataError(
            "A and B read these rows as different tokens, whose losses cannot be compared: take models of one tokenizer"
        )
    mean = fmean(count for count, _ in tokens)
    return [(x * count / mean, y * count / mean) for (x, y), (count, _) in zip(losses, tokens, strict=True)]


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted settings, and the resolved temperature, that differ between two records."""
    settings = [flat(record.get("settings", {})) | _drawn(record) for record in (a, b)]
    if not all(settings):
        return {}
    keys = dict.fromkeys([*settings[0], *settings[1]])
    both = {key: (settings[0].get(key), settings[1].get(key)) for key in keys if not key.startswith(MAY_DIFFER)}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _drawn(record: Mapping[str, Any]) -> dict[str, Any]:
    """The temperature that completions were sampled at, also if the setting is null."""
    result = record.get("result", {})
    return {"sampling.temperature": result["temperature"]} if "temperature" in result else {}


def _row(title: str, name: str, measured: Measured) -> str:
    found = measured.difference
    a, b = _figure(measured.a, name), _figure(measured.b, name)
    return f"  {title:<18}{a:>8}{b:>8}    {_figure(found.value, name, '+')}{_spread(found, name, gap='  ')}"


def _spread(found: Difference, name: str, gap: str = " ") -> str:
    """The interval of a difference behind a gap; empty if there is none."""
    if found.low is None or found.high is None:
        return ""
    return f"{gap}[{_figure(found.low, name, '+')}, {_figure(found.high, name, '+')}]"


def _figure(value: float, name: str, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if name in ("reward", "loss") else f"{value:{sign}.1%}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)

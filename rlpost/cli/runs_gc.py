"""What `rlpost runs gc` prints and does."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlpost.cli.columns import fitted_table, output_width
from rlpost.cli.terminal import print_json
from rlpost.config.paths import RUNS
from rlpost.text import counted, printable, readable

if TYPE_CHECKING:
    from rlpost.runs.gc import Removal, Rule


def collect(rules: frozenset[Rule], rollout_days: float, *, do_it: bool, as_json: bool) -> None:
    """Say what the rules remove from runs/, and remove it where `do_it`."""
    from rlpost.runs.gc import removals, remove

    found = removals(RUNS, rules, rollout_days)
    gone = [removal for removal in found if do_it and remove(removal)]
    if as_json:
        done = set(gone)
        entries = [_entry(removal, removed=removal in done) for removal in found]
        print_json({"bytes": sum(r.bytes for r in (gone if do_it else found)), "removed": do_it, "items": entries})
        return
    told = gone if do_it else found
    if not found:
        print(f"nothing to remove in {RUNS}/")
        return
    total = readable(sum(removal.bytes for removal in told))
    print(f"removed {total}:" if do_it else f"would remove {total}; add --yes to do it:")
    print("\n".join(_table(told)))
    for run in sorted({removal.run for removal in found} - {removal.run for removal in told}):
        print(f"left alone: {printable(str(run))}, which a process has taken up meanwhile")


def _table(told: list[Removal]) -> list[str]:
    """A line for each removal; the rollouts of a run are one."""
    from rlpost.runs.gc import Rule

    rows = []
    for (run, rule), removals in groupby(told, key=lambda removal: (removal.run, removal.rule)):
        group = list(removals)
        if rule is Rule.rollouts:
            named = f"{run}/rollouts: {counted(len(group), 'file')}"
            rows.append((readable(sum(r.bytes for r in group)), rule.value, printable(named)))
        else:
            end = "/state" if rule is Rule.state else ""
            rows += [(readable(r.bytes), rule.value, printable(f"{r.path}{end}")) for r in group]
    return fitted_table(rows, output_width(0) or None, right=[0], cuttable=[2]) if rows else []


def _entry(removal: Removal, *, removed: bool) -> dict[str, Any]:
    return {
        "run": str(removal.run),
        "path": str(removal.path),
        "rule": removal.rule.name,
        "why": removal.rule.value,
        "bytes": removal.bytes,
        "removed": removed,
    }

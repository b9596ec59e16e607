"""`rlpost cluster`: checks that a Ray cluster is fit for cluster=ray."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rlpost.cli.terminal import output_width, print_json
from rlpost.cli.usage import App
from rlpost.cli.views import table
from rlpost.errors import PolicyError

CHECK_EXAMPLES = """\
  rlpost cluster check                   the one this machine is part of
  rlpost cluster check 10.0.0.7:6379
  rlpost cluster check local             a new one, of this machine
"""

app = App(help="Check a Ray cluster.")


@app.callback()
def cluster() -> None:
    """Check a Ray cluster."""


@app.command("check", examples=CHECK_EXAMPLES, short_help="Check that a Ray cluster is fit for cluster=ray.")
def check(
    address: Annotated[str, typer.Argument(metavar="[ADDRESS]", help="The head's host:port, auto or local.")] = "auto",
    megabytes: Annotated[int, typer.Option("--mb", min=1, help="Size of the object that every node reads.")] = 100,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Timeout for the nodes.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show a cluster's nodes, their devices, and how fast they read a push.

    Ends with exit code 5 where a node does not answer or has other versions.
    """
    from rlpost.remote.cluster import connect, differences, report, versions, what_there_is

    ray = connect(address, seconds=seconds)
    try:
        nodes = report(ray, megabytes=megabytes, seconds=seconds)
        there = what_there_is(ray)
    finally:
        ray.shutdown()
    problems = differences(nodes, versions())
    if as_json:
        print_json({"nodes": [asdict(node) for node in nodes], "problems": problems})
    else:
        _print_nodes(nodes, megabytes)
        print(there)
    if problems:
        advice = "install the same versions there, and see that every node reaches the head"
        raise PolicyError("; ".join(problems) + f": {advice}")
    if not as_json:
        print("fit for cluster=ray", file=sys.stderr)


def _print_nodes(nodes: list[Any], megabytes: int) -> None:
    rows = [["node", "address", "state", "CPUs", "GPUs", "memory", f"reads {megabytes} MB", "devices"]]
    for node in nodes:
        read = "-" if node.seconds is None else f"{node.seconds:.2f} s, {megabytes / max(node.seconds, 1e-6):,.0f} MB/s"
        state = ("no answer" if node.problem else "ok") if node.alive else "gone"
        memory = f"{node.memory / 1e9:.1f} GB"
        figures = [f"{node.cpus:g}", f"{node.gpus:g}", memory, read]
        rows.append([node.name, node.address, state, *figures, ", ".join(node.devices) or "-"])
    print("\n".join(table(rows, output_width(0) or None, right=[3, 4, 5, 6], cuttable=[0, 7])))

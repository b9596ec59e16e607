"""scripts/bench: what is compared, and what is made of the times. The timing itself is no test."""

from __future__ import annotations

from pathlib import Path

import bench_compare as bench
import pytest

from rlpost.data.template_choice import named_template


def timing(seconds: list[float], prompts: list[str]) -> bench.Timing:
    return bench.Timing(seconds, [20.0] * len(seconds), [0.5] * len(seconds), 1.5, prompts, {"torch": "2.13.0"})


def test_the_works_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(bench.WORKS)


def test_trl_is_asked_for_the_default_grpo_work(tmp_path: Path) -> None:
    work = bench.Work("the default settings on a small model", ("model=tiny",), 2)
    request = bench.trl_request(work, tmp_path, 8)
    assert len(request["rows"]) == 2 * 8  # steps x prompts a step
    assert len({row["prompt"][-1]["content"] for row in request["rows"]}) == 16
    a, b = request["rows"][0]["prompt"][-1]["content"].removeprefix("What is ").partition("?")[0].split(" + ")
    assert request["rows"][0]["answer"] == str(int(a) + int(b))
    sizes = ("steps", "group_size", "completions_per_step", "max_completion_tokens", "temperature", "kl_coef")
    assert [request[name] for name in sizes] == [2, 8, 64, 20, 1.0, 0.0]
    assert (request["optim"]["lr"], request["optim"]["schedule"]) == (2e-5, "linear")
    assert (Path(request["model"]) / "config.json").is_file()


def test_memory_is_compared_with_trls_and_the_samplers() -> None:
    timings = {"ours": timing([2.0], ["a"]), "trl": timing([5.0], ["a"])}  # 1.5 GB each
    ratio, memory = bench.lines(bench.report("smoke", timings, 0.25))[-2:]
    assert ratio.split()[:2] == ["ratio", "2.50"]
    assert memory.split()[:: len(memory.split()) - 1] == ["memory", "1.75"]  # 1.50 GB of TRL and 0.25 of the sampler


def test_base_model_has_the_template_that_its_option_names(tmp_path: Path) -> None:
    work = bench.Work("a model whose template is chosen", ("model=tiny", "model.chat_template=plain"), 1)
    assert bench.trl_request(work, tmp_path, 8)["chat_template"] == named_template("plain")

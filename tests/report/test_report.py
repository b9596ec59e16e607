"""`rlpost report`: what the page says, and that it does so in a real browser, alone, with hostile texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.cli.main import run as rlpost
from rlpost.config.paths import HELD_OUT
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.evaluation.saved import write_samples
from rlpost.model.tokenizer import load_tokenizer
from rlpost.report.report import content, rendered, write_report
from rlpost.runs.rollouts import write_rollouts
from rlpost.tools.browser import PROGRAMS
from tests.run_folders import evaluation, make_run, step_row

HOSTILE = "</script><script>window.hacked = 1</script><img src=http://example.invalid/x onerror=alert(1)>"
REWARD = "def odd(completions, **columns):\n    return [len(text) % 2 for text in completions]\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with its checkpoint, rollouts and held-out tables."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "odd.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(rows))
    words = ["model=tiny", "policy=transformers", "env=dataset", f"env.path={folder}/rows.jsonl"]
    words += [f"env.reward={folder}/odd.py:odd", "env.max_completion_tokens=6", "eval.limit=8", "steps=2"]
    assert rlpost(["train", "grpo", *words, "--plain", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def hostile(tmp_path: Path, conversation: Callable[..., Conversation]) -> Path:
    """A run whose name, prompts, completions, settings and log try to become HTML."""
    rows = [{"step": 0, **evaluation(0.25, 0.1, 0.4)}, step_row(1, 0.5), step_row(2, 0.75)]
    rows[-1] |= evaluation(0.5, 0.3, 0.7)
    log = f"2026-11-21 12:06:12,127 WARNING {HOSTILE}\n"
    name = "<img src=x onerror=window.hacked=1>"
    folder = make_run(tmp_path / name, rows, log=log, overrides=["model=tiny", f"env.system_prompt={HOSTILE}"])
    said = [conversation(4, sample, query=HOSTILE, text=HOSTILE, reward=float(sample)) for sample in range(2)]
    write_rollouts(
        folder / "rollouts/step-000001.parquet",
        1,
        batch_from_conversations(said).set("advantage", torch.tensor([-1.0, 1.0])),
    )
    for step, reward in ((0, 0.0), (2, 1.0)):
        played = [conversation(n, text=HOSTILE, reward=reward, accuracy_lenient=reward) for n in range(3)]
        for number, each in enumerate(played):
            each.task = {"number": number}
        write_samples(folder / HELD_OUT / f"step-{step:06d}.parquet", played)
    return folder


def of_run(folder: Path) -> dict[str, Any]:
    return content([folder])["runs"][0]


def test_a_training_writes_its_report_unless_it_is_turned_off(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "run: grpo of builtin:tiny on dataset, finished" in page  # also without JavaScript
    words = ["model=tiny", "policy=transformers", "steps=1", "eval.enabled=false", "env.max_completion_tokens=2"]
    assert rlpost(["train", "grpo", *words, "report.enabled=false", "--out", str(trained.parent / "off")]) == 0
    assert not (trained.parent / "off" / "report.html").exists()


def test_the_headline_has_both_intervals_and_the_paired_difference(hostile: Path) -> None:
    [accuracy] = of_run(hostile)["headline"]
    assert accuracy["before"] == {"value": 0.25, "low": 0.1, "high": 0.4, "prompts": 50}
    assert accuracy["after"]["value"] == 0.5
    assert (accuracy["paired"]["value"], accuracy["paired"]["prompts"]) == (1.0, 3)  # of the three prompts kept
    before, after = "25.0% [10.0%, 40.0%] of 50 prompts", "50.0% [30.0%, 70.0%] of 50 prompts"
    assert of_run(hostile)["summary"][1] == f"held-out accuracy: {before} before, {after} after training"


def test_held_out_prompts_stand_side_by_side(hostile: Path) -> None:
    held_out = of_run(hostile)["held_out"]
    assert (held_out["steps"], held_out["total"]) == ([0, 2], 3)
    assert [(pair["before"]["score"], pair["after"]["score"]) for pair in held_out["pairs"]] == [(0.0, 1.0)] * 3


def test_the_sample_of_a_step_is_the_best_worst_most_surprising_and_random(
    tmp_path: Path, conversation: Callable[..., Conversation]
) -> None:
    folder = make_run(tmp_path / "run")
    made = [
        conversation(n // 4, n % 4, reward=n / 64, log_probs=[-3.0 if n == 17 else -0.25, -0.25]) for n in range(40)
    ]
    for step in range(1, 65):
        write_rollouts(folder / f"rollouts/step-{step:06d}.parquet", step, batch_from_conversations(made))
    found = of_run(folder)["completions"]
    assert (found["total"], found["of_steps"], len(found["steps"])) == (2560, 64, 60)
    assert [found["steps"][0]["step"], found["steps"][-1]["step"]] == [1, 64]
    rows = found["steps"][7]["rows"]
    best = [row["reward"] for row in rows if "best" in row["why"]]
    assert best == [39 / 64, 35 / 64, 31 / 64]  # of different prompts
    assert [row["reward"] for row in rows if "worst" in row["why"]] == [0.0, 4 / 64, 8 / 64]
    surprising = max((row for row in rows if "most surprising" in row["why"]), key=lambda row: row["surprise"])
    assert (surprising["reward"], surprising["surprise"]) == (17 / 64, 1.625)
    assert len([row for row in rows if "random" in row["why"]]) == 3


def test_tokens_of_a_completion_have_texts_log_probs_and_versions(
    trained: Path, conversation: Callable[..., Conversation]
) -> None:
    rows = [row for step in of_run(trained)["completions"]["steps"] for row in step["rows"]]
    for row in rows:
        assert len(row["pieces"]) == len(row["sampler"]) == len(row["mask"]) == row["tokens"]
        assert (row["trainer"] is None) == (row["advantage"] == 0)
        assert row["version"] in ([[0, 0]], [[0, 1]])
    ids = load_tokenizer(trained / "checkpoints/latest/model").encode("It is 91.", add_special_tokens=False)
    batch = batch_from_conversations([conversation(response_ids=ids, text="It is 91.")])
    write_rollouts(trained / "rollouts/step-000003.parquet", 3, batch)
    [row] = of_run(trained)["completions"]["steps"][-1]["rows"]
    (trained / "rollouts/step-000003.parquet").unlink()
    assert "".join(row["pieces"]) == "It is 91."
    assert len(row["pieces"]) == len(ids)


def test_each_setting_says_who_set_it(trained: Path) -> None:
    sources = {key: source for key, _, source in of_run(trained)["settings"]}
    assert sources["loss.clip_high"] == "default"
    assert sources["env.path"] == sources["model.path"] == "command line"
    environment = json.loads((trained / "environment.json").read_text())
    environment["chosen"] = {"optim.lr": "by its size"}
    (trained / "environment.json").write_text(json.dumps(environment))
    assert {key: source for key, _, source in of_run(trained)["settings"]}["optim.lr"] == "chosen: by its size"


def test_the_verb_writes_one_page_of_several_runs(
    trained: Path, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlpost(["report", str(trained), str(hostile), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["runs"]) == ("report.html", 2)
    assert told["bytes"] == Path("report.html").stat().st_size
    assert rlpost(["report", str(trained), "-o", "odd/page.html"]) == 0
    assert "odd/page.html: 1 run, " in capsys.readouterr().out
    assert rlpost(["report", "nothing"]) == 2


# In a browser

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, list[str]]]]:
    """Opens the report of runs; gives the page, and the list of its requests and errors but for the file itself."""
    pages = []

    def open_report(*runs: Path, width: int = 1600, scheme: str = "light") -> tuple[Any, list[str]]:
        write_report(runs, tmp_path / "page.html")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        heard: list[str] = []
        page.on("request", lambda request: heard.append(request.url))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("console", lambda message: heard.append(message.text))
        page.goto(f"file://{tmp_path}/page.html")
        page.wait_for_selector("html[data-ready]")
        return page, heard[1:]

    yield open_report
    for page in pages:
        page.close()


@needs_chromium
def test_hostile_texts_stay_texts_and_nothing_is_requested(
    hostile: Path, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    page, heard = opened(hostile)
    assert heard == []
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("#completions .text", has_text=HOSTILE).count() >= 2
    assert page.locator("#held-out .text", has_text=HOSTILE).count() >= 2
    assert "connect-src" not in page.content()
    with pytest.raises(playwright.Error):  # the page's own policy refuses what it does not name
        page.evaluate("fetch('http://example.invalid/')")


@needs_chromium
def test_the_page_is_used_by_keyboard(trained: Path, opened: Callable[..., tuple[Any, list[str]]]) -> None:
    page, heard = opened(trained)
    rewards = [row[1] for row in of_run(trained)["curves"]["reward/mean"]]
    curve = page.locator("svg[aria-label^='reward/mean']")
    curve.focus()
    curve.press("End")
    assert page.locator(".chart:has(svg[aria-label^='reward/mean']) .told").inner_text() == f"step 2: {rewards[1]:.4g}"
    curve.press("ArrowLeft")
    assert page.locator(".chart:has(svg[aria-label^='reward/mean']) .told").inner_text() == f"step 1: {rewards[0]:.4g}"
    shown = page.locator("#completions details.completion")
    at_last = shown.count()
    previous = page.get_by_role("button", name="previous step")
    previous.focus()
    previous.press("Enter")
    assert "Step 1: " in page.locator("#completions p").inner_text()
    page.get_by_label("sort by").select_option("length")
    page.get_by_label("colour tokens by").select_option("sampler gap")
    page.locator("#completions input[type=search]").fill("no reply says this")
    page.wait_for_selector("#completions details.completion", state="detached")
    assert at_last > 0
    assert heard == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_needs_no_scrolling_sideways(
    scheme: str, trained: Path, hostile: Path, opened: Callable[..., tuple[Any, list[str]]]
) -> None:
    page, heard = opened(trained, hostile, width=400, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("#settings tr.differs").count() > 0
    back, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert (back == "rgb(20, 23, 27)") == (scheme == "dark")
    assert back != ink
    assert heard == []


def test_the_policy_of_the_page_allows_its_own_script_alone(hostile: Path) -> None:
    page = rendered(content([hostile]))
    policy = page.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert HOSTILE not in page  # the data is compressed, and the heading escaped

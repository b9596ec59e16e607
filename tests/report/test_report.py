"""`rlpost report`: what the page says, and that it does so in a real browser, alone, with hostile texts."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlpost.cli.main import run as rlpost
from rlpost.config.paths import HELD_OUT
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.evaluation.saved import sample_rows, write_rows
from rlpost.model.tokenizer import load_tokenizer
from rlpost.record import BEGAN, FAILED, FINISHED, read_metrics
from rlpost.report.curves import wall_clock
from rlpost.report.report import content, rendered, write_report
from rlpost.runs.rollout_table import write_rollouts
from rlpost.tools.browser import PROGRAMS
from tests.evaluation_folders import keep_held_out
from tests.run_folders import evaluation, make_run, rows_worth, step_row
from tests.says import Says

# what a program that prints the page as soon as it has loaded finds
COUNT = "window.drawn = document.querySelectorAll('.chart path').length"
AS_LOADED = f"document.addEventListener('DOMContentLoaded', () => {{ {COUNT} }})"
HOSTILE = "</script><script>window.hacked = 1</script><img src=http://example.invalid/x onerror=alert(1)>"
REWARD = "def odd(completions, **columns):\n    return [len(text) % 2 for text in completions]\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with its checkpoint, rollouts and held-out tables."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "odd.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(rows))
    words = ["model=tiny", "policy=transformers", "env=dataset", "env.path=rows.jsonl", "env.reward=./odd.py:odd"]
    words += ["env.max_completion_tokens=6", "eval.limit=8", "steps=2"]
    with contextlib.chdir(folder):
        assert rlpost(["train", "grpo", *words, "--plain", "--name", "run"]) == 0
    return folder / "runs" / "run"


Scored = Callable[..., Path]


@pytest.fixture
def scored(tmp_path: Path, conversation: Callable[..., Conversation]) -> Scored:
    """Makes a run by the rewards, and the accuracies, of its held-out replies before and after training."""

    def make(rewards: Sequence[Sequence[float]], accuracies: Sequence[Sequence[float]] | None = None) -> Path:
        rows = [{"step": 0}, step_row(1, 0.25), step_row(2, 0.5)]
        folder = make_run(tmp_path / f"scored-{len(list(tmp_path.iterdir()))}", rows)
        for place, its in enumerate(rewards):
            rows[2 * place] |= {"eval/prompts": len(its), "eval/reward": fmean(its)}
            played = [
                conversation(n, text=f"reply {n}", query=f"prompt {n}", reward=reward, task={"number": n})
                for n, reward in enumerate(its)
            ]
            if accuracies:
                rows[2 * place]["eval/accuracy_lenient"] = fmean(accuracies[place])
                for each, accuracy in zip(played, accuracies[place], strict=True):
                    each.accuracy_lenient = accuracy
            write_rows(folder / HELD_OUT / f"step-{2 * place:06d}.parquet", sample_rows(played))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.fixture
def hostile(tmp_path: Path, conversation: Callable[..., Conversation]) -> Path:
    """A run whose name, prompts, completions, settings and log try to become HTML."""
    rows = [{"step": 0, **evaluation(0.25, 0.1, 0.4)}, step_row(1, 0.5), step_row(2, 0.75)]
    rows[-1] |= evaluation(0.5, 0.3, 0.7)
    log = f"2026-11-21 12:06:12,127 WARNING {HOSTILE}\n"
    name = "<img src=x onerror=window.hacked=1>"
    folder = make_run(tmp_path / name, rows, log=log, overrides=["model=tiny", f"env.system_prompt={HOSTILE}"])
    said = [conversation(4, sample, query=HOSTILE, text=HOSTILE, reward=float(sample)) for sample in range(2)]
    batch = batch_from_conversations(said)
    write_rollouts(folder / "rollouts/step-000001.parquet", 1, batch, rows_worth(batch, -1.0, 1.0))
    for step, reward in ((0, 0.0), (2, 1.0)):
        made = {"text": HOSTILE, "reward": reward, "accuracy_lenient": reward}
        played = [conversation(n, task={"number": n}, **made) for n in range(3)]
        write_rows(folder / HELD_OUT / f"step-{step:06d}.parquet", sample_rows(played))
    return folder


def of_run(folder: Path) -> dict[str, Any]:
    return content([folder])["runs"][0]


def test_a_training_writes_its_report_unless_it_is_turned_off(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    head = page.partition("<header>")[2].partition("</header>")[0]  # also without JavaScript
    assert "dataset (rows.jsonl); 2 of 2" in head
    words = ["model=tiny", "policy=transformers", "steps=1", "eval.enabled=false", "env.max_completion_tokens=2"]
    assert rlpost(["train", "grpo", *words, "report.enabled=false", "--out", str(trained.parent / "off")]) == 0
    assert not (trained.parent / "off" / "report.html").exists()


def verdict_of(folder: Path) -> str:
    return of_run(folder)["verdict"][0]


def test_the_verdict_says_by_how_much_the_reward_rose(scored: Scored, says: Says) -> None:
    before, after = [n / 40 for n in range(12)], [n / 40 + (0.3 if n % 4 else 0.5) for n in range(12)]
    rose, fell = scored([before, after]), scored([after, before])
    said = verdict_of(rose)
    assert [float(number) for number in re.findall(r"\d+\.\d+", said)[:3]] == pytest.approx(
        [0.1375, 0.4875, 0.35], abs=1e-3
    )
    says("report", f"{said}\n{verdict_of(fell)}")
    page = rendered(content([rose]))
    assert page.index(said) < page.index("<main")


def test_without_a_clear_difference_the_verdict_claims_none(scored: Scored, says: Says) -> None:
    even, odd = [n % 2 / 2 for n in range(12)], [(n + 1) % 2 / 2 for n in range(12)]
    few = [[0.1] * 3, [0.9] * 3]
    says("report", "\n".join(verdict_of(scored(rewards)) for rewards in ([even, odd], few)))


def test_a_run_that_measured_nothing_held_out_says_so_first(tmp_path: Path, says: Says) -> None:
    says("report", verdict_of(make_run(tmp_path / "run", [step_row(1, 0.25), step_row(2, 0.5)])))


def test_replies_have_their_reward_and_best_changes_come_first(scored: Scored) -> None:
    held_out = of_run(scored([[0.5, 0.25, 0.0, 0.5], [0.5, 0.0, 0.43, 0.75]]))["held_out"]
    assert list(held_out["counts"].values()) == [2, 1, 1]  # rose, fell, the same
    rewards = [tuple(reply["reward"] for reply in pair["replies"]) for pair in held_out["pairs"]]
    assert rewards == [(0.0, 0.43), (0.5, 0.75), (0.5, 0.5), (0.25, 0.0)]
    assert held_out["pairs"][0]["prompt"] == "prompt 2"  # without the words of a template


def test_accuracy_stands_beside_the_reward_if_it_says_more(scored: Scored) -> None:
    right = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    alike = of_run(scored(right, right))["held_out"]
    assert alike["counts"] == {"became right": 1, "became wrong": 1, "still right": 1, "still wrong": 1}
    assert {reply["accuracy"] for pair in alike["pairs"] for reply in pair["replies"]} == {None}
    shaped = of_run(scored([[0.2, 1.0, 0.2, 1.0], [1.0, 1.0, 0.3, 0.2]], right))["held_out"]
    assert shaped["counts"] == alike["counts"]
    assert [reply["accuracy"] for reply in shaped["pairs"][0]["replies"]] == [0.0, 1.0]
    never = of_run(scored([[0.1, 0.2], [0.3, 0.1]], [[0.0, 0.0], [0.0, 0.0]]))["held_out"]
    assert list(never["counts"].values()) == [1, 1, 0]


def test_curves_have_units_and_leave_out_what_says_nothing(tmp_path: Path, says: Says) -> None:
    rows = [
        step_row(n, n / 8, **{"groups/zero_std": 1 / n, "lr": 1e-5 * (9 - n), "kl/ref": 1.39e-17 if n % 2 else 0.5})
        | {"reward/score": n / 8, "ratio/clip_low": 1e-17 * n}
        for n in range(1, 5)
    ]
    found = content([make_run(tmp_path / "run", rows)])
    curves = {curve["key"]: curve for curve in found["curves"]}
    assert curves["groups/zero_std"]["unit"] == "%"
    assert "groups" in curves["groups/zero_std"]["title"]
    assert [point[1] for point in curves["kl/ref"]["lines"][0]] == [0.0, 0.5, 0.0, 0.5]
    assert [point[1] for point in curves["lr"]["lines"][0]] == [8e-5, 7e-5, 6e-5, 5e-5]
    assert not {"ratio/clip_low", "reward/std", "reward/score"} & set(curves)
    says("report", found["left_out"])


def test_the_time_is_that_of_the_whole_run(trained: Path) -> None:
    spent = dict(of_run(trained)["time"])
    assert sum(spent.values()) == pytest.approx(wall_clock((trained / "log.txt").read_text()), abs=0.01)
    rows, _ = read_metrics(trained / "metrics.jsonl")
    assert spent["loading"] == rows[0]["time/load"]
    assert spent["evaluating"] == rows[0]["time/eval"] + rows[2]["time/eval"]
    assert spent["training"] == rows[1]["time/train"] + rows[2]["time/train"]


def test_attempts_are_timed_from_their_beginning_to_their_end() -> None:
    def line(clock: str, words: str) -> str:
        return f"2026-01-01 {clock},500 INFO {words}\n"

    killed = line("10:00:00", f"{BEGAN}: rlpost train grpo") + "step 1/9\n" + line("10:00:20", "saved a checkpoint")
    failed = line("11:00:00", f"{BEGAN}: rlpost train grpo") + line("11:00:07", f"{FAILED} DataError: no")
    ended = line("12:00:00", f"{BEGAN}: rlpost train grpo") + line("12:01:00", FINISHED) + line("13:00:00", "exported")
    assert wall_clock(killed + failed + ended) == 20 + 7 + 60
    assert wall_clock("no date") == 0


@pytest.mark.parametrize(("place", "verb"), enumerate(("eval", "export", "runs")))
def test_each_command_of_the_page_works_as_it_is_printed(
    place: int, verb: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.split(of_run(trained)["commands"][place][1])
    assert command[:2] == ["rlpost", verb]
    quicker = ["policy=transformers"] if verb == "eval" else []  # than an engine
    with contextlib.chdir(trained.parent.parent):
        assert rlpost([*command[1:], *quicker]) == 0, capsys.readouterr().err


def test_commands_name_the_folder_of_the_run(trained: Path, here: Path) -> None:
    folder = make_run(Path("elsewhere"), overrides=["model=tiny"])

    def commands() -> list[list[str]]:
        return [command.split() for _, command in of_run(folder)["commands"]]

    reproduce = ["rlpost", "runs", "reproduce", "./elsewhere"]
    assert commands() == [reproduce]  # there is no model yet
    shutil.copytree(trained / "checkpoints", folder / "checkpoints")
    evaluate, export = ["rlpost", "eval", "model=./elsewhere"], ["rlpost", "export", "./elsewhere"]
    assert commands() == [evaluate, export, reproduce]


def test_a_step_shows_best_worst_surprising_and_random_replies(
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

    def shown(why: str) -> list[Any]:
        return [row for row in found["steps"][7]["rows"] if why in row["why"]]

    assert [row["reward"] for row in shown("best")] == [39 / 64, 35 / 64, 31 / 64]  # of different prompts
    assert [row["reward"] for row in shown("worst")] == [0.0, 4 / 64, 8 / 64]
    surprising = max(shown("most surprising"), key=lambda row: row["surprise"])
    assert (surprising["reward"], surprising["surprise"]) == (17 / 64, 1.625)
    assert len(shown("random")) == 3


def test_tokens_of_a_completion_have_their_texts_and_log_probs(
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
    file = trained / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chosen": {"optim.lr": "size"}}))
    assert "chosen: size" in [source for key, _, source in of_run(trained)["settings"] if key == "optim.lr"]


def test_the_verb_writes_one_page_of_several_runs(
    trained: Path, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlpost(["report", str(trained), str(hostile), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["runs"]) == ("report.html", 2)
    page = Path("report.html").read_text()
    assert told["bytes"] == len(page.encode())
    assert page.index("<table>") < page.index("<main")
    assert page.count("<tr>") == 3  # a header, and a row for each run
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


Opening = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opening]:
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
        page.add_init_script(AS_LOADED)
        page.goto(f"file://{tmp_path}/page.html")
        page.wait_for_selector("html[data-ready]")
        return page, heard[1:]

    yield open_report
    for page in pages:
        page.close()


def test_the_page_of_a_sweep_begins_with_what_it_found(tmp_path: Path) -> None:
    """Two rates, two seeds each: rate 2 answers 20 of 40 held-out prompts right, rate 1 none."""
    sweep, jobs = tmp_path / "rates", []
    for rate, seed in ((1, 0), (1, 1), (2, 0), (2, 1)):
        name, right = f"lr={rate}_seed={seed}", 20 * (rate - 1)
        after = evaluation(right / 40, 0.3, 0.7)
        folder = make_run(sweep / name, [{"step": 0, **evaluation(0.0, 0.0, 0.1)}, {**step_row(2, 0.5), **after}])
        for step, count in ((0, 0), (2, right)):
            keep_held_out(folder, step, ["r" if n < count else "w" for n in range(40)])
        result = {"metrics": {"reward/mean": 0.5}, "evaluation_before": None, "evaluation_after": after}
        jobs.append({"name": name, "differs": {"lr": str(rate), "seed": str(seed)}, "exit_code": 0, "result": result})
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))

    with contextlib.chdir(tmp_path):
        assert rlpost(["report", str(sweep)]) == 0

    page = (sweep / "report.html").read_text()
    parts = ("rates</h1>", "lr=2 is better than lr=1", "<td>2</td>", "<td>lr=1_seed=0</td>")
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


@needs_chromium
def test_hostile_texts_stay_texts_and_nothing_is_requested(hostile: Path, opened: Opening) -> None:
    page, heard = opened(hostile)
    assert heard == []
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    for _ in range(2):  # a fold has its content, and folds in it, once it is open
        page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
        page.wait_for_timeout(100)
    assert page.locator("#completions .text", has_text=HOSTILE).count() >= 2
    assert page.locator("#held-out .text", has_text=HOSTILE).count() >= 2
    assert HOSTILE not in Path(page.url.removeprefix("file://")).read_text()  # compressed, and the heading escaped
    assert "connect-src" not in page.content()
    with pytest.raises(playwright.Error):  # the page's own policy refuses what it does not name
        page.evaluate("fetch('http://example.invalid/')")


@needs_chromium
def test_the_page_is_used_by_keyboard(trained: Path, opened: Opening) -> None:
    page, heard = opened(trained)
    [rewards] = next(c["lines"] for c in content([trained])["curves"] if c["key"] == "reward/mean")
    box = page.locator("#story .chart").first
    curve = box.locator("svg")
    curve.focus()
    curve.press("End")
    assert box.locator(".told").inner_text() == f"step 2: {rewards[1][1]:.4g}"
    curve.press("ArrowLeft")
    assert box.locator(".told").inner_text() == f"step 1: {rewards[0][1]:.4g}"
    fold = page.locator("#completions > summary")
    fold.focus()
    fold.press("Enter")
    shown = page.locator("#completions details.completion")
    shown.first.wait_for()
    previous = page.get_by_role("button", name="previous step")
    previous.focus()
    previous.press("Enter")
    assert "Step 1: " in page.locator("#completions p").inner_text()
    page.get_by_label("sort by").select_option("length")
    page.get_by_label("colour tokens by").select_option("sampler gap")
    page.locator("#completions input[type=search]").fill("no reply says this")
    page.wait_for_selector("#completions details.completion", state="detached")
    assert heard == []


@needs_chromium
def test_the_page_tells_its_story_in_order(scored: Scored, opened: Opening) -> None:
    page, heard = opened(scored([[0.1] * 12, [n / 12 for n in range(12)]]))
    parts = page.locator("header .verdict, main > section, main > details").evaluate_all(
        "found => found.map((each) => each.id || each.className)"
    )
    assert parts == ["verdict", "diagnosis", "story", "held-out", "curves", "time", "settings", "commands"]
    assert page.locator("#story .chart").locator("code").all_inner_texts() == ["reward/mean", "eval/reward"]
    assert page.locator("#held-out > .card").count() == 4
    assert page.locator("#held-out .fold").evaluate("fold => fold.open") is False
    assert heard == []


@needs_chromium
def test_a_printed_page_has_its_curves_and_light_colours(scored: Scored, opened: Opening) -> None:
    page, _ = opened(scored([[0.1] * 12, [0.2] * 12]), width=900, scheme="dark")  # nothing was scrolled to
    assert page.evaluate("window.drawn") == 2
    page.locator("#curves > summary").click()
    page.locator("#curves .chart").first.wait_for()
    page.emulate_media(media="print", color_scheme="dark")
    paths, boxes = (
        page.locator(".chart svg").evaluate_all(f"found => found.map((svg) => svg.{asked})")
        for asked in ("querySelectorAll('path').length", "getBoundingClientRect()")
    )
    assert len(paths) == 4
    assert min(paths) > 0
    assert min(box["height"] for box in boxes) > 50
    assert max(box["right"] for box in boxes) <= 900
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("button").first.is_visible() is False


@needs_chromium
def test_axes_name_the_step_and_show_shares_in_percent(tmp_path: Path, opened: Opening) -> None:
    rows = [{"step": 0, **evaluation(0.25, 0.1, 0.4)}, step_row(1, 0.5), step_row(2, 0.75) | evaluation(0.5, 0.3, 0.7)]
    page, _ = opened(make_run(tmp_path / "run", rows))
    texts = page.locator("#story svg", has_text="step").nth(1).locator("text").all_text_contents()
    assert "step" in texts
    assert {"20%", "40%", "60%"} <= set(texts)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_needs_no_scrolling_sideways(
    scheme: str, trained: Path, hostile: Path, opened: Opening
) -> None:
    page, heard = opened(trained, hostile, width=400, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.locator("#settings > summary").click()
    page.locator("#settings td", has_text="env.path").first.wait_for()
    page.locator("#runs summary").first.click()
    page.locator("#runs #commands").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    back, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert (back == "rgb(20, 23, 27)") == (scheme == "dark")
    assert back != ink
    assert heard == []

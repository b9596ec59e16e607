"""Ways to make a file that may be anybody's run code: each is refused in one line, and nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.config import difference
from rlpost.cli.main import run
from rlpost.cli.run_folder import kept_settings
from rlpost.cli.sweep import SweepOptions, job_command, plan
from rlpost.config.code import is_code
from rlpost.config.compose import compose
from rlpost.config.explain import provenance, write_starter
from rlpost.config.overrides import Override
from rlpost.errors import ConfigError, DataError, RlpostError
from rlpost.runs.reader import code_of
from rlpost.settings.env import PythonSandbox, TextGameSettings

RUN = "open('ran', 'w')\n"
GAME = "env: text_game\nenv.max_turns: 3\n"
TOOL = "env.max_turns: 3\ntools.use: [{}]\n"
ROWS = "env: dataset\nenv.path: me/rows\n"
NO_CODE = "a file cannot name code to run"
NO_PROGRAM = "a file cannot name a program to start"
MIX = 'env: mix\nenv.sources: ["{}"]'

# what is tried -> (the lines of a recipe after its command, what is said)
RECIPES: dict[str, tuple[str, str]] = {
    "a reward of a source": (MIX.format("dataset path=me/rows reward=./evil.py:f"), NO_CODE),
    "a reward of a source in quotes": (MIX.format("dataset path=me/rows 'reward=[exact,./evil.py:f]'"), NO_CODE),
    "an accuracy of a source": (MIX.format("dataset path=me/rows reward=exact accuracy=evil:f"), NO_CODE),
    "a game of a source": (MIX.format("text_game id=evil:Env-v0"), "give 'env.sources=text_game id=evil:Env-v0'"),
    "a game of a source in escapes of JSON": (
        "env: mix\nenv.sources: ['text_game ''id=\"evil\\u003aEnv-v0\"''']",
        NO_CODE,
    ),
    "a plugin as a source's setting": (MIX.format("arithmetic plugin=./evil.py"), "env.plugin is not a setting"),
    "another environment as a source's setting": (
        MIX.format("arithmetic env.reward=evil:f"),
        "env.env.reward is not a setting",
    ),
    "a reference in a source": (MIX.format("arithmetic digits=${oc.env:EVIL}"), "cannot refer"),
    "a plugin": ("plugin: ./evil.py", NO_CODE),
    "a plugin in escapes of JSON": (r"""plugin: '["./evil.\u0070y"]'""", "give plugin=./evil.py on the command line"),
    "a plugin in one text of JSON": (r"""plugin: '"./evil.\u0070y"'""", NO_CODE),
    "a plugin in escapes of YAML": (r'plugin: "./evil.\x70y"', NO_CODE),
    "a plugin in quotes within quotes": ("plugin: \"'./evil.py'\"", NO_CODE),
    "a plugin in a list of a list": ("plugin: [[./evil.py]]", "r.yaml, line 2"),
    "a plugin in capitals": ("plugin: ./EVIL.PY", NO_CODE),
    "a plugin compiled": ("plugin: ./evil.pyc", NO_CODE),
    "a plugin in C": ("plugin: ./evil.so", NO_CODE),
    "a plugin without ending": ("plugin: ./evil", NO_CODE),
    "a plugin by its module's name": ("plugin: evil", NO_CODE),
    "a plugin behind a link": ("plugin: link", NO_CODE),
    "a plugin by an anchor": ("run.name: &a ./evil.py\nplugin: [*a]", "r.yaml, line"),
    "a plugin by an alias": (
        f"{ROWS}env.reward: exact\nenv.system_prompt: &a ./evil.py\nplugin: *a",
        NO_CODE,
    ),
    "a plugin by a merge key": ("<<: {plugin: ./evil.py}", "r.yaml"),
    "a plugin that a variable names": ("plugin: ${oc.env:EVIL}", "cannot refer to another with ${...}"),
    "a plugin that a disguised variable names": (r"""plugin: '["\u0024{oc.env:EVIL}"]'""", NO_CODE),
    "a plugin with Hydra's sign": ("+plugin: ./evil.py", "+plugin"),
    "a plugin in Hydra's package": ("plugin@_global_: ./evil.py", "plugin@_global_"),
    "a reward": (f"{ROWS}env.reward: ./evil.py:f", NO_CODE),
    "a reward in escapes of JSON": (ROWS + r"""env.reward: '["exact", "./evil.\u0070y:f"]'""", NO_CODE),
    "a reward without ending": (f"{ROWS}env.reward: [exact, './evil:f']", NO_CODE),
    "a reward by its module's name": (f"{ROWS}env.reward: 'evil:f'", NO_CODE),
    "a reward in capitals": (f"{ROWS}env.reward: ./EVIL.PY:f", NO_CODE),
    "a reward that a disguised variable names": (ROWS + r"""env.reward: '["\u0024{oc.env:EVIL}"]'""", "${...}"),
    "an accuracy in escapes of JSON": (
        ROWS + "env.reward: exact\n" + r"""env.accuracy: '"./evil.\u0070y:f"'""",
        NO_CODE,
    ),
    "an accuracy without ending": (f"{ROWS}env.reward: exact\nenv.accuracy: evil:f", NO_CODE),
    "a game of a module": (f"{GAME}env.id: evil:Env-v0", NO_CODE),
    "a game of a module in escapes": (GAME + r'env.id: "evil\u003aEnv-v0"', NO_CODE),
    "a package of verifiers": ("env: verifiers\nenv.id: evil", NO_CODE),
    "a package of verifiers that a variable names": ("env: verifiers\nenv.id: ${oc.env:EVIL}", "cannot refer"),
    "a package of verifiers as a source": (MIX.format("verifiers id=evil"), NO_CODE),
    "the interpreter of an environment": ("env: verifiers\nenv.python: ./evil", NO_PROGRAM),
    "the interpreter of a source": (MIX.format("verifiers python=./evil"), NO_CODE),
    "a class of an environment": ("env: factory\nenv.path: me/rows\nenv.factory: evil.py:C", NO_CODE),
    "a class of an environment in escapes": (
        "env: factory\nenv.path: me/rows\n" + r"""env.factory: '"./evil.\u0070y:C"'""",
        NO_CODE,
    ),
    "a class of a source": (MIX.format("factory path=me/rows factory=evil:C"), NO_CODE),
    "servers of MCP": (TOOL.format("mcp") + "tools.mcp_file: servers.json", NO_PROGRAM),
    "servers of MCP in escapes": (TOOL.format("mcp") + r"""tools.mcp_file: '"servers.\u006ason"'""", NO_PROGRAM),
    "the model's programs outside the sandbox": (
        TOOL.format("python") + "tools.python_sandbox: limits",
        "a file cannot let programs out of the sandbox",
    ),
    "a cluster": (
        "cluster: ray\ncluster.address: evil.org:6379",
        "a file cannot send code and data to another machine",
    ),
    "an object of YAML": ("plugin: !!python/object/apply:builtins.open [ran, w]", "r.yaml"),
    "a new object of YAML": ("steps: !!python/object/new:os.system [touch ran]", "r.yaml"),
    "a module of YAML": ("steps: !!python/module:evil", "r.yaml"),
    "a name of YAML": ("steps: !!python/name:evil.f", "r.yaml"),
    "a target": ("_target_: evil.f", "a setting cannot name code to run"),
    "a target in a group": ("env._target_: evil.f", "a setting cannot name code to run"),
    "a target nested": ("env: {_target_: evil.f}", "a setting cannot name code to run"),
    "a callback of Hydra": ("hydra.callbacks.evil._target_: evil.f", "a setting cannot name code to run"),
    "a launcher of Hydra": ("hydra/launcher: evil", "hydra/launcher"),
    "a package to search": ("hydra.searchpath: ['pkg://evil']", "hydra.searchpath"),
    "a list of defaults": ("defaults: [../evil]", "defaults"),
    "an option that is a path": ("env: ../../evil", "env=../../evil"),
    "another recipe": ("recipe: evil.yaml", "recipe is not a setting but a file of them"),
    "a command with more behind it": ("command: train grpo; touch ran\n", "is unknown"),
    "a prompt that reaches into objects": (
        "env.prompt_template: '{question.__class__.__init__.__globals__}'",
        "name a column alone",
    ),
}

OF_GRPO = "".join(
    ["defaults:\n- grpo_schema\n", *(f"- {g}: {o}\n" for g, o in TRAIN_GRPO.choices.items()), "- _self_\n"]
)  # a file that changes nothing
# what is tried -> (file of conf/, its text, words, what is said)
CONF: dict[str, tuple[str, str, list[str], str]] = {
    "a plugin": ("grpo.yaml", "plugin: [./evil.py]\n", [], "plugin stands in conf/, and a file"),
    "a plugin that a variable names": ("grpo.yaml", "plugin: ['${oc.env:EVIL}']\n", [], NO_CODE),
    "plugins that a variable names": ("grpo.yaml", "plugin: ${oc.decode:'[./evil.py]'}\n", [], ""),
    "a reward without ending": (
        "env/rows.yaml",
        "defaults: [dataset_schema, _self_]\npath: me/rows\nreward: [evil:f]\n",
        ["env=rows"],
        NO_CODE,
    ),
    "a reward elsewhere": ("env/rows.yaml", "defaults: [/evil, _self_]\n", ["env=rows"], "conf/"),
    "servers of MCP": (
        "grpo.yaml",
        "tools: {use: [mcp], mcp_file: servers.json}\n",
        ["env.max_turns=2"],
        NO_PROGRAM,
    ),
    "tools that a variable names": (
        "grpo.yaml",
        "tools: ${oc.create:'{use: [mcp], mcp_file: servers.json}'}\n",
        ["env.max_turns=2"],
        "",
    ),
    "a game of a module": (
        "env/game.yaml",
        "defaults: [text_game_schema, _self_]\nid: evil:Env-v0\n",
        ["env=game"],
        NO_CODE,
    ),
    "a reward of a source": (
        "env/both.yaml",
        "defaults: [mix_schema, _self_]\nsources: ['dataset path=me/rows reward=evil:f']\n",
        ["env=both"],
        NO_CODE,
    ),
    "a package of verifiers": (
        "env/theirs.yaml",
        "defaults: [verifiers_schema, _self_]\nid: evil\n",
        ["env=theirs"],
        "env.id stands in conf/, and a file cannot name code",
    ),
    "a class of an environment": (
        "env/theirs.yaml",
        "defaults: [factory_schema, _self_]\npath: me/rows\nfactory: evil.py:C\n",
        ["env=theirs"],
        NO_CODE,
    ),
    "sources in a reference": (
        "env/both.yaml",
        "defaults: [mix_schema, _self_]\nsources: ${oc.decode:'[\"dataset reward=evil:f\"]'}\n",
        ["env=both"],
        NO_CODE,
    ),
    "a target": ("env/rows.yaml", "defaults: [dataset_schema, _self_]\n_target_: evil.f\n", ["env=rows"], "_target_"),
    "a package to search": ("grpo.yaml", "hydra: {searchpath: ['pkg://evil']}\n", [], ""),
    "a callback of Hydra": (
        "grpo.yaml",
        "hydra: {callbacks: {evil: {_target_: evil.Callback}}}\n",
        [],
        NO_CODE,
    ),
    "a plugin from a group's file": (
        "env/rows.yaml",
        "# @package _global_\ndefaults: [dataset_schema@env, _self_]\nplugin: [./evil.py]\n",
        ["env=rows"],
        NO_CODE,
    ),
    "an object of YAML": ("env/rows.yaml", "a: !!python/object/apply:os.system [touch ran]\n", ["env=rows"], ""),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code under every name that is tried; running any of it leaves the file `ran`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EVIL", "./evil.py")
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text(RUN)
    for name in ("evil.py", "EVIL.PY", "evil.pyc", "evil.so", "link.py"):
        (tmp_path / name).write_text(RUN)
    (tmp_path / "link").symlink_to("evil.py")
    (tmp_path / "servers.json").write_text('{"mcpServers": {"evil": {"command": "touch", "args": ["ran"]}}')
    return tmp_path


def refused(words: list[str]) -> str:
    """What is said of words that lead to code."""
    with pytest.raises(RlpostError) as caught:
        compose(TRAIN_GRPO, words)
    assert "\n" not in str(caught.value)
    assert not Path("ran").exists()
    assert "evil" not in sys.modules
    return str(caught.value)


@pytest.mark.parametrize("way", RECIPES)
def test_a_recipe_makes_nothing_run(way: str) -> None:
    lines, said = RECIPES[way]
    Path("r.yaml").write_text(lines if lines.startswith("command:") else f"command: train grpo\n{lines}\n")
    assert said in refused(["recipe=r.yaml"])


@pytest.mark.parametrize("way", CONF)
def test_a_file_of_conf_makes_nothing_run(way: str) -> None:
    name, text, words, said = CONF[way]
    file = Path("conf", name)
    file.parent.mkdir(parents=True)
    file.write_text(OF_GRPO + text if name == "grpo.yaml" else text)
    assert said in refused(words)


# what is tried -> a line of overrides.txt; what is said is the word to give again
KEPT = {
    "a plugin": (r'plugin=["./evil.\u0070y"]', "plugin=./evil.py"),
    "a plugin without ending": ("plugin=evil", "plugin=evil"),
    "a reward": (r'env.reward=["./evil.\u0070y:f"]', "env.reward=./evil.py:f"),
    "an accuracy": (r'env.accuracy="evil\u003af"', "env.accuracy=evil:f"),
    "servers of MCP": ("tools.mcp_file=servers.json", "tools.mcp_file=servers.json"),
    "programs outside the sandbox": ("tools.python_sandbox=limits", "tools.python_sandbox=limits"),
    "a game of a module": ("env.id=evil:Env-v0", "env.id=evil:Env-v0"),
    "a class of an environment": ("env.factory=evil.py:C", "env.factory=evil.py:C"),
    "an interpreter": (r'env.python="./\u0065vil"', "env.python=./evil"),
    "a cluster": ("cluster.address=evil.org:6379", "cluster.address=evil.org:6379"),
}


def run_folder(line: str) -> Path:
    """A run that was asked `line`, as far as going on with it looks."""
    run = Path("runs", "theirs")
    checkpoint = run / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (run / "command.txt").write_text("rlpost train grpo\n")
    (run / "overrides.txt").write_text(f"model=tiny\n{line}\n")
    (run / "environment.json").write_text("{}")
    (run / "config.yaml").write_text("steps: 3\n")
    return run


@pytest.mark.parametrize("way", KEPT)
def test_a_run_folder_makes_nothing_run_where_it_goes_on(way: str) -> None:
    line, again = KEPT[way]
    with pytest.raises(ConfigError) as caught:
        kept_settings(TRAIN_GRPO, run_folder(line), "latest", ["steps=9"])
    assert str(caught.value).endswith(f"for safety that is not taken from the run folder: add {again}")
    kept = kept_settings(TRAIN_GRPO, Path("runs/theirs"), "latest", [again])
    assert kept is not None
    assert [override.key for override in kept] == ["model"]  # the user's word alone counts, not the folder's


def test_code_in_a_source_is_given_again_where_a_run_goes_on() -> None:
    word = 'env.sources=["dataset path=rows.jsonl reward=evil:f","arithmetic"]'
    with pytest.raises(ConfigError, match=r"add 'env.sources=.*reward=evil:f"):
        kept_settings(TRAIN_GRPO, run_folder(word), "latest", ["steps=9"])
    assert kept_settings(TRAIN_GRPO, Path("runs/theirs"), "latest", [word]) is not None
    assert not is_code(Override("env.sources", '["dataset path=rows.jsonl reward=exact","arithmetic"]'), {"env": "mix"})


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ("verifiers", "env.id=reverse-text"),
        ("verifiers", "env.python=/opt/verifiers/bin/python"),
        ("factory", "env.factory=counter.py:Counter"),
        ("text_game", "env.id=module:Game-v0"),
        ("mix", "env.sources=verifiers id=reverse-text"),
        ("mix", 'env.sources=["arithmetic","factory path=rows.jsonl factory=a:B"]'),
        ("theirs", "env.id=reverse-text"),
    ],
)
def test_the_environments_code_is_given_again_where_a_run_goes_on(env: str, word: str) -> None:
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/theirs.yaml").write_text("defaults: [verifiers_schema, _self_]\n")
    with pytest.raises(ConfigError, match=r"for safety that is not taken from the run folder: add"):
        kept_settings(TRAIN_GRPO, run_folder(f"env={env}\n{word}"), "latest", ["steps=9"])
    assert code_of([f"env={env}", word]) == [word]
    kept = kept_settings(TRAIN_GRPO, Path("runs/theirs"), "latest", [word])
    assert kept is not None
    assert [override.key for override in kept] == ["model", "env"]


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ("textarena", "env.id=GuessTheNumber-v0"),
        ("textarena", "env.id=a:b"),
        ("text_game", "env.id=FrozenLake-v1"),
        ("mix", "env.sources=[textarena id=GuessTheNumber-v0,text_game id=FrozenLake-v1]"),
        ("theirs", "env.id=GuessTheNumber-v0"),
    ],
)
def test_a_games_name_is_no_code_and_is_kept_where_a_run_goes_on(env: str, word: str) -> None:
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/theirs.yaml").write_text("defaults: [textarena_schema, _self_]\n")
    kept = kept_settings(TRAIN_GRPO, run_folder(f"env={env}\n{word}"), "latest", ["steps=9"])
    assert kept is not None
    assert [override.key for override in kept] == ["model", "env", word.partition("=")[0]]
    assert code_of([f"env={env}", word]) == []


def test_a_key_counts_as_code_while_the_environment_is_unknown() -> None:
    word = Override("env.id", "reverse-text")
    assert is_code(word, {})
    assert is_code(word, {"env": "of-a-plugin-that-is-not-loaded"})
    assert not is_code(word, {"env": "textarena"})


def test_a_written_recipe_leaves_out_the_id_that_is_code_and_keeps_that_of_a_game() -> None:
    needed, code = write_starter(Path("v.yaml"), TRAIN_GRPO, ["env=verifiers", "env.id=reverse-text"])
    assert (needed, code) == ([], ["env.id=reverse-text"])
    assert "\nenv.id:" not in Path("v.yaml").read_text()
    needed, code = write_starter(Path("t.yaml"), TRAIN_GRPO, ["env=textarena", "env.id=GuessTheNumber-v0"])
    assert (needed, code) == ([], [])
    assert "\nenv.id: GuessTheNumber-v0 " in Path("t.yaml").read_text()
    compose(TRAIN_GRPO, ["recipe=t.yaml"])


def test_a_recipe_may_ask_for_a_cluster_that_the_command_line_names() -> None:
    for address in ("auto", "local"):
        Path("r.yaml").write_text(f"command: train grpo\nmodel: tiny\ncluster: ray\ncluster.address: {address}\n")
        assert compose(TRAIN_GRPO, ["recipe=r.yaml"]).choices["cluster"] == "ray"
    assert compose(TRAIN_GRPO, ["recipe=r.yaml", "cluster.address=10.0.0.7:6379"]).as_dict()["cluster"]["address"] == (
        "10.0.0.7:6379"
    )


def test_whoever_composes_what_a_run_folder_kept_runs_none_of_it() -> None:
    with pytest.raises(ConfigError, match=r"overrides.txt, line 2: a file cannot name code to run"):
        compose(TRAIN_GRPO, [], [Override("plugin", r'["./evil.\u0070y"]', "overrides.txt, line 2")])
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "line", [r'plugin=["./evil.\u0070y"]', "recipe=r.yaml", 'env.reward=["./evil.py:f"]', "plugin=evil.py"]
)
def test_comparing_with_a_run_runs_nothing_of_it(line: str) -> None:
    Path("r.yaml").write_text("command: train grpo\nplugin: ./evil.py\n")
    run_folder(line)
    assert difference("runs/theirs", "runs/theirs")["settings"] == {}
    assert not Path("ran").exists()


def test_a_runs_configuration_is_read_as_plain_values() -> None:
    (run_folder("steps=3") / "config.yaml").write_text("steps: !!python/object/apply:os.system [touch ran]\n")
    with pytest.raises(DataError, match=r"config.yaml holds no settings that can be read"):
        difference("runs/theirs", "runs/theirs")
    assert not Path("ran").exists()


def test_looking_at_a_recipe_runs_nothing_of_it() -> None:
    Path("r.yaml").write_text(r"""command: train grpo
plugin: '["./evil.\u0070y"]'
""")
    for look in (lambda: difference("r.yaml", "steps=3"), lambda: provenance(TRAIN_GRPO, ["recipe=r.yaml"])):
        with pytest.raises(ConfigError, match=r"r.yaml, line 2: a file cannot name code to run"):
            look()
    assert not Path("ran").exists()


def test_what_a_sweep_recorded_decides_no_word_of_its_jobs() -> None:
    folder = Path("runs", "lrs")
    folder.mkdir(parents=True)
    job = {"name": "seed-0", "overrides": ["plugin=./evil.py"], "exit_code": None, "seconds": 0, "result": None}
    record = {"command": "train grpo plugin=./evil.py", "typed": ["plugin=./evil.py"], "jobs": [job]}
    (folder / "sweep.json").write_text(json.dumps(record))
    options = SweepOptions(out=folder, resume="auto", dry_run=True)
    planned = plan(TRAIN_GRPO, ["model=tiny", "policy=scripted", "seed=0,1"], [], options)
    assert [job_command(planned, job)[-6:-3] for job in planned.jobs] == [
        ["model=tiny", "policy=scripted", f"seed={seed}"] for seed in (0, 1)
    ]
    assert [job.overrides for job in planned.jobs] == [
        ["model=tiny", "policy=scripted", f"seed={seed}"] for seed in (0, 1)
    ]
    assert not Path("ran").exists()


def test_a_persons_own_words_may_name_code_and_programs() -> None:
    Path("mine.py").write_text("import rlpost\nrlpost.register_reward('kind', lambda completions: [1.0])\n")
    own = ["plugin=mine.py", "env=dataset", "env.path=me/rows", "env.reward=[kind,exact]", "env.max_turns=2"]
    words = [*own, "tools.use=[mcp,python]", "tools.mcp_file=servers.json", "tools.python_sandbox=limits"]
    settings = compose(TRAIN_GRPO, words).settings
    assert (settings.plugin, settings.tools.mcp_file) == (["mine.py"], "servers.json")
    assert settings.tools.python_sandbox is PythonSandbox.limits
    again = compose(TRAIN_GRPO, ["plugin=mine.py", "env=text_game", "env.id=evil:Env-v0", "env.max_turns=2"]).settings
    assert isinstance(again.env, TextGameSettings)
    assert again.env.id == "evil:Env-v0"


def test_a_password_is_not_taken_as_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    word = "tracking.uri=https://me:s3cret@mlflow.example"
    for words in ([word], ["--dry-run", word]):
        assert run(["train", "grpo", "model=tiny", "tracking=mlflow", *words]) == 2
        shown = capsys.readouterr().err
        assert "tracking.uri=https://me:***@mlflow.example is refused" in shown
        assert "MLFLOW_TRACKING_PASSWORD" in shown
        assert "s3cret" not in shown
    assert not Path("runs").exists()


def test_a_file_of_conf_copies_nothing_out_of_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf/env").mkdir(parents=True)
    text = 'defaults: [arithmetic_schema, _self_]\nprompt_template: "${ oc.env:SECRET } {question}"\n'
    Path("conf/env/mine.yaml").write_text(text)
    monkeypatch.setenv("SECRET", "s3cret")
    with pytest.raises(ConfigError, match=r"env\.prompt_template stands in conf/ and calls \$\{oc\.env:\.\.\.\}"):
        compose(TRAIN_GRPO, ["env=mine"])

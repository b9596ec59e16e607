"""Ways to make a file that may be anybody's run code: each is refused in one line, and nothing is run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.cli.main import run
from rlpost.cli.sweep import SweepOptions, job_command, plan
from rlpost.config.code import is_code
from rlpost.config.compose import compose
from rlpost.config.explain import write_starter
from rlpost.config.overrides import Override
from rlpost.errors import ConfigError, RlpostError
from rlpost.runs.kept import kept_settings
from rlpost.runs.reader import code_of
from rlpost.settings.env import PythonSandbox, TextGameSettings
from tests.run_folders import add_checkpoint, make_run
from tests.says import Says

pytestmark = pytest.mark.thorough

RUN = "open('ran', 'w')\n"
GAME = "env: text_game\nenv.max_turns: 3\n"
TOOL = "env.max_turns: 3\ntools.use: [{}]\n"
ROWS = "env: dataset\nenv.path: me/rows\n"
MIX = 'env: mix\nenv.sources: ["{}"]'
THEIRS = "env: factory\nenv.path: me/rows\n"

# what is tried -> the lines of a recipe after its command
RECIPES = {
    "a reward of a source": MIX.format("dataset path=me/rows reward=./evil.py:f"),
    "a reward of a source in quotes": MIX.format("dataset path=me/rows 'reward=[exact,./evil.py:f]'"),
    "an accuracy of a source": MIX.format("dataset path=me/rows reward=exact accuracy=evil:f"),
    "a game of a source": MIX.format("text_game id=evil:Env-v0"),
    "a game of a source in escapes of JSON": "env: mix\nenv.sources: ['text_game ''id=\"evil\\u003aEnv-v0\"''']",
    "a plugin as a source's setting": MIX.format("arithmetic plugin=./evil.py"),
    "another environment as a source's setting": MIX.format("arithmetic env.reward=evil:f"),
    "a reference in a source": MIX.format("arithmetic digits=${oc.env:EVIL}"),
    "a plugin": "plugin: ./evil.py",
    "a plugin in one text of JSON": r"""plugin: '"./evil.\u0070y"'""",
    "a plugin in quotes within quotes": "plugin: \"'./evil.py'\"",
    "a plugin in a list of a list": "plugin: [[./evil.py]]",
    "a plugin in capitals": "plugin: ./EVIL.PY",
    "a plugin compiled": "plugin: ./evil.pyc",
    "a plugin in C": "plugin: ./evil.so",
    "a plugin without ending": "plugin: ./evil",
    "a plugin by its module's name": "plugin: evil",
    "a plugin behind a link": "plugin: link",
    "a plugin by an anchor": "run.name: &a ./evil.py\nplugin: [*a]",
    "a plugin by an alias": f"{ROWS}env.reward: exact\nenv.system_prompt: &a ./evil.py\nplugin: *a",
    "a plugin by a merge key": "<<: {plugin: ./evil.py}",
    "a plugin that a variable names": "plugin: ${oc.env:EVIL}",
    "a plugin that a disguised variable names": r"""plugin: '["\u0024{oc.env:EVIL}"]'""",
    "a plugin with Hydra's sign": "+plugin: ./evil.py",
    "a plugin in Hydra's package": "plugin@_global_: ./evil.py",
    "a reward": f"{ROWS}env.reward: ./evil.py:f",
    "a reward in escapes of JSON": ROWS + r"""env.reward: '["exact", "./evil.\u0070y:f"]'""",
    "a reward without ending": f"{ROWS}env.reward: [exact, './evil:f']",
    "a reward by its module's name": f"{ROWS}env.reward: 'evil:f'",
    "a reward in capitals": f"{ROWS}env.reward: ./EVIL.PY:f",
    "a reward that a disguised variable names": ROWS + r"""env.reward: '["\u0024{oc.env:EVIL}"]'""",
    "an accuracy in escapes of JSON": ROWS + "env.reward: exact\n" + r"""env.accuracy: '"./evil.\u0070y:f"'""",
    "an accuracy without ending": f"{ROWS}env.reward: exact\nenv.accuracy: evil:f",
    "a game of a module": f"{GAME}env.id: evil:Env-v0",
    "a game of a module in escapes": GAME + r'env.id: "evil\u003aEnv-v0"',
    "a package of verifiers": "env: verifiers\nenv.id: evil",
    "a package of verifiers that a variable names": "env: verifiers\nenv.id: ${oc.env:EVIL}",
    "a package of verifiers as a source": MIX.format("verifiers id=evil"),
    "the interpreter of an environment": "env: verifiers\nenv.python: ./evil",
    "the interpreter of a source": MIX.format("verifiers python=./evil"),
    "a class of an environment": f"{THEIRS}env.factory: evil.py:C",
    "a class of an environment in escapes": THEIRS + r"""env.factory: '"./evil.\u0070y:C"'""",
    "a class of a source": MIX.format("factory path=me/rows factory=evil:C"),
    "servers of MCP": TOOL.format("mcp") + "tools.mcp_file: servers.json",
    "servers of MCP in escapes": TOOL.format("mcp") + r"""tools.mcp_file: '"servers.\u006ason"'""",
    "the model's programs outside the sandbox": TOOL.format("python") + "tools.python_sandbox: limits",
    "a cluster": "cluster: ray\ncluster.address: evil.org:6379",
    "an object of YAML": "plugin: !!python/object/apply:builtins.open [ran, w]",
    "a new object of YAML": "steps: !!python/object/new:os.system [touch ran]",
    "a module of YAML": "steps: !!python/module:evil",
    "a name of YAML": "steps: !!python/name:evil.f",
    "a target": "_target_: evil.f",
    "a target in a group": "env._target_: evil.f",
    "a target nested": "env: {_target_: evil.f}",
    "a callback of Hydra": "hydra.callbacks.evil._target_: evil.f",
    "a launcher of Hydra": "hydra/launcher: evil",
    "a package to search": "hydra.searchpath: ['pkg://evil']",
    "a list of defaults": "defaults: [../evil]",
    "an option that is a path": "env: ../../evil",
    "a command with more behind it": "command: train grpo; touch ran\n",
    "a prompt that reaches into objects": "env.prompt_template: '{question.__class__.__init__.__globals__}'",
}

OF_GRPO = "".join(
    ["defaults:\n- grpo_schema\n", *(f"- {g}: {o}\n" for g, o in TRAIN_GRPO.choices.items()), "- _self_\n"]
)  # a file that changes nothing
# what is tried -> file of conf/, and its text: behind `OF_GRPO` for grpo.yaml
CONF = {
    "a plugin": ("grpo.yaml", "plugin: [./evil.py]\n"),
    "a plugin that a variable names": ("grpo.yaml", "plugin: ['${oc.env:EVIL}']\n"),
    "plugins that a variable names": ("grpo.yaml", "plugin: ${oc.decode:'[./evil.py]'}\n"),
    "a reward": ("env/rows.yaml", "defaults: [dataset_schema, _self_]\npath: me/rows\nreward: ['./evil.py:f']\n"),
    "a reward without ending": (
        "env/rows.yaml",
        "defaults: [dataset_schema, _self_]\npath: me/rows\nreward: [evil:f]\n",
    ),
    "a reward elsewhere": ("env/rows.yaml", "defaults: [/evil, _self_]\n"),
    "servers of MCP": ("grpo.yaml", "tools: {use: [mcp], mcp_file: servers.json}\n"),
    "tools that a variable names": ("grpo.yaml", """tools: "${oc.create:'{use: [mcp], mcp_file: servers.json}'}"\n"""),
    "a game of a module": ("env/game.yaml", "defaults: [text_game_schema, _self_]\nid: evil:Env-v0\n"),
    "a reward of a source": (
        "env/both.yaml",
        "defaults: [mix_schema, _self_]\nsources: ['dataset path=me/rows reward=evil:f']\n",
    ),
    "a package of verifiers": ("env/theirs.yaml", "defaults: [verifiers_schema, _self_]\nid: evil\n"),
    "a class of an environment": (
        "env/theirs.yaml",
        "defaults: [factory_schema, _self_]\npath: me/rows\nfactory: evil.py:C\n",
    ),
    "sources in a reference": (
        "env/both.yaml",
        "defaults: [mix_schema, _self_]\nsources: ${oc.decode:'[\"dataset reward=evil:f\"]'}\n",
    ),
    "a target": ("env/rows.yaml", "defaults: [dataset_schema, _self_]\n_target_: evil.f\n"),
    "a package to search": ("grpo.yaml", "hydra: {searchpath: ['pkg://evil']}\n"),
    "a callback of Hydra": ("grpo.yaml", "hydra: {callbacks: {evil: {_target_: evil.Callback}}}\n"),
    "a plugin from a group's file": (
        "env/rows.yaml",
        "# @package _global_\ndefaults: [dataset_schema@env, _self_]\nplugin: [./evil.py]\n",
    ),
    "an object of YAML": ("env/rows.yaml", "a: !!python/object/apply:os.system [touch ran]\n"),
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


def runs_nothing(word: str) -> None:
    """Compose a training of GRPO, and show that none of the code here was run."""
    try:
        compose(TRAIN_GRPO, [word])
    finally:
        assert not Path("ran").exists()
        assert "evil" not in sys.modules


@pytest.mark.parametrize("way", RECIPES)
def test_a_recipe_makes_nothing_run(way: str, says: Says) -> None:
    lines = RECIPES[way]
    Path("r.yaml").write_text(lines if lines.startswith("command:") else f"command: train grpo\n{lines}\n")
    says.refusals("config", RlpostError, runs_nothing, ["recipe=r.yaml"])


@pytest.mark.parametrize("way", CONF)
def test_a_file_of_conf_makes_nothing_run(way: str, says: Says) -> None:
    file, text = Path("conf", CONF[way][0]), CONF[way][1]
    file.parent.mkdir(parents=True)
    file.write_text(OF_GRPO + text if file.name == "grpo.yaml" else text)
    word = "env.max_turns=2" if file.name == "grpo.yaml" else f"env={file.stem}"
    says.refusals("config", RlpostError, runs_nothing, [word])


# what is tried -> lines of overrides.txt; the last one is to be given again
KEPT = {
    "a plugin": r'plugin=["./evil.\u0070y"]',
    "a plugin without ending": "plugin=evil",
    "a reward": r'env.reward=["./evil.\u0070y:f"]',
    "an accuracy": r'env.accuracy="evil\u003af"',
    "servers of MCP": "tools.mcp_file=servers.json",
    "programs outside the sandbox": "tools.python_sandbox=limits",
    "a game of a module": "env.id=evil:Env-v0",
    "a game of a module of text_game": "env=text_game\nenv.id=module:Game-v0",
    "a class of an environment": "env.factory=evil.py:C",
    "a class of a factory": "env=factory\nenv.factory=counter.py:Counter",
    "an interpreter": r'env.python="./\u0065vil"',
    "an interpreter of verifiers": "env=verifiers\nenv.python=/opt/verifiers/bin/python",
    "a package of verifiers": "env=verifiers\nenv.id=reverse-text",
    "a package of verifiers in a file of conf": "env=theirs\nenv.id=reverse-text",
    "a package of a source": "env=mix\nenv.sources=verifiers id=reverse-text",
    "a class of a source": 'env=mix\nenv.sources=["arithmetic","factory path=rows.jsonl factory=a:B"]',
    "a reward of a source": 'env.sources=["dataset path=rows.jsonl reward=evil:f","arithmetic"]',
    "a cluster": "cluster.address=evil.org:6379",
}
# what is given again for lines with escapes
AGAIN = {
    "a plugin": "plugin=./evil.py",
    "a reward": "env.reward=./evil.py:f",
    "an accuracy": "env.accuracy=evil:f",
    "an interpreter": "env.python=./evil",
}


def run_folder(lines: str) -> Path:
    """A run that was asked `lines`, as far as going on with it looks."""
    run = make_run(Path("runs", "theirs"), overrides=["model=tiny", *lines.splitlines()])
    add_checkpoint(run, 1)
    return run


def conf_of(schema: str) -> None:
    """An environment `theirs` in conf/, with the keys of another."""
    Path("conf/env").mkdir(parents=True)
    Path("conf/env/theirs.yaml").write_text(f"defaults: [{schema}_schema, _self_]\n")


def kept_keys(*words: str) -> list[str]:
    """The keys that the run goes on with, given `words`."""
    kept = kept_settings(TRAIN_GRPO, Path("runs/theirs"), "latest", list(words))
    assert kept is not None
    return [override.key for override in kept]


@pytest.mark.parametrize("way", KEPT)
def test_a_run_folder_makes_nothing_run_where_it_goes_on(way: str) -> None:
    conf_of("verifiers")
    lines = KEPT[way].splitlines()
    again = AGAIN.get(way, lines[-1])
    run_folder(KEPT[way])
    with pytest.raises(ConfigError) as refused:
        kept_keys("steps=9")
    assert str(refused.value).endswith(f": add {shlex.quote(again)}")
    assert code_of(lines) == [again]
    assert kept_keys(again) == ["model", *["env"] * (len(lines) - 1)]  # the user's word counts, not the folder's


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
    conf_of("textarena")
    run_folder(f"env={env}\n{word}")
    assert kept_keys("steps=9") == ["model", "env", word.partition("=")[0]]
    assert code_of([f"env={env}", word]) == []


def test_a_key_counts_as_code_while_the_environment_is_unknown() -> None:
    word = Override("env.id", "reverse-text")
    plain = Override("env.sources", '["dataset path=rows.jsonl reward=exact","arithmetic"]')
    assert is_code(word, {"env": "of-a-plugin-that-is-not-loaded"})
    assert not is_code(word, {"env": "textarena"})
    assert not is_code(plain, {"env": "mix"})


def test_a_written_recipe_leaves_out_code_and_keeps_a_games_name() -> None:
    needed, code = write_starter(Path("v.yaml"), TRAIN_GRPO, ["env=verifiers", "env.id=reverse-text"])
    assert (needed, code) == ([], ["env.id=reverse-text"])
    assert "\nenv.id:" not in Path("v.yaml").read_text()
    needed, code = write_starter(Path("t.yaml"), TRAIN_GRPO, ["env=textarena", "env.id=GuessTheNumber-v0"])
    assert (needed, code) == ([], [])
    assert "\nenv.id: GuessTheNumber-v0 " in Path("t.yaml").read_text()
    compose(TRAIN_GRPO, ["recipe=t.yaml"])


def test_a_recipe_may_ask_for_a_cluster_that_is_named_here() -> None:
    for address in ("auto", "local"):
        Path("r.yaml").write_text(f"command: train grpo\nmodel: tiny\ncluster: ray\ncluster.address: {address}\n")
        assert compose(TRAIN_GRPO, ["recipe=r.yaml"]).choices["cluster"] == "ray"
    assert compose(TRAIN_GRPO, ["recipe=r.yaml", "cluster.address=10.0.0.7:6379"]).as_dict()["cluster"]["address"] == (
        "10.0.0.7:6379"
    )


def test_whoever_composes_what_a_run_folder_kept_runs_none_of_it() -> None:
    with pytest.raises(ConfigError, match=r"overrides.txt, line 2: "):
        compose(TRAIN_GRPO, [], [Override("plugin", r'["./evil.\u0070y"]', "overrides.txt, line 2")])
    assert not Path("ran").exists()


def test_what_a_sweep_recorded_decides_no_word_of_its_jobs() -> None:
    folder = Path("runs", "lrs")
    folder.mkdir(parents=True)
    job = {"name": "seed-0", "overrides": ["plugin=./evil.py"], "exit_code": None, "seconds": 0, "result": None}
    record = {"command": "train grpo plugin=./evil.py", "typed": ["plugin=./evil.py"], "jobs": [job]}
    (folder / "sweep.json").write_text(json.dumps(record))
    options = SweepOptions(out=folder, resume="auto", dry_run=True)
    planned = plan(TRAIN_GRPO, ["model=tiny", "policy=scripted", "seed=0,1"], [], options)
    words = [["model=tiny", "policy=scripted", f"seed={seed}"] for seed in (0, 1)]
    assert [job_command(planned, job)[-6:-3] for job in planned.jobs] == words
    assert [job.overrides for job in planned.jobs] == words
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
        assert "tracking.uri=https://me:***@mlflow.example" in shown
        assert "MLFLOW_TRACKING_PASSWORD" in shown
        assert "s3cret" not in shown
    assert not Path("runs").exists()


def test_a_file_of_conf_copies_nothing_out_of_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf/env").mkdir(parents=True)
    text = 'defaults: [arithmetic_schema, _self_]\nprompt_template: "${ oc.env:SECRET } {question}"\n'
    Path("conf/env/mine.yaml").write_text(text)
    monkeypatch.setenv("SECRET", "s3cret")
    with pytest.raises(ConfigError, match=r"env\.prompt_template .*\$\{"):
        compose(TRAIN_GRPO, ["env=mine"])

"""Every setting that a command line can give is read by a component while it works."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from rlpost.catalog import (
    COMMANDS,
    EVAL,
    TRAIN_DISTILL,
    TRAIN_DPO,
    TRAIN_EXPERT_ITERATION,
    TRAIN_GRPO,
    TRAIN_SFT,
    Command,
)
from rlpost.config.compose import compose
from rlpost.config.schema import all_keys, options
from rlpost.envs.build import build_env
from rlpost.errors import ConfigError, DataError
from rlpost.estimate.machine import chosen_policy
from rlpost.estimate.needs import work_of
from rlpost.estimate.shape import Shape
from rlpost.imports import is_installed
from rlpost.model import trainable
from rlpost.model.locate import locate_model
from rlpost.model.sharding import ShardingPlan
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.policies import vllm, vllm_engine
from rlpost.policies.build import build_policy
from rlpost.policies.drawing import training_sampling
from rlpost.settings.commands import RunRequest
from rlpost.settings.env import EnvSettings, TextGameSettings
from rlpost.settings.foreign import FactorySettings, OpenEnvSettings, TextArenaSettings
from rlpost.tracking import trackers
from rlpost.train import assemble, demonstrated, distill, expert_iteration, run, several_ranks
from rlpost.train.process_group import Place
from rlpost.train.progress import Progress
from rlpost.train.rules import rules_of
from tests.envs import verifiers_stubs
from tests.envs.test_factory import COUNTER
from tests.envs.test_reasoning_core import PACKAGE as REASONING_CORE
from tests.envs.test_verifiers import SUMS
from tests.envs.textarena_stub import TEXTARENA
from tests.openenv_server import open_env_server
from tests.settings_read import Read, fields_of, reads_noted, settings_classes
from tests.trainings import train_in

pytestmark = pytest.mark.thorough

ROWS = [{"question": f"What is {i} + 1?", "answer": f"So it is\n#### {i + 1}"} for i in range(20)]
INSTRUCTED = {"ifeval": "punctuation:no_comma", "ifbench": "format:no_whitespace"}
MADE = (["env=countdown"], ["env=reasoning_gym", "env.task=leg_counting"])
GAMES = (TextGameSettings, TextArenaSettings, OpenEnvSettings, FactorySettings)
EXTRAS = ("peft", "bitsandbytes", "math_verify", "if_verifiable", "nltk", "reasoning_gym", "gymnasium", "websockets")
SMALL = [
    "model=tiny",
    "model.autocast=none",
    "steps=1",
    "env.max_completion_tokens=4",
    "env.eval_limit=2",
    "eval.every=1",
]
SAMPLED = ["prompts_per_step=2", "group_size=2", "passes=2", "optim.warmup_steps=1"]
TUNING = ["minibatch_size=2", "env.limit=4"]
MORE = {  # the other commands have TUNING
    TRAIN_GRPO: [*SAMPLED, "loss.kl_coef=0.1"],
    TRAIN_EXPERT_ITERATION: [*SAMPLED, "topk_size=1", "min_reward=0.0"],
    TRAIN_DISTILL: SAMPLED,
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[Read]]]:
    """Command -> what is read while every kind of component it can choose is made and used once."""
    if missing := [package for package in EXTRAS if not is_installed(package)]:
        pytest.skip(f"some keys are read with these packages alone: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("read")
    with pytest.MonkeyPatch.context() as patch, open_env_server() as server:
        yield reads_in(folder, foreign_words(folder, patch, server.url))
        sys.modules.pop("textarena", None)  # the real one may be installed


def reads_in(folder: Path, foreign: Sequence[list[str]]) -> dict[str, set[Read]]:
    """Make and use everything in `folder`, also the environments of other people with these words."""
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    reward = folder / "score.py"
    reward.write_text("def score(completions, **columns):\n    return [float(len(c) > 3) for c in completions]\n")
    gsm8k = ["env=gsm8k", f"env.path={folder}"]
    dataset = ["env=dataset", f"env.path={folder}", f"env.reward={reward}:score", "env.accuracy=number"]
    instructed = [[f"env={name}", f"env.path={instructed_rows(folder, name)}"] for name in INSTRUCTED]
    instructed += [[*words, "env.max_prompt_tokens=1000"] for words in MADE]
    instructed.append(["env=math", f"env.path={folder}", "env.verify_seconds=60"])
    game = ["env=text_game", "env.id=FrozenLake-v1", "env.max_turns=2", "env.max_observation_tokens=200"]
    instructed.append(["env=mix", "env.sources=[arithmetic,countdown]"])
    rows, games = foreign[:2], foreign[2:]  # that have single right replies, and that have not
    instructed += rows
    played = [game, *games]
    classes = settings_classes()
    with reads_noted(classes) as of_both:  # the parts that every command assembles in the same way
        choose_auto()
        start_vllm(locate_model("builtin:tiny"))
        choose_tools(folder)
        for name in options("tracking"):
            make_tracker(folder, name)
    with reads_noted(classes) as of_training:
        once(TRAIN_GRPO, folder / "transformers", "policy=transformers")
        once(TRAIN_GRPO, folder / "adapter", "policy=scripted", "lora.enabled=true", "optim=adamw_8bit")
        once(TRAIN_GRPO, folder / "gsm8k", "policy=scripted", *gsm8k)
        once(TRAIN_GRPO, folder / "dataset", "policy=scripted", *dataset, "difficulty.enabled=true")
        for words in instructed:
            once(TRAIN_GRPO, folder / words[0], "policy=scripted", *words)
        for words in played:
            once(TRAIN_GRPO, folder / f"played-{words[0]}", "policy=scripted", *words)
        for name in options("loss", TRAIN_GRPO):
            make_loss(name)
        assemble_beside(TRAIN_GRPO, assemble.assemble_grpo)
        plan_ranks(folder, TRAIN_GRPO)
    with reads_noted(classes) as of_evaluation:
        evaluate_once("policy=transformers", "sampling.temperature=0.5")
        evaluate_once("policy=scripted", *gsm8k)
        evaluate_once("policy=scripted", *dataset)
        read_once(*dataset, "env.reward=[]", "env.completion_column=answer")
        for words in instructed:
            evaluate_once("policy=scripted", *words)
        for words in played:
            evaluate_once("policy=scripted", *words)
    with reads_noted(classes) as of_tuning:
        once(TRAIN_SFT, folder / "sft", "eval.accuracy=true", "eval.limit=2", "policy=transformers")
        once(TRAIN_SFT, folder / "sft-adapter", "steps=null", "epochs=1", "lora.enabled=true", "optim=adamw_8bit")
        once(TRAIN_SFT, folder / "sft-minor", "loss=minor_sft", "eval.accuracy=true", "policy=scripted", *gsm8k)
        once(
            TRAIN_SFT,
            folder / "sft-rows",
            "eval.accuracy=true",
            "policy=scripted",
            *dataset,
            "env.completion_column=answer",
        )
        for words in instructed:
            once(TRAIN_SFT, folder / f"sft-{words[0]}", "eval.accuracy=true", "policy=scripted", *words)
        for words in played:
            with pytest.raises((ConfigError, DataError)):
                once(TRAIN_SFT, folder / f"sft-{words[0]}", "eval.accuracy=true", "policy=scripted", *words)
        plan_ranks(folder, TRAIN_SFT)
    with reads_noted(classes) as of_pairs:
        pairs = [f"env.path={rows_of_pairs(folder)}", f"env.reward={reward}:score", "env.accuracy=number"]
        once(TRAIN_DPO, folder / "dpo", *pairs, "eval.accuracy=true", "policy=transformers", "loss.label_smoothing=0.1")
        once(
            TRAIN_DPO, folder / "dpo-adapter", *pairs, "steps=null", "epochs=1", "lora.enabled=true", "optim=adamw_8bit"
        )
        for name in options("loss", TRAIN_DPO):
            once(TRAIN_DPO, folder / name, *pairs, f"loss={name}", "eval.accuracy=true", "policy=scripted")
        plan_ranks(folder, TRAIN_DPO)
    with reads_noted(classes) as of_iteration:
        once(TRAIN_EXPERT_ITERATION, folder / "iteration", "policy=transformers")
        once(
            TRAIN_EXPERT_ITERATION,
            folder / "iteration-adapter",
            "policy=scripted",
            "lora.enabled=true",
            "optim=adamw_8bit",
        )
        once(TRAIN_EXPERT_ITERATION, folder / "iteration-minor", "policy=scripted", "loss=minor_sft", *gsm8k)
        once(TRAIN_EXPERT_ITERATION, folder / "iteration-rows", "policy=scripted", *dataset)
        assemble_beside(TRAIN_EXPERT_ITERATION, expert_iteration.assemble)
        plan_ranks(folder, TRAIN_EXPERT_ITERATION)
    with reads_noted(classes) as of_distillation:
        once(TRAIN_DISTILL, folder / "distill", "policy=transformers", "hint=It is {answer}.")
        teacher = "teacher=builtin:tiny"
        once(
            TRAIN_DISTILL,
            folder / "distill-adapter",
            "policy=scripted",
            "lora.enabled=true",
            "optim=adamw_8bit",
            teacher,
        )
        once(TRAIN_DISTILL, folder / "distill-sampled", "policy=scripted", "loss=opd", *gsm8k, teacher)
        once(TRAIN_DISTILL, folder / "distill-rows", "policy=scripted", *dataset, teacher)
        assemble_beside(TRAIN_DISTILL, distill.assemble)
        plan_ranks(folder, TRAIN_DISTILL)
    # every loop that samples has its environment and conversations from `assemble_sampling`
    of_sampling = of_both | {(cls, name) for cls, name in of_training if issubclass(cls, EnvSettings)}
    return {
        TRAIN_GRPO.name: of_training | of_both,
        TRAIN_DISTILL.name: of_distillation | of_sampling,
        TRAIN_EXPERT_ITERATION.name: of_iteration | of_sampling,
        TRAIN_SFT.name: of_tuning | of_both,
        TRAIN_DPO.name: of_pairs | of_both,
        EVAL.name: of_evaluation | of_both,
    }


def foreign_words(folder: Path, patch: pytest.MonkeyPatch, server: str) -> list[list[str]]:
    """Words for the environments of other people, with stand-ins for their packages."""
    packages = verifiers_stubs.v1(folder / "packages")
    (packages / "sums.py").write_text(SUMS)
    (packages / "reasoning_core.py").write_text(REASONING_CORE)
    (packages / "textarena.py").write_text(TEXTARENA)
    patch.syspath_prepend(str(packages))
    patch.setenv("PYTHONPATH", str(packages))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "counter.py").write_text(COUNTER)
    goals = folder / "goals.jsonl"
    goals.write_text("".join(json.dumps({"prompt": f"Count to {n}.", "goal": n}) + "\n" for n in range(20)))
    turns = ["env.max_turns=2", "env.max_observation_tokens=200"]
    own = [f"env.factory={folder}/counter.py:Counter", f"env.reward={folder}/score.py:score"]
    core = [
        "env=reasoning_core",
        "env.task=sums",
        "env.num_problems=20",
        "env.max_prompt_tokens=1000",
        "env.held_out=0.5",
    ]
    return [
        ["env=verifiers", "env.id=sums", f"env.python={sys.executable}", "env.args={count: 12}", "env.held_out=0.5"],
        core,
        ["env=openenv", f"env.url={server}", *turns],
        ["env=textarena", "env.id=Dice-v0", *turns],
        ["env=factory", *own, f"env.path={goals}", "env.held_out=0.5", *turns],
    ]


def instructed_rows(folder: Path, name: str) -> Path:
    """A file of prompts with one instruction that IFEval or IFBench checks."""
    file = folder / f"{name}.jsonl"
    row = {"instruction_id_list": [INSTRUCTED[name]], "kwargs": [{}], "completion": "Yes."}
    file.write_text("".join(json.dumps({"prompt": f"Say {number}.", **row}) + "\n" for number in range(60)))
    return file


def once(command: Command[Any], folder: Path, *words: str) -> None:
    """Train as the command does, one step or epoch."""
    assert train_in(command, folder, [*SMALL, *MORE.get(command, TUNING), *words]) == 0


def plan_ranks(folder: Path, command: Command[Any]) -> None:
    """What several ranks make of their settings, without the processes."""
    for name in options("cluster", command):
        words = ["cluster.trainer_ranks=2", "cluster.sharding=full", "cluster.cpu_offload=true"]
        more = {TRAIN_DPO: ["env.path=some/rows"], TRAIN_DISTILL: ["loss=opd", "teacher=builtin:tiny"]}.get(command, [])
        settings = compose(command, ["model=tiny", f"cluster={name}", *words, *more]).settings
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.is_initialized", lambda: True)
            patch.setattr("torch.distributed.get_world_size", lambda: 2)
            assert trainable.sharding_plan(settings.cluster, settings.model) == ShardingPlan(offload=True)
        work = work_of(settings, Shape(1000, 10, 2, 4, 20, 50, {}, 2, 10, 20), gpu_bytes=None)
        assert work.ranks == 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlpost.remote.process.WorkerProcess.start", no_ranks)
            with pytest.raises(NoRanksError):
                several_ranks.join_ranks(settings, None, folder)
        several_ranks._meet(Place(0, 1, 0, 1, "127.0.0.1", 0), [], folder, settings.cluster)


class NoRanksError(Exception):
    """No processes are started here."""


def no_ranks(*arguments: Any) -> None:
    raise NoRanksError


def assemble_beside(command: Command[Any], make: Callable[[Any], Any]) -> None:
    """The parts of collector=async, without the process that would sample."""
    small = [*SMALL, *MORE[command], *(["teacher=builtin:tiny"] if command is TRAIN_DISTILL else [])]
    parts = make(compose(command, [*small, "collector=async", "policy=scripted"]).settings)
    assert parts.collector.max_policy_lag == 1
    assert parts.policy.players.new_worker(0).environment == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlpost.remote.cluster.connect", lambda address, own_gpus: NoCluster())
        parts = make(compose(command, [*small, "cluster=ray", "policy=vllm"]).settings)
        parts.policy.players.new_worker(0)
        parts.policy.players.close()


class NoCluster:
    """What a training asks of the module ray before anything is started."""

    gcs_address = "127.0.0.1:1"

    def get_runtime_context(self) -> NoCluster:
        return self

    def cluster_resources(self) -> dict[str, float]:
        return {}


def rows_of_pairs(folder: Path) -> Path:
    """A file of pairs with answers."""
    file = folder / "pairs.jsonl"
    rows = [{"prompt": f"What is {i}?", "chosen": f"{i}", "rejected": "No.", "answer": f"{i}"} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_once(*words: str) -> None:
    settings = compose(EVAL, ["model=tiny", "env.limit=2", *words]).settings
    found = demonstrated.evaluate_demonstrations(settings, lambda *_: None, lambda _: None, lambda _: None)
    assert found.result.num_prompts == 2


def evaluate_once(*words: str) -> None:
    settings = compose(EVAL, ["model=tiny", "env.limit=2", "env.max_completion_tokens=4", *words]).settings
    assert assemble.evaluate_command(settings).result.num_prompts == 2


def choose_auto() -> None:
    settings = compose(TRAIN_GRPO, ["policy=auto", "policy.max_num_seqs=3"]).settings.policy
    assert getattr(chosen_policy(settings), "max_num_seqs", None) == 3


def start_vllm(folder: Path) -> None:
    """vLLM's wrapper up to the engine, which is a stand-in: in this process on a GPU, in its own on a CPU."""

    class Engine:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            self.arguments = arguments, more

        def close(self) -> None:
            """Nothing was started."""

        def rest(self, **asked: bool) -> None:
            """Nothing is held."""

    own_class = SimpleNamespace(using_transformers_backend=lambda: False)

    def arguments_of(**words: Any) -> SimpleNamespace:
        return SimpleNamespace(create_model_config=lambda: own_class)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, EngineArgs=arguments_of))
        patch.setattr(vllm_engine, "InProcessEngine", Engine)
        patch.setattr(vllm_engine, "OwnProcessEngine", Engine)
        patch.setattr(vllm, "require_vllm", lambda: None)
        patch.setattr(vllm, "bfloat16_is_fast", lambda device: (True, ""))  # there may be no CUDA to ask
        patch.setattr(vllm, "checkpoint_names", lambda folder: set())
        for engine, on_gpu in (("in_process", True), ("own_process", False)):
            patch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
            patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 * 10**9))
            settings = compose(TRAIN_GRPO, ["model=tiny", "policy=vllm", f"policy.engine={engine}"]).settings
            policy = build_policy(
                settings.policy,
                folder,
                None,
                model=None,
                model_settings=settings.model,
                env_settings=settings.env,
                sampling=training_sampling(settings.sampling, settings.env),
                seed=settings.seed,
            )
            policy.start()
            policy.close()


def choose_tools(folder: Path) -> None:
    """Every tool chosen and made, none started."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"one": {"command": "true"}}}))
    words = ["tools.use=[python,mcp,browser]", f"tools.mcp_file={folder}/servers.json", "env.max_turns=2"]
    settings = compose(TRAIN_GRPO, [*words, "tools.allowed_domains=[localhost]"]).settings
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=0, tools=settings.tools)
    assert env.tools is not None
    assert len(env.tools.transforms) == 3
    env.close()


def make_loss(name: str) -> None:
    """A policy loss that reads its coefficients as it is made, and the rules that read the others."""
    loss = compose(TRAIN_GRPO, [f"loss={name}", "loss.kl_coef=0.1", "loss.ref_sync_every=1"]).settings.loss
    objective = PolicyObjective(loss, temperature=1.0, max_completion_tokens=1)
    parts: Any = SimpleNamespace(objective=objective, env=SimpleNamespace(weighed=None))
    rules_of(loss, False, parts, Progress(), 1)


def make_tracker(folder: Path, name: str) -> None:
    """A tracker that starts, without its package."""
    settings = compose(TRAIN_GRPO, [f"tracking={name}"]).settings.tracking
    packages = ("wandb", "trackio", "trackio.sqlite_storage", "mlflow", "mlflow.entities", "mlflow.tracking")
    with pytest.MonkeyPatch.context() as patch:
        for package in packages:
            patch.setitem(sys.modules, package, MagicMock())
        patch.setattr(trackers, "require", lambda *packages: None)
        patch.setattr("os.environ", dict(os.environ))
        if tracking := run.build_tracking(settings, RunRequest(folder, None, [], [], "steps: 1\n")):
            tracking.tracker.start(folder, {}, None, 0)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_key_of_a_command_is_read_by_a_component(command: Command[Any], read: dict[str, set[Read]]) -> None:
    fields = fields_of(command)
    assert set(fields) <= set(all_keys(command))
    unread = [
        f"{name} ({cls.__name__})"
        for name, holders in fields.items()
        for cls in holders
        if (cls, name.rpartition(".")[2]) not in read[command.name]
        and name != "plugin"  # read before there are settings: it says which there can be
        and name != "report.enabled"  # read by the command, once the training has ended
        and not (command is TRAIN_SFT and cls in GAMES)  # refused before most of it is read
    ]
    assert unread == [], f"nothing reads these when rlpost {command.verb} runs"

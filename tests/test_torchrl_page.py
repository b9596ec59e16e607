"""docs/torchrl.md: each name of its first table is imported and used, each test of its second exists."""

from __future__ import annotations

import importlib.util
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

PAGE = Path(__file__).parents[1] / "docs" / "torchrl.md"
NAME = re.compile(r"^\| `([\w.]+)` \| `(rlpost[\w.]+)` \|", re.MULTILINE)
BEHAVIOUR = re.compile(r"^\| (\d+) \| (.*?) \| (.*) \|$", re.MULTILINE)

# the names in the reference's own pages: its overview, LLMCollector, and what their examples use
OVERVIEW = """
    LLMCollector vLLMUpdater WeightUpdaterBase ReplayBuffer History ContentBase LLMData TopKRewardSelector EnvBase
    ChatEnv DatasetChatEnv GSM8KEnv make_gsm8k_env GSM8KPrepareQuestion GSM8KRewardParser IFEvalEnv IfEvalScorer
    IFEvalScoreData LLMEnv LLMHashingEnv make_mlgym MLGymWrapper Transform DataLoadingPrimer TemplateTransform Tokenizer
    as_nested_tensor as_padded_tensor PolicyVersion KLRewardTransform RetrieveLogProb PythonInterpreter MCPToolTransform
    BrowserTransform TransformersWrapper vLLMWrapper CategoricalSequential LLMOnDevice make_vllm_worker vLLMWorker
    stateless_init_process_group GRPOLoss GRPOLossOutput MCAdvantage SFTLoss SFTLossOutput DistillationLoss
    DistillationLossOutput DummyStrDataLoader
"""
METHODS = """
    as_remote async_shutdown dialog_turns_per_batch get_policy_model get_policy_version init_updater is_initialized
    iterator load_state_dict pause policy_version policy_version_tracker reset rollout set_seed shutdown start
    state_dict update_policy_weights_ weight_updater
"""
USED: dict[str, Callable[..., None]] = {}


def uses(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as the one that uses these names of the page."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            assert USED.setdefault(name, test) is test, f"{name} is used twice"
        return test

    return mark


def listed() -> dict[str, str]:
    """The names of the page and their import paths."""
    return dict(NAME.findall(PAGE.read_text()))


def test_the_page_lists_every_name_of_the_reference() -> None:
    wanted = {*OVERVIEW.split(), *(f"LLMCollector.{name}" for name in METHODS.split())}
    assert wanted <= listed().keys()


def test_every_name_of_the_page_is_used_below() -> None:
    assert USED.keys() == listed().keys()


@pytest.mark.parametrize(("name", "path"), listed().items(), ids=list(listed()))
def test_every_name_can_be_imported_from_where_the_page_says(name: str, path: str) -> None:
    parts = path.split(".")
    place = next(i for i in range(len(parts), 0, -1) if _is_module(".".join(parts[:i])))
    found = importlib.import_module(".".join(parts[:place]))
    for part in parts[place:]:
        found = getattr(found, part)
    assert name.rpartition(".")[2] in (getattr(found, "__name__", ""), *vars(type(found)), *parts) or "." in name


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


# Environments, and collectors that play them


class Forever:
    """Says always the same, as a policy that is a plain function of a TensorDict."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("text_response", NonTensorStack(*["4"] * tensordict.batch_size[0]))


ROWS = [{"question": "What is 2 + 2?", "answer": "#### 4"}, {"question": "What is 3 + 3?", "answer": "#### 6"}]


def collector(tokenizer: Any, **options: Any) -> Any:
    from rlpost.collectors import LLMCollector
    from rlpost.envs import GSM8KEnv
    from rlpost.policies import ScriptedPolicy
    from rlpost.settings import SamplingSettings
    from rlpost.weight_sync.base import SharedWeights

    policy = ScriptedPolicy(["<think></think><answer>4</answer>"], tokenizer, sampling=SamplingSettings())
    made = {"dialog_turns_per_batch": 2, "weight_updater": SharedWeights(policy), "track_policy_version": True}
    return LLMCollector(GSM8KEnv(ROWS, shuffle=False, num_envs=2), policy=policy, **made | options)


@uses(
    "EnvBase", "EnvBase.reset", "EnvBase.step", "EnvBase.step_and_maybe_reset", "EnvBase.rollout", "EnvBase.set_seed",
    "EnvBase.append_transform", "EnvBase.batch_size", "ChatEnv", "Transform",
)  # fmt: skip
def test_an_environment_is_reset_stepped_and_transformed() -> None:
    from rlpost.envs import ChatEnv, EnvBase
    from rlpost.envs.transforms import Transform

    class Stamp(Transform):
        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("stamp", torch.ones(tensordict.batch_size))

    env = ChatEnv(batch_size=(2,), system_prompt="Be brief.").append_transform(Stamp())
    assert isinstance(env, EnvBase)
    env.set_seed(0)
    asked = env.reset(TensorDict({"text": NonTensorStack("One?", "Two?")}, batch_size=[2]))
    assert [c[-1]["content"] for c in asked["history"].to_chats()] == ["One?", "Two?"]
    assert asked["stamp"].tolist() == [1.0, 1.0]
    stepped = env.step(Forever()(asked))
    assert [c[-1]["content"] for c in stepped["next", "history"].to_chats()] == ["4", "4"]
    _, following = env.step_and_maybe_reset(Forever()(asked))
    assert env.batch_size == following.batch_size == (2,)
    played = env.rollout(3, Forever(), tensordict=TensorDict({"text": NonTensorStack("1?", "2?")}, batch_size=[2]))
    assert played.batch_size == (2, 3)


@uses("DatasetChatEnv", "DatasetChatEnv.reset_dataloader")
def test_a_dataset_begins_again() -> None:
    from rlpost.envs import DatasetChatEnv

    env = DatasetChatEnv(ROWS, shuffle=False)
    first = [env.reset()["query"][0] for _ in range(2)]
    env.reset_dataloader()
    assert env.reset()["query"][0] == first[0] != first[1]


@uses("GSM8KEnv", "make_gsm8k_env", "GSM8KPrepareQuestion", "GSM8KRewardParser")
def test_gsm8k_scores_the_reply() -> None:
    from rlpost.envs import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env

    whole = GSM8KEnv(ROWS, shuffle=False)
    assert whole.step(Forever()(whole.reset()))["next", "reward"].item() == 0.0  # no answer tag in the reply
    made = make_gsm8k_env(ROWS)
    assert [type(t) for t in made.transforms] == [GSM8KPrepareQuestion, GSM8KRewardParser]
    reply = TensorDict({"text_response": ["<answer>4</answer>"], "answer": ["#### 4"]}, batch_size=[1])
    assert GSM8KRewardParser()(reply)["reward"].item() == 1.0


@uses(
    "LLMCollector", "LLMCollector.dialog_turns_per_batch", "LLMCollector.iterator", "LLMCollector.rollout",
    "LLMCollector.reset", "LLMCollector.set_seed", "LLMCollector.state_dict", "LLMCollector.load_state_dict",
    "LLMCollector.is_initialized",
)  # fmt: skip
def test_a_collector_delivers_and_goes_on_where_it_was(tiny_tokenizer: Any) -> None:
    collecting = collector(tiny_tokenizer, total_dialog_turns=6)
    assert (collecting.dialog_turns_per_batch, collecting.is_initialized()) == (2, True)
    collecting.set_seed(3)
    first = collecting.rollout()
    state = collecting.state_dict()
    following = next(collecting.iterator())
    assert (first.numel(), following.numel()) == (2, 2)
    again = collector(tiny_tokenizer)
    again.load_state_dict(state)
    again.reset()
    assert list(again.rollout()["query"]) == list(following["query"])


@uses(
    "LLMCollector.policy_version", "LLMCollector.get_policy_version", "LLMCollector.policy_version_tracker",
    "LLMCollector.update_policy_weights_", "LLMCollector.weight_updater", "LLMCollector.init_updater",
    "WeightUpdaterBase", "PolicyVersion",
)  # fmt: skip
def test_versions_rise_with_pushes(tiny_tokenizer: Any) -> None:
    from rlpost.collectors import WeightUpdaterBase
    from rlpost.envs.transforms import PolicyVersion

    collecting = collector(tiny_tokenizer)
    assert isinstance(collecting.weight_updater, WeightUpdaterBase)
    assert isinstance(collecting.policy_version_tracker, PolicyVersion)
    collecting.init_updater(collecting.policy)
    collecting.update_policy_weights_(torch.nn.Linear(1, 1))
    tracked = collecting.policy_version_tracker.version
    assert tracked == collecting.policy_version == collecting.get_policy_version() == 1
    assert collecting.rollout()["policy_version"].flatten().tolist() == [1, 1]
    assert uuid.UUID(str(PolicyVersion("uuid").version))


@uses(
    "LLMCollector.start", "LLMCollector.pause", "LLMCollector.shutdown", "LLMCollector.async_shutdown", "ReplayBuffer"
)
def test_a_collector_fills_a_buffer_beside(tiny_tokenizer: Any) -> None:
    from rlpost.data import ReplayBuffer

    buffer = ReplayBuffer()
    collecting = collector(tiny_tokenizer, replay_buffer=buffer, total_dialog_turns=4)
    collecting.start()
    with collecting.pause():
        pass
    deadline = time.monotonic() + 60
    while not len(buffer) and time.monotonic() < deadline:  # the first batch may not have begun
        time.sleep(0.01)
    collecting.async_shutdown(timeout=60)
    collecting.shutdown(timeout=60)
    assert len(buffer.take(1)) > 0


@uses(
    "Collector", "Collector.next", "Collector.set_seed", "Collector.state_dict", "Collector.update_policy_weights_",
    "SyncDataCollector", "RandomPolicy", "ReplayBuffer.sample", "LazyTensorStorage", "MultiStep", "split_trajectories",
    "GymEnv", "ParallelEnv", "ExplorationType",
)  # fmt: skip
def test_frames_of_gymnasium_are_collected_stored_and_split() -> None:
    pytest.importorskip("gymnasium")
    from rlpost.collectors import Collector, RandomPolicy, SyncDataCollector
    from rlpost.data import FrameBuffer, LazyTensorStorage, MultiStep, split_trajectories
    from rlpost.envs import ExplorationType, GymEnv, ParallelEnv

    make = lambda: GymEnv("Pendulum-v1")  # noqa: E731
    policy = RandomPolicy(make().action_spec)
    buffer = FrameBuffer(storage=LazyTensorStorage(10))
    collecting = SyncDataCollector(ParallelEnv(2, make), policy, frames_per_batch=4, replay_buffer=buffer)
    collecting.set_seed(0)
    assert collecting.next() is None
    assert buffer.sample(3).batch_size == (3,)
    apart = Collector(ParallelEnv(2, make), policy, frames_per_batch=4, postproc=MultiStep(0.9, 2))
    batch = apart.next()
    assert batch is not None
    assert split_trajectories(batch).batch_size[0] == len(batch["collector", "traj_ids"].unique())
    linear = torch.nn.Linear(3, 1)
    trained = Collector(make, linear, frames_per_batch=2, exploration_type=ExplorationType.MODE)
    trained.update_policy_weights_(linear)
    assert trained.state_dict()["policy_state_dict"].keys() == {"module.weight", "module.bias"}


@uses(
    "AsyncCollector", "AsyncCollector.next", "AsyncCollector.shutdown", "AsyncCollector.set_seed",
    "AsyncCollector.state_dict", "AsyncCollector.load_state_dict", "AsyncCollector.update_policy_weights_",
    "aSyncDataCollector",
)  # fmt: skip
def test_a_process_of_its_own_fills_a_buffer() -> None:
    pytest.importorskip("gymnasium")
    from rlpost.collectors import AsyncCollector, aSyncDataCollector
    from rlpost.data import FrameBuffer, LazyTensorStorage
    from rlpost.envs import GymEnv

    rb = FrameBuffer(storage=LazyTensorStorage(1000))
    policy = torch.nn.Linear(3, 1)
    assert aSyncDataCollector is AsyncCollector
    collecting = AsyncCollector(
        lambda: GymEnv("Pendulum-v1"), policy, replay_buffer=rb, frames_per_batch=50, total_frames=-1
    )
    assert collecting.set_seed(1) == 2
    state = collecting.state_dict()
    assert collecting.next() is None
    first = rb.sample(1).clone()
    assert torch.allclose(policy(first["observation"]), first["action"], atol=1e-6)
    collecting.update_policy_weights_(torch.nn.Linear(3, 1))
    collecting.load_state_dict(state)
    collecting.start()
    while rb.write_count < 1000:
        collecting.collect()
    collecting.async_shutdown()
    collecting.shutdown()
    assert len(rb) == 1000


@uses("LLMEnv", "LLMEnv.from_dataloader", "LLMEnv.reset_dataloader", "DummyStrDataLoader")
def test_plain_prompts_come_from_a_dataloader(tiny_tokenizer: Any) -> None:
    from rlpost.envs import LLMEnv
    from rlpost.testing import DummyStrDataLoader

    env = LLMEnv.from_dataloader(
        dataloader=DummyStrDataLoader(1), tokenizer=tiny_tokenizer, from_text=True, batch_size=1, group_repeats=True
    )
    first, second = (env.reset()["query"][0] for _ in range(2))
    env.reset_dataloader()
    assert env.reset()["query"][0] == first != second


@uses("LLMHashingEnv")
def test_equal_sequences_have_equal_hashes() -> None:
    from rlpost.envs import LLMHashingEnv

    env = LLMHashingEnv(vocab_size=10)
    assert env.hash_of([1, 2, 3]) == LLMHashingEnv(vocab_size=10).hash_of([1, 2, 3]) != env.hash_of([3, 2, 1])


@uses("IFEvalEnv", "IfEvalScorer", "IFEvalScoreData")
def test_instructions_are_checked() -> None:
    pytest.importorskip("if_verifiable")
    from rlpost.envs import IFEvalEnv, IFEvalScoreData, IfEvalScorer

    row = {"key": 1, "prompt": "Write without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    env = IFEvalEnv([row])
    assert env.step(Forever()(env.reset()))["next", "accuracy_strict"].item() == 1.0
    scorer = IfEvalScorer()
    data = IFEvalScoreData.of_reply(scorer.judge(row, "<answer>no, no</answer>"))
    assert data.prompt_level_strict_acc.item() == 0.0


# Data structures


@uses(
    "History", "History.from_chats", "History.append", "History.extend", "History.apply_chat_template",
    "History.from_text", "add_chat_template",
)  # fmt: skip
def test_a_history_is_written_and_read_back(tiny_tokenizer: Any) -> None:
    from rlpost.data import History, add_chat_template

    asked = History.from_chats([[{"role": "user", "content": "One?"}]])
    answer = History.from_chats([[{"role": "assistant", "content": "Two."}]])
    both = asked.extend(answer)
    assert both.to_chats() == asked.append(answer[:, 0]).to_chats()
    [text] = both.apply_chat_template(tiny_tokenizer, add_generation_prompt=False)
    assert History.from_text(text, chat_template_name="chatml").to_chats() == both[0].to_chats()
    with pytest.raises(ValueError, match="generation"):
        add_chat_template("page", "{{ messages }}")


@uses("ContentBase", "LLMData")
def test_contents_and_flat_names() -> None:
    from rlpost.data import ContentBase, LLMData

    assert ContentBase(type="text", text="Hi").to_part() == {"type": "text", "text": "Hi"}
    assert LLMData(text=["a"], batch_size=[1]).text_response is None


@uses("TopKRewardSelector", "MCAdvantage")
def test_groups_are_chosen_and_compared(batch: Callable[..., TensorDict]) -> None:
    from rlpost.data import ReplayBuffer, TopKRewardSelector
    from rlpost.objectives import MCAdvantage

    group = batch(groups=1, size=2)
    group["next", "reward"] = torch.tensor([[1.0], [0.0]])
    buffer = ReplayBuffer(transforms=[MCAdvantage(2)])
    buffer.extend(group)
    advantage = buffer.take(1)["advantage"].tolist()  # (B,) for rewards (B, 1)
    assert advantage == pytest.approx([0.70711, -0.70711], abs=1e-5)
    chosen = ReplayBuffer(transforms=[TopKRewardSelector(2, 1)])
    chosen.extend(group)
    assert chosen.take(1)["next", "reward"].tolist() == [[1.0]]


# Transforms


@uses("DataLoadingPrimer", "as_nested_tensor", "as_padded_tensor")
def test_elements_become_batches() -> None:
    from rlpost.envs.transforms import DataLoadingPrimer, as_nested_tensor, as_padded_tensor

    elements = [{"ids": torch.tensor([1])}, {"ids": torch.tensor([2, 3])}]
    assert [row.tolist() for row in as_nested_tensor(elements)["ids"].unbind()] == [[1], [2, 3]]
    assert as_padded_tensor(elements)["ids"].tolist() == [[0, 1], [2, 3]]
    primed = DataLoadingPrimer([{"x": 1.0}], repeats=2)(TensorDict({}, batch_size=[2]))
    assert primed["x"].tolist() == [1.0, 1.0]


@uses("TemplateTransform", "Tokenizer")
def test_messages_become_text_and_ids(tiny_tokenizer: Any) -> None:
    from rlpost.envs import ChatEnv
    from rlpost.envs.transforms import TemplateTransform, Tokenizer

    env = ChatEnv().append_transform(TemplateTransform(tiny_tokenizer)).append_transform(Tokenizer(tiny_tokenizer))
    shown = env.reset(TensorDict({"text": NonTensorStack("Hi?")}, batch_size=[1]))
    assert shown["text", "prompt"][0] == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(shown["tokens", "prompt"][0]) == shown["text", "prompt"][0]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    from rlpost.model.load import load_model
    from rlpost.settings import DType, ModelSettings

    return load_model(tiny_folder, ModelSettings(path=str(tiny_folder), dtype=DType.float32))


@uses(
    "TransformersWrapper", "CategoricalSequential", "KLRewardTransform", "RetrieveLogProb", "GRPOLoss",
    "GRPOLossOutput", "LLMCollector.get_policy_model",
)  # fmt: skip
def test_a_sampled_batch_is_compared_and_trained_on(model: Any, tiny_tokenizer: Any) -> None:
    from rlpost.collectors import LLMCollector
    from rlpost.envs import ArithmeticEnv
    from rlpost.envs.transforms import KLRewardTransform, RetrieveLogProb
    from rlpost.objectives import GRPOLoss, GRPOLossOutput
    from rlpost.policies import CategoricalSequential, TransformersWrapper

    policy = TransformersWrapper(model, tiny_tokenizer)
    assert isinstance(policy, CategoricalSequential)
    env = ArithmeticEnv(num_envs=2, max_completion_tokens=4)
    collecting = LLMCollector(env, policy=policy, yield_only_last_steps=True)
    assert collecting.get_policy_model() is model
    batch = RetrieveLogProb(model)(collecting.rollout())
    sampled, own = batch["log_probs", "full"], batch["next", "ref_log_probs", "full"]
    assert torch.allclose(sampled.values(), own.values(), atol=1e-5)
    penalised = KLRewardTransform(model)(batch)
    assert penalised["next", "kl_penalty"].values().abs().max() < 1e-5  # the model against itself
    assert policy.log_prob(batch).shape[0] == 2
    output = GRPOLoss(model)(batch.set("advantage", torch.tensor([1.0, -1.0])))
    assert isinstance(output, GRPOLossOutput)
    assert torch.isfinite(output.loss)


@uses("SFTLoss", "SFTLossOutput")
def test_a_conversation_is_fine_tuned_on(model: Any, tiny_tokenizer: Any) -> None:
    from rlpost.data import History
    from rlpost.objectives import SFTLoss, SFTLossOutput

    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    output = SFTLoss(model, tiny_tokenizer)(TensorDict({"history": {"full": History.from_chats([chat])}}, [1]))
    assert isinstance(output, SFTLossOutput)
    assert output.loss_sft.item() > 0


@uses("DistillationLoss", "DistillationLossOutput")
def test_a_student_learns_from_the_log_probs_of_a_teacher(model: Any, tiny_tokenizer: Any) -> None:
    from rlpost.data import History
    from rlpost.data.ragged import ragged
    from rlpost.objectives import DistillationLoss, DistillationLossOutput

    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    teacher = {"teacher_log_probs": {"full": ragged([torch.full((28,), -9.0)])}}
    batch = TensorDict({"history": {"full": History.from_chats([chat])}, "next": teacher}, [1])
    output = DistillationLoss(model, tiny_tokenizer)(batch)
    assert isinstance(output, DistillationLossOutput)
    assert output.loss_distill.item() > 0


# Tools, and environments of others


@uses("PythonInterpreter", "MCPToolTransform", "BrowserTransform")
def test_tools_are_appended_to_a_chat() -> None:
    pytest.importorskip("mcp")
    pytest.importorskip("playwright")
    from rlpost.envs import ChatEnv
    from rlpost.envs.transforms import BrowserTransform, MCPToolTransform, PythonInterpreter

    env = ChatEnv(max_steps=2).append_transform(PythonInterpreter()).append_transform(BrowserTransform(["localhost"]))
    assert env.tools is not None
    assert [name for tool in env.tools.transforms for name in tool.names()] == ["python", "browser"]
    assert [call.name for call in env.tools.calls_of("```python\nprint(1)\n```")] == ["python"]
    with pytest.raises(ValueError, match="command"):
        MCPToolTransform({"files": {"args": []}})
    env.close()


@uses("MLGymWrapper")
def test_a_game_of_mlgyms_kind_is_a_conversation() -> None:
    from rlpost.envs import MLGymWrapper

    class Game:
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
            return {"observation": "Begin."}, {}

        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return f"You did {action}.", 0.0, True, {}

        def close(self) -> None:
            pass

    [conversation] = MLGymWrapper(Game).draw(1)
    assert "Begin." in conversation.messages[-1]["content"]


# Engines


@uses("LLMCollector.as_remote")
def test_a_collector_in_ray_needs_ray() -> None:
    from rlpost.collectors import LLMCollector
    from rlpost.errors import MissingExtraError
    from rlpost.imports import is_installed

    if is_installed("ray"):
        assert callable(LLMCollector.as_remote({"num_cpus": 1}).remote)
    else:
        with pytest.raises(MissingExtraError, match="ray"):
            LLMCollector.as_remote({"num_cpus": 1})


@uses(
    "Collector.receive_weights", "Collector.register_scheme_receiver", "Collector.cascade_execute",
    "RayWeightSyncScheme",
)  # fmt: skip
def test_a_worker_receives_what_its_receiver_is_offered() -> None:
    pytest.importorskip("gymnasium")
    from rlpost.collectors import Collector, RayWeightSyncScheme
    from rlpost.envs import GymEnv
    from rlpost.model.weights import save_one_by_one
    from rlpost.remote.exchange import exchange_folder

    worker = Collector(lambda: GymEnv("Pendulum-v1"), torch.nn.Linear(3, 1), frames_per_batch=2)
    worker.register_scheme_receiver({"policy": RayWeightSyncScheme()})
    new = torch.nn.Linear(3, 1)
    with exchange_folder() as folder:
        save_one_by_one(new.state_dict().items(), folder)
        worker.cascade_execute("receiver_schemes['policy'].offer", folder, 1)
        worker.receive_weights()
    batch = worker.rollout()
    assert torch.allclose(new(batch["observation"]), batch["action"], atol=1e-6)


@uses(
    "RayCollector",
    "RayCollector.add_collectors",
    "RayCollector.remote_collectors",
    "RayCollector.cascade_execute",
    "RayLLMCollector",
)
def test_collectors_in_actors_are_there() -> None:  # tests/torchrl has them play
    from rlpost.collectors import RayCollector, RayLLMCollector

    assert issubclass(RayLLMCollector, RayCollector)
    assert all(hasattr(RayCollector, name) for name in ("add_collectors", "remote_collectors", "cascade_execute"))


@uses("stateless_init_process_group")
def test_weights_go_over_a_group() -> None:
    from rlpost.policies import stateless_init_process_group
    from rlpost.remote.process import free_port

    alone = stateless_init_process_group("127.0.0.1", free_port("127.0.0.1"), 0, 1, "cpu", timeout_seconds=20)
    weight = torch.ones(2)
    alone.broadcast(weight, src=0)
    assert weight.tolist() == [1.0, 1.0]


@uses("vLLMWrapper", "LLMOnDevice", "make_vllm_worker", "vLLMUpdater")
@pytest.mark.vllm
def test_an_engine_is_started_and_taken(tiny_folder: Path, model: Any, tiny_tokenizer: Any) -> None:
    from rlpost.collectors import vLLMUpdater
    from rlpost.data.conversation import Conversation
    from rlpost.policies import LLMOnDevice, make_vllm_worker, vLLMWrapper
    from rlpost.settings import VLLMSettings

    engine = make_vllm_worker(tiny_folder, settings=VLLMSettings(kv_cache_gb=1), enforce_eager=True, max_model_len=128)
    try:
        assert isinstance(engine, LLMOnDevice)
        policy = vLLMWrapper(engine)
        conversation = Conversation(task={}, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=3)
        policy.reply([conversation])
        assert len(conversation.log_probs) <= 3
        assert vLLMUpdater(policy).push(model) == policy.version == 1
    finally:
        engine.close()


# The second table


def test_all_55_behaviours_are_listed() -> None:
    assert [int(number) for number, _, _ in BEHAVIOUR.findall(PAGE.read_text())] == list(range(1, 56))


def test_every_test_that_the_page_names_is_there_and_each_row_names_one_or_a_reason() -> None:
    for number, _, tests in BEHAVIOUR.findall(PAGE.read_text()):
        named = re.findall(r"`([\w/]*\.?\w*)::(\w+)`", tests)
        assert named or tests.partition(":")[0] == "does not apply", number
        file = ""
        for path, test in named:
            file = path or file
            assert f"\ndef {test}(" in (PAGE.parents[1] / "tests" / file).read_text(), f"{number}: {file}::{test}"


@uses("RayReplayBuffer", "make_mlgym", "vLLMWorker")
def test_names_that_need_ray_mlgym_or_a_gpu_are_there() -> None:  # tests/torchrl and tests/weight_sync use them
    from rlpost.data import RayReplayBuffer
    from rlpost.envs import make_mlgym
    from rlpost.policies import vLLMWorker

    assert all(map(callable, (RayReplayBuffer, make_mlgym, vLLMWorker)))

"""The examples of the seed documents, with changed imports and a small local model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, set_list_to_stack

from tests.bubblewrap import needs_bubblewrap

SYSTEM_PROMPT = "You are an assistant that can execute Python code. Decorate your code with ```python``` tags."


QUESTION = "Let's write a Python function that returns the square of a number."
CALL = """\
Here is a block of code to be executed in python:
```python
def square(x):
    return x * x
print('testing the square function with input 2:', square(2))
```"""
ACTION = f"{CALL}\n<|im_end|>\n"
SAID = f"""\
<|im_start|>system
{SYSTEM_PROMPT}<|im_end|>
<|im_start|>user
{QUESTION}<|im_end|>
<|im_start|>assistant
{CALL}<|im_end|>
<|im_start|>user

Code block 1 executed successfully:
testing the square function with input 2: 4

<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Any]:
    """A vLLM engine in this process, which starts sooner."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        import vllm

        # float32 and eager for any CPU
        llm_model = vllm.LLM(str(tiny_folder), dtype="float32", max_model_len=1024, enforce_eager=True)
    yield llm_model
    llm_model.llm_engine.engine_core.shutdown()
    torch.set_num_threads(threads)


@pytest.mark.vllm
def test_a_collector_of_dialog_turns_with_vllm(engine: Any) -> None:
    from rlpost.collectors import LLMCollector
    from rlpost.envs import LLMEnv
    from rlpost.policies import vLLMWrapper
    from rlpost.testing import DummyStrDataLoader

    llm_model = engine
    tokenizer: Any = llm_model.get_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    policy = vLLMWrapper(llm_model)
    dataloader = DummyStrDataLoader(1)
    env = LLMEnv.from_dataloader(
        dataloader=dataloader,
        tokenizer=tokenizer,
        from_text=True,
        batch_size=1,
        group_repeats=True,
    )
    collector = LLMCollector(
        env=env,
        policy_factory=lambda: policy,
        dialog_turns_per_batch=env.batch_size[0],
        total_dialog_turns=3,
    )
    data: Any = list(islice(collector, 3))[-1]
    printed = str(data)
    assert isinstance(data, LazyStackedTensorDict)
    assert (data.batch_size, data.stack_dim) == (torch.Size([1, 1]), 1)
    for name in ("attention_mask", "collector", "done", "terminated", "text", "text_response", "tokens"):
        assert name in printed
    prompts = list(islice(DummyStrDataLoader(1), 3))
    assert data["text"][0][0] == prompts[2]["text"][0]
    ids, sampled = data["tokens"][0, 0], data["tokens_response"][0, 0]
    prompt = tokenizer(data["text"][0][0])["input_ids"]
    assert ids.tolist() == prompt + sampled.tolist()
    assert data["text_response"][0][0] == tokenizer.decode(sampled, skip_special_tokens=True)
    assert data["attention_mask"].shape == data["tokens"].shape
    assert data["collector", "traj_ids"].tolist() == [[2]]
    assert data["done"].tolist() == [[[False]]]  # as the model read it


@pytest.mark.vllm
def test_the_version_of_the_policy_is_written_in_the_data(engine: Any, tiny_folder: Path) -> None:
    from rlpost.collectors import LLMCollector, vLLMUpdater
    from rlpost.envs import ArithmeticEnv
    from rlpost.model.load import load_model
    from rlpost.policies import vLLMWrapper
    from rlpost.settings import DType, ModelSettings

    def make_env() -> ArithmeticEnv:
        return ArithmeticEnv(num_envs=2, max_completion_tokens=4)

    def make_policy() -> vLLMWrapper:
        policy = vLLMWrapper(engine)
        policy.start()
        return policy

    env = make_env()
    policy = make_policy()
    try:
        collector: Any = LLMCollector(env, policy=policy, weight_updater=vLLMUpdater(), track_policy_version=True)
        collector.weight_updater.init(policy)
        model = load_model(tiny_folder, ModelSettings(path=str(tiny_folder), dtype=DType.float32))
        collector.update_policy_weights_(state_dict=model.state_dict())
        assert collector.policy_version_tracker.version == 1
        for data in islice(collector, 2):
            assert data["policy_version"].flatten().tolist() == [1, 1]
        collector.update_policy_weights_(state_dict=model.state_dict())
        assert collector.policy_version_tracker.version == 2
        assert next(iter(collector))["policy_version"].flatten().tolist() == [2, 2]
    finally:
        policy.close()


@needs_bubblewrap
def test_the_python_interpreter_answers_a_block_of_code(
    tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from pprint import pprint

    from rlpost.envs import ChatEnv
    from rlpost.envs.transforms import PythonInterpreter

    with set_list_to_stack(True):
        base_env = ChatEnv(
            tokenizer=tiny_tokenizer,
            system_prompt=SYSTEM_PROMPT,
            user_role="user",
            system_role="system",
            batch_size=[1],
        )
        env = base_env.append_transform(PythonInterpreter())
        env.set_seed(0)
        reset_data = env.reset(TensorDict(text=QUESTION, batch_size=[1]))
        reply: Any = [ACTION]
        step_data = reset_data.set("text_response", reply)
        assert step_data is reset_data
        _, s_ = env.step_and_maybe_reset(reset_data)
        pprint(s_["history"].apply_chat_template(tokenizer=tiny_tokenizer))
        env.close()
    assert eval(capsys.readouterr().out) == [SAID]


MODES = ("history", "text", "tokens")
# a random model repeats the last token, a line break
GREEDY = {"max_new_tokens": 5, "do_sample": False, "stop": ["\n\n"]}


def shown_as_text(shown: TensorDictBase, mode: str, tokenizer: Any) -> str:
    if mode == "history":
        return shown["history"].apply_chat_template(tokenizer=tokenizer)[0]
    return shown["text", "prompt"][0] if mode == "text" else tokenizer.decode(shown["tokens", "prompt"].unbind()[0])


def check_policy_reads_what_is_shown(policy: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play the example's turn, then two of `policy`, and compare its requests with what it was shown."""
    from rlpost.envs import ChatEnv
    from rlpost.envs.transforms import PythonInterpreter

    tokenizer, generate, read = policy.tokenizer, policy.generate, []

    def recorded(requests: Any, sampling: Any) -> Any:
        read.extend(tokenizer.decode(request.prompt_ids) for request in requests)
        return generate(requests, sampling)

    monkeypatch.setattr(policy, "generate", recorded)
    env = ChatEnv(tokenizer=tokenizer, system_prompt=SYSTEM_PROMPT, batch_size=[1], input_mode=mode)
    env = env.append_transform(PythonInterpreter())
    shown = env.reset(TensorDict(text=QUESTION, batch_size=[1]))
    if mode == "tokens":
        shown["tokens_response"] = torch.tensor(
            [tokenizer(ACTION.replace("\n<|im_end|>\n", "<|im_end|>"))["input_ids"]]
        )
    else:
        shown["text_response"] = [ACTION]
    _, second = env.step_and_maybe_reset(shown)
    texts = [shown_as_text(second, mode, tokenizer)]
    _, third = env.step_and_maybe_reset(policy(second))
    texts.append(shown_as_text(third, mode, tokenizer))
    policy(third)
    env.close()
    assert texts == [SAID, f"{SAID}\n\n<|im_end|>\n<|im_start|>assistant\n"]
    assert read == texts


@needs_bubblewrap
@pytest.mark.parametrize("mode", MODES)
def test_transformers_reads_what_the_example_shows(
    tiny_folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlpost.model.load import load_model
    from rlpost.model.tokenizer import load_tokenizer
    from rlpost.policies import TransformersWrapper
    from rlpost.settings import DType, ModelSettings

    model = load_model(tiny_folder, ModelSettings(path=str(tiny_folder), dtype=DType.float32))
    policy = TransformersWrapper(model, load_tokenizer(tiny_folder), input_mode=mode, generate_kwargs=GREEDY)
    check_policy_reads_what_is_shown(policy, mode, monkeypatch)


@pytest.mark.vllm
@needs_bubblewrap
@pytest.mark.parametrize("mode", MODES)
def test_vllm_reads_what_the_example_shows(engine: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpost.policies import vLLMWrapper

    check_policy_reads_what_is_shown(vLLMWrapper(engine, input_mode=mode, generate_kwargs=GREEDY), mode, monkeypatch)

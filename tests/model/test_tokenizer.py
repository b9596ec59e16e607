"""A folder's tokenizer gives the ids of its own file, wherever it is opened, and one notion ends a turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.data.chat import stop_ids
from rlpost.model.load import save_model
from rlpost.model.locate import locate_model, locate_tokenizer
from rlpost.model.tokenizer import (
    engine_folder,
    load_tokenizer,
    open_tokenizer,
    save_tokenizer,
    tokenizer_facts,
    tokenizer_from_file,
)
from rlpost.policies import Request
from rlpost.policies.transformers import TransformersWrapper
from rlpost.policies.vllm import vLLMWrapper
from rlpost.settings import ModelSettings, SamplingSettings, VLLMSettings
from tests.export.checkpoints import byte_level
from tests.model_families import tiny_model

TEXT = " the cat sat:  what is 17 + 2512?\n\nit's for the mat"


def folder_of(folder: Path, tokenizer: Any, kind: str) -> Path:
    """A random model of family `kind` in `folder`, with `tokenizer`."""
    own: dict[str, Any] = {"vocab_size": 333, "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True}
    tiny_model(kind, **own).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def name_class(folder: Path, name: str = "LlamaTokenizerFast") -> Path:
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    return folder


def as_deepseek_ships_it(folder: Path, kind: str) -> Path:
    """A byte-level tokenizer.json whose tokenizer_config.json names Llama's class, as DeepSeek's do."""
    return name_class(folder_of(folder, byte_level(), kind))


def ids_in(folder: Path) -> list[int]:
    """The ids of TEXT as the file tokenizer.json itself gives them."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids


def ids_by(tokenizer: Any) -> list[int]:
    return tokenizer(TEXT, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_ids_are_those_of_the_file_beside_every_model_type(kind: str, tmp_path: Path) -> None:
    folder = as_deepseek_ships_it(tmp_path / "m", kind)
    expected = ids_in(folder)
    assert ids_by(AutoTokenizer.from_pretrained(folder)) != expected  # or the test shows nothing
    tokenizer = load_tokenizer(folder)
    assert ids_by(tokenizer) == expected
    assert tokenizer.decode(expected) == TEXT
    assert tokenizer.eos_token == "<|im_end|>"
    assert ids_by(AutoTokenizer.from_pretrained(engine_folder(folder))) == expected  # as vLLM opens it
    facts = tokenizer_facts(folder)
    assert (facts.rebuilt, facts.end, facts.problem) == (True, "<|im_end|>", "")


def test_the_file_alone_is_read_where_it_gives_the_same_tokenizer(tmp_path: Path) -> None:
    folder = as_deepseek_ships_it(tmp_path / "m", "llama")
    settings = ModelSettings(path=str(folder))
    quick: Any = tokenizer_from_file(settings)
    opened = load_tokenizer(folder, settings)
    assert quick(TEXT)["input_ids"] == opened(TEXT)["input_ids"]
    assert quick.special_tokens_map == opened.special_tokens_map
    name_class(folder, "RobertaTokenizer")
    assert ids_by(load_tokenizer(folder, settings)) == ids_in(folder)
    assert tokenizer_from_file(settings) is None  # its class puts other ids around a text
    assert tokenizer_from_file(ModelSettings(path="some/model-of-the-hub")) is None


def test_tokenizer_that_transformers_reads_rightly_is_opened_by_it(tmp_path: Path, tiny_folder: Path) -> None:
    assert engine_folder(tiny_folder) == tiny_folder
    assert not tokenizer_facts(tiny_folder).rebuilt
    save_tokenizer(open_tokenizer(tiny_folder), tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows no TokenizersBackend


def test_facts_follow_the_files_and_the_chosen_template(tmp_path: Path, tiny_folder: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    assert tokenizer_facts(folder).problem == ""
    (folder / "chat_template.jinja").unlink()
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    for each in (folder, copied):
        assert f"{each} has no" in tokenizer_facts(each).problem
    assert tokenizer_facts(folder, ModelSettings(path="m", chat_template="chatml")).end == "<|im_end|>"
    assert "special token" in tokenizer_facts(folder, ModelSettings(path="m", chat_template="llama3")).problem


# Where a turn ends


def base_model(folder: Path) -> Path:
    """A base model as Qwen2.5's: ChatML turns, and <|endoftext|> as the eos token in all of its files."""
    source = folder.with_name("source")
    byte_level().save_pretrained(source)
    tokenizer = open_tokenizer(source)
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    return folder_of(folder, tokenizer, "llama")


def answering(folder: Path, answers: dict[int, int]) -> Any:
    """The model in `folder`, which now gives a token's answer behind it, and behind the answer again."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
        model.model.norm.weight.fill_(1.0)
        for place, (token, answer) in enumerate(answers.items()):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.model.embed_tokens.weight[answer, place] = 9.0  # the tied head
    return model


def test_base_models_end_of_turn_ends_its_completions(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    end, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert tokenizer.eos_token_id == eos
    assert stop_ids(tokenizer) == [end, eos]
    policy = TransformersWrapper(answering(folder, {5: end, 6: eos}), tokenizer)
    requests = [Request([6, 5], 9, seed=0), Request([5, 6], 9, seed=0)]
    made = policy.generate(requests, SamplingSettings(temperature=0))
    assert [(each.token_ids, each.finish_reason) for each in made] == [([end], "stop"), ([eos], "stop")]


def test_saved_model_stops_elsewhere_too(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    end, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    save_model(answering(folder, {6: end}), tokenizer, tmp_path / "saved")
    for name in ("generation_config.json", "config.json"):
        assert json.loads((tmp_path / "saved" / name).read_text())["eos_token_id"] == [end, eos]
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.tensor([[5, 6]])
    made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert made[0].tolist() == [5, 6, end]


@pytest.mark.vllm
def test_vllm_stops_at_the_end_of_turn_and_at_strings_with_spaces(tmp_path: Path) -> None:
    folder = name_class(base_model(tmp_path / "m"))
    tokenizer = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    piece = next(token for token in tokenizer.get_vocab() if token.startswith("Ġ") and len(token) > 2)
    token, word = tokenizer.convert_tokens_to_ids(piece), piece[1:]
    answering(folder, {5: token, 6: end}).save_pretrained(folder)
    policy = vLLMWrapper(folder, tokenizer, settings=VLLMSettings(max_num_seqs=8), max_model_len=64)
    policy.start()
    try:
        stopping = SamplingSettings(temperature=0, stop=[f"{word} {word}"])
        made = policy.generate([Request([6, 5], 9, seed=0), Request([5, 6], 9, seed=0)], stopping)
    finally:
        policy.close()
    assert [(each.token_ids, each.finish_reason) for each in made] == [([token, token], "stop"), ([end], "stop")]


# An adapter's own tokenizer


def test_adapter_is_evaluated_with_its_own_tokenizer(tmp_path: Path) -> None:
    import peft

    base = folder_of(tmp_path / "base", byte_level(), "qwen3")
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = open_tokenizer(base)
    tokenizer.add_tokens([f"<new{number}>" for number in range(40)])  # beyond the 333 embeddings of the base
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    config.base_model_name_or_path = str(base)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    tokenizer.save_pretrained(tmp_path / "adapter")
    found = load_tokenizer(locate_tokenizer(str(tmp_path / "adapter")))
    assert found.convert_tokens_to_ids("<new39>") == tokenizer.convert_tokens_to_ids("<new39>") > 333
    assert found.chat_template == tokenizer.chat_template
    merged = locate_model(str(tmp_path / "adapter"))
    assert load_tokenizer(merged).chat_template == tokenizer.chat_template
    ids = torch.tensor([[3, tokenizer.convert_tokens_to_ids("<new39>"), 7]])
    logits = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    torch.testing.assert_close(logits, adapted(input_ids=ids).logits, atol=1e-4, rtol=1e-4)

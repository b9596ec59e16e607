"""The tokenizer of a model's folder: opened with the ids of its own file, and saved so that others read the same ids.

transformers does not take every tokenizer.json as it is. For some class names and model types it builds a tokenizer
anew from the vocabulary in the file, with rules of its own for splitting text. DeepSeek's distilled Llama and Qwen
models are read that way (transformers 5.19): their tokenizer loses every space. So the ids of a probe text are
compared with those of the file, and where they differ the file is read itself. `tokenizer_facts` finds that out once
for each content of the files, with whatever else can be known before a model is loaded.

Nothing heavy is imported with this module: the plan of a command reads the cached facts.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from rlpost.config import paths
from rlpost.config.packaged import PACKAGED
from rlpost.data.chat import end_of_turn
from rlpost.data.template_choice import VARIABLES_KEY, with_choice
from rlpost.errors import ConfigError
from rlpost.estimate.shape import folder_here
from rlpost.files import digest_of, made_once, remembered
from rlpost.imports import installed_version
from rlpost.settings import ModelSettings
from rlpost.settings.model import template_variables
from rlpost.text import first_line

# spaces, digits, line breaks, code, letters with accents and other scripts: where rules for splitting differ
PROBE = (
    " Name a colour.  12 x 345678 = 4,142.5\n\n\tdef f(a_b): return a['x']  # don't\r\n"
    "naïve Größe café Ünder Привет 日本語 ½ x² 🙂 I'll we'VE <b>&amp;</b> "
)
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
NO_TEMPLATE = (
    "the tokenizer of {} has no chat template, so rlpost cannot talk to it: choose the instruct version of the model, "
    "or give a template with model.chat_template=plain, chatml or FILE.jinja"
)
_GENERAL_CLASS = "PreTrainedTokenizerFast"  # what reads tokenizer.json as it is, by its name in every version


def load_tokenizer(folder: Path, settings: ModelSettings | None = None) -> Any:
    """The tokenizer of a local model folder, with the chat template and its variables that `settings` choose.

    Raises ConfigError if it cannot be read or has no chat template.
    """
    return _with_template(open_tokenizer(folder), folder, settings)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, which gives the ids of its tokenizer.json, with or without a chat template.

    Raises ConfigError if it cannot be read or ships code to read it with.
    """
    return _opened(folder)[0]


def _opened(folder: Path) -> tuple[Any, bool]:
    """The tokenizer with the ids of its file, and whether transformers' own choice of a class gives others."""
    for name in ("config.json", _CONFIG):
        if (folder / name).is_file():
            paths.check_ships_no_code(folder, paths.read_json(folder / name))
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not (folder / _FILE).is_file():
            return tokenizer, False
        text, file = probe_of(tokenizer), Tokenizer.from_file(str(folder / _FILE))
        if ids_of(tokenizer, text) == file.encode(text, add_special_tokens=False).ids:
            return tokenizer, False
        plain = PreTrainedTokenizerFast.from_pretrained(folder)  # the file, with the settings of tokenizer_config.json
        return plain, ids_of(plain, text) != ids_of(tokenizer, text)
    except Exception as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error


def _with_template(tokenizer: Any, folder: Path, settings: ModelSettings | None) -> Any:
    if settings is not None:
        variables = template_variables(VARIABLES_KEY, settings.chat_template_kwargs)
        tokenizer = with_choice(tokenizer, settings.chat_template, variables, settings.day)
    if not tokenizer.chat_template:
        raise ConfigError(NO_TEMPLATE.format(folder))
    return tokenizer


def probe_of(tokenizer: Any) -> str:
    """The probe text, twice: behind a special token some tokenizers split otherwise than within a text."""
    return f"{PROBE}{tokenizer.eos_token or ''}{PROBE}"


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text` alone."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer` to `folder`, under the class name that every version of transformers knows.

    transformers 5 calls the class TokenizersBackend in tokenizer_config.json, which no earlier version can open.
    """
    tokenizer.save_pretrained(folder)
    file = folder / _CONFIG
    config = paths.read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        file.write_text(json.dumps(config | {"tokenizer_class": _GENERAL_CLASS}, indent=2, ensure_ascii=False) + "\n")


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer; that of an adapter may leave it to its base model."""
    return any(next(folder.glob(pattern), None) for pattern in paths.VOCABULARIES)


def engine_folder(folder: Path) -> Path:
    """The folder from which another program's AutoTokenizer opens the tokenizer of `folder` with its own ids.

    That is `folder`, or a copy of its tokenizer apart from the config.json by which transformers would build another.
    """
    if not tokenizer_facts(folder).rebuilt:
        return folder
    name = digest_of(tokenizer_files(folder))
    return made_once(
        paths.cache_folder() / "tokenizers" / name,
        _CONFIG,
        lambda making: save_tokenizer(open_tokenizer(folder), making),
    )


# Before anything is loaded


@dataclass(frozen=True)
class TokenizerFacts:
    """How a tokenizer and its chat template behave; `problem` says why they cannot be used, mostly nothing."""

    rebuilt: bool = False  # transformers builds another tokenizer than the file describes
    plain: bool = False  # its class is not needed: the file alone gives the same tokenizer
    end: str | None = None  # the token that the template puts behind an answer
    eos: str | None = None
    problem: str = ""

    def notes(self) -> list[str]:
        """Notes for the user, before training begins."""
        found = []
        if self.rebuilt:
            found.append("the tokenizer is read from its tokenizer.json: transformers' class for it gives other ids")
        if self.end is None and not self.problem:
            found.append(f"the chat template ends a turn with no special token: only {self.eos} ends a completion")
        elif self.end != self.eos:
            found.append(f"turns end with {self.end}, and texts with {self.eos}: sampling stops at both")
        return found


def notes_of_model(settings: ModelSettings, adapter: str | None = None) -> list[str]:
    """The terms of a packaged model, if it has any, and the notes on the tokenizer that `facts_of_model` finds."""
    facts = facts_of_model(settings, adapter)
    terms = [PACKAGED[settings.path].terms] if settings.path in PACKAGED else []
    return [*filter(None, terms), *(facts.notes() if facts is not None else [])]


def facts_of_model(settings: ModelSettings, adapter: str | None = None) -> TokenizerFacts | None:
    """The facts of the tokenizer of `settings`' model, or of the `adapter` it starts with, if it is on this machine.

    None for one that has to be downloaded or made first. Raises ConfigError for a path without a model.
    """
    path = paths.resolve_model_path(settings.path)
    folder = _folder_of(settings, adapter)
    if folder is None and path.endswith(paths.GGUF):
        return _facts_of_gguf(Path(path), settings)
    return tokenizer_facts(folder, settings) if folder is not None and has_tokenizer(folder) else None


def tokenizer_from_file(settings: ModelSettings) -> Any | None:
    """The tokenizer of `settings`' model from its tokenizer.json alone, which loads neither torch nor a model's class.

    None where that would be another one than `load_tokenizer` opens, or is not on this machine. Raises ConfigError for
    one without a chat template.
    """
    facts, folder = facts_of_model(settings), _folder_of(settings)
    if facts is None or folder is None or not facts.plain:
        return None
    from transformers import PreTrainedTokenizerFast

    return _with_template(PreTrainedTokenizerFast.from_pretrained(folder), folder, settings)


def _folder_of(settings: ModelSettings, adapter: str | None = None) -> Path | None:
    """The folder of the tokenizer of `settings`' model, or of the `adapter`, if it is on this machine."""
    found = folder_here(paths.resolve_model_path(settings.path), settings.revision)
    own = found if adapter is None else paths.resolve_adapter_path(adapter)
    folder = (own and adapters_tokenizer(own)) or found
    if folder is not None and paths.is_adapter_folder(folder):  # which left its tokenizer to its model
        return _folder_of(replace(settings, path=paths.adapter_base(folder), revision=None))
    return folder


def tokenizer_facts(folder: Path, settings: ModelSettings | None = None) -> TokenizerFacts:
    """The facts of the tokenizer in `folder` with the template that `settings` choose, cached by content.

    The first time this opens the tokenizer, which takes seconds.
    """
    known = hashlib.sha256(digest_of(tokenizer_files(folder)).encode())
    chosen = (settings.chat_template, settings.chat_template_kwargs) if settings is not None else (None, None)
    for each in chosen:
        content = Path(each).read_bytes() if each is not None and Path(each).is_file() else b""  # of a FILE.jinja
        known.update(repr((each, content)).encode())
    code = [Path(__file__), Path(__file__).parents[1] / "data" / "chat.py"]
    known.update(f"{installed_version('transformers')} {_model_type(folder)} {digest_of(code)}".encode())

    def found_out() -> dict[str, Any]:
        return asdict(_looked_at(folder, settings))

    file = paths.cache_folder() / "tokenizers" / f"{known.hexdigest()[:24]}.json"
    facts = remembered(file, found_out, lambda kept: TokenizerFacts(**kept), "the tokenizer is looked at")
    return _looked_at(folder, settings) if facts.problem else facts  # a problem names the folder that it was found in


def _looked_at(folder: Path, settings: ModelSettings | None) -> TokenizerFacts:
    rebuilt = plain = False
    try:
        _check_known(folder)
        tokenizer, rebuilt = _opened(folder)
        plain = _is_plain(tokenizer, folder)
        tokenizer = _with_template(tokenizer, folder, settings)
        end = end_of_turn(tokenizer)
    except ConfigError as error:
        return TokenizerFacts(rebuilt, plain, problem=str(error))
    end_token = None if end is None else tokenizer.convert_ids_to_tokens(end)
    return TokenizerFacts(rebuilt, plain, end_token, tokenizer.eos_token)


def _is_plain(tokenizer: Any, folder: Path) -> bool:
    """Whether the file alone gives this tokenizer: ids (those around a text too), special tokens, template."""
    if not (folder / _FILE).is_file():
        return False
    from transformers import PreTrainedTokenizerFast

    file, text = PreTrainedTokenizerFast.from_pretrained(folder), probe_of(tokenizer)
    one, other = (
        (each(text, verbose=False)["input_ids"], each.special_tokens_map, each.all_special_ids, each.chat_template)
        for each in (tokenizer, file)
    )
    return one == other


def _facts_of_gguf(file: Path, settings: ModelSettings) -> TokenizerFacts | None:
    """The one fact that a GGUF file gives before its tokenizer is converted: whether it has a chat template."""
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(str(file))
    except (ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as GGUF: {first_line(error)}; download it again") from error
    if settings.chat_template is None and not metadata.get("tokenizer.chat_template"):
        return TokenizerFacts(problem=NO_TEMPLATE.format(file))
    return None


def adapters_tokenizer(folder: Path) -> Path | None:
    """The folder of the tokenizer that was saved with an adapter, if any: beside it, or with a checkpoint's model."""
    if not paths.is_adapter_folder(folder):
        return None
    beside = folder.parent / "model" if folder.name == "adapter" else folder
    return next((each for each in (folder, beside) if has_tokenizer(each)), None)


def _check_known(folder: Path) -> None:
    """Raise ConfigError if transformers has no causal language model of the type that config.json names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if (kind := _model_type(folder)) and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        version = installed_version("transformers")
        raise ConfigError(
            f"{folder / 'config.json'} has model_type {kind}, which is not a causal language model that transformers "
            f"{version} knows: take another model"
        )


def tokenizer_files(folder: Path) -> list[Path]:
    """Every file that a tokenizer or its template may be read from."""
    patterns = (*paths.VOCABULARIES, "*token*.json", "*.jinja", "merges.txt")
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def _model_type(folder: Path) -> str:
    file = folder / "config.json"
    return str(paths.read_json(file).get("model_type") or "") if file.is_file() else ""


# Two tokenizers


def check_same_ids(tokenizer: Any, folder: Path, key: str) -> None:
    """Raise ConfigError, naming the first difference, unless the model in `folder` has the ids of `tokenizer`.

    `key` is the setting that names the folder. Chat templates may differ, and the numbers of embeddings.
    """
    own, its = tokenizer.get_vocab(), open_tokenizer(folder).get_vocab()
    if own == its:
        return
    apart = [token for token in own.keys() | its.keys() if own.get(token) != its.get(token)]
    first = min(apart, key=lambda token: (min(own.get(token, inf), its.get(token, inf)), token))
    entries = [f"id {ids[first]}" if first in ids else "no token" for ids in (own, its)]
    raise ConfigError(
        f"{key} has another tokenizer, so probabilities of tokens cannot be compared: of {len(apart):,} differences "
        f"the first is {first!r}, {entries[0]} of the model and {entries[1]} there; give one of the model's own family"
    )

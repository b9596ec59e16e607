"""The door to models under the name that the README gives."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.model.load import load_model as load_model
    from rlpost.model.load import save_model as save_model
    from rlpost.model.locate import locate_model as locate_model
    from rlpost.model.tokenizer import load_tokenizer as load_tokenizer

__getattr__, __dir__ = lazy_names(__name__, __file__)

